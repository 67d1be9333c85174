"""Replace the attention layers of a whole model: ``convert_model``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tucker_attention.attention import TuckerAttention
from tucker_attention.decomposition import mode_spectra
from tucker_attention.errors import UnsupportedAttention
from tucker_attention.integrations.hosts import HostAttention, install
from tucker_attention.ranks import allocate_ranks
from tucker_attention.readers import read_module
from tucker_attention.special_cases import tensors
from tucker_attention.spectra import attention_layers
from tucker_attention.weights import AttentionWeights


def convert_model(
    model: nn.Module,
    *,
    ranks: Sequence[Any] | None = None,
    energy: float | None = None,
    budget: int | None = None,
    calibration: Iterable[Any] | None = None,
    layers: str | Callable[[str], bool] | None = None,
    core: str | None = None,
    rope: str | None = None,
) -> nn.Module:
    """Replace attention modules by Tucker attention, in place.

    Args:
        model: timm ViTs, GPT-2, BERT, ViT and Llama-like models of transformers, or anything with
            `torch.nn.MultiheadAttention`.
        ranks: of every layer, (r1, r2, r3) or ((r1, r2, r3), (s1, s2, s3)).
        energy: ranks that keep this share of each mode's energy, layer by layer; 1.0 keeps the model.
        budget: attention parameters of all converted layers together, shared out by energy per parameter.
        calibration: inputs of the model (tensors or mappings of arguments): the error on what the layers see of them is
            minimised, instead of the error of the weights.
        layers: regular expression over module names, or a function of them; default all.
        core, rope: as in `TuckerAttention.from_weights`.

    Returns:
        The model. Without ranks, energy and budget the layers are exact.

    Raises:
        UnsupportedAttention: a chosen layer has a feature that cannot be carried (the model is left as it was), or
            there is none.
        ValueError: options that do not fit.
    """
    chosen = _chosen(model, layers)
    weights = {name: read_module(module) for name, module in chosen.items()}
    inputs = {} if calibration is None else collect_inputs(model, chosen, calibration)
    options: dict[str, dict[str, Any]] = {name: {"ranks": ranks, "energy": energy} for name in chosen}
    if budget is not None:
        if ranks is not None or energy is not None:
            raise ValueError("give one of ranks, energy and budget")
        options = {name: {"ranks": each} for name, each in _shared_out(weights, budget, rope).items()}
    made = {
        name: TuckerAttention.from_weights(
            each, **options[name], calibration=inputs.get(name), core=core, rope=rope
        ).train(model.training)
        for name, each in weights.items()
    }
    for index, (name, module) in enumerate(chosen.items()):
        install(model, name, module, made[name], index)
    remember(model)
    return model


def remember(model: nn.Module) -> None:
    """Write what was converted into ``model.config.tucker``, where a model has a config; saving keeps it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        config.tucker = {
            name: {"kind": module.kind, **module.tucker.config.to_json()}
            for name, module in model.named_modules()
            if isinstance(module, HostAttention)
        }


def collect_inputs(
    model: nn.Module, chosen: dict[str, nn.Module], calibration: Iterable[Any], most: int = 8192
) -> dict[str, Tensor]:
    """What each layer sees of the calibration's inputs: at most ``most`` tokens [n, d] a layer."""
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = arguments[0] if arguments else named.get("hidden_states", named.get("query"))
            held = sum(len(each) for each in seen[name])
            if isinstance(x, Tensor) and held < most:
                seen[name].append(x.detach().reshape(-1, x.shape[-1])[: most - held].cpu())

        return keep

    handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in chosen.items()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in calibration:
                model(**batch) if isinstance(batch, dict) or hasattr(batch, "keys") else model(batch)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    empty = [name for name, tokens in seen.items() if not tokens]
    if empty:
        raise ValueError(f"the calibration's inputs never reached {', '.join(empty)}; give at least one batch")
    return {name: torch.cat(tokens) for name, tokens in seen.items()}


def _chosen(model: nn.Module, layers: str | Callable[[str], bool] | None) -> dict[str, nn.Module]:
    wanted = layers if callable(layers) else (lambda name: layers is None or re.search(layers, name) is not None)
    found = dict(attention_layers(model))
    chosen = {name: module for name, module in found.items() if wanted(name)}
    if chosen:
        return chosen
    if found:
        raise ValueError(f"layers={layers!r} matches none of the attention layers: {', '.join(found)}")
    known = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    raise UnsupportedAttention(
        f"{type(model).__name__} has no attention module of a known kind (it has {', '.join(known) or 'none'})"
    )


def _shared_out(weights: dict[str, AttentionWeights], budget: int, rope: str | None) -> dict[str, Any]:
    """Ranks of every layer under one budget."""
    spectra = []
    for each in weights.values():
        spectra += [mode_spectra(tensor) for tensor in tensors(each)]
    ranks = allocate_ranks(spectra, budget)
    pairs = {}
    for index, (name, each) in enumerate(weights.items()):
        pre, post = ranks[2 * index], ranks[2 * index + 1]
        if each.rotary is not None and rope != "head" and pre[2] % 2:
            pre = pre[0], pre[1], max(2, pre[2] - 1)
        pairs[name] = pre, post
    return pairs
