"""Tucker attention in transformers: conversion keeps the model's class, cache and ``generate``.

After `tucker_attention.convert_model`, ``model.save_pretrained(folder)`` writes the factors, and the ranks under
``tucker`` in ``config.json``; :func:`from_pretrained` reads both. Latents are stored in transformers' own
dynamic cache (beams and cropping too; static caches are refused), one head of width r3 for keys and s3 for values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.errors import UserError, require
from tucker_attention.integrations.hosts import skeleton
from tucker_attention.kernels.masks import causal_mask

transformers = require("transformers", "transformers", distribution="tucker-attention")


def from_pretrained(folder: str | Path, *, dtype: Any = "auto", **options: Any) -> nn.Module:
    """A converted model that ``save_pretrained`` wrote.

    Args:
        folder: local folder.
        dtype: as in transformers.
        options: for the configuration.

    Raises:
        UserError: no such folder, no Tucker layers in its configuration, weights that are missing or do not fit.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: give a folder that save_pretrained() of a converted model wrote")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **options)
    layers = getattr(config, "tucker", None)
    if not isinstance(layers, dict) or not layers:
        raise UserError(f"{path}/config.json has no Tucker layers: convert_model() has not made this model")
    state = _read(path)
    model = _empty(config)
    try:
        for index, (name, plain) in enumerate(layers.items()):
            skeleton(model, name, plain, index)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"{path}: the weights or the configuration do not fit: {error}") from error
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied]
    if lost or unexpected:
        raise UserError(f"{path}: missing weights {lost[:3]}, unexpected weights {list(unexpected)[:3]}")
    held: Any = model
    held.tie_weights()
    if dtype == "auto":
        dtype = next(iter(state.values())).dtype
    return model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype).eval()


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path} has no *.safetensors weights")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from error
    return state


def _empty(config: Any) -> nn.Module:
    names = list(config.architectures or [])
    found = getattr(transformers, names[0], None) if names else None
    auto = transformers.AutoModel if found is None else found
    made: nn.Module = auto._from_config(config) if found is not None else auto.from_config(config)
    return made


def tucker_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention implementation ``"tucker"``: any number of query heads over one latent head of keys and of values.

    For a host layer that keeps its own projections: query [B, H, N, r3], key [B, 1, M, r3], value [B, 1, M, s3], widths
    that need not be equal; keys and values are expanded without a copy.
    """
    b, heads, n, width = query.shape
    if key.shape[1] != 1 or value.shape[1] != 1:
        raise ValueError(f"the attention implementation 'tucker' takes one key head, got {key.shape[1]}")
    wanted = options.get("is_causal")
    wanted = getattr(module, "is_causal", False) if wanted is None else wanted
    causal = bool(wanted) and attention_mask is None and n > 1
    if causal and n != key.shape[2]:  # torch's is_causal lets the first query see the first key alone
        attention_mask, causal = causal_mask(n, key.shape[2], query.device), False
    wide = max(width, value.shape[-1])  # torch's fused attention wants keys and values of one width
    found = F.scaled_dot_product_attention(
        F.pad(query, (0, wide - width)),
        F.pad(key, (0, wide - width)).expand(b, heads, -1, -1),
        F.pad(value, (0, wide - value.shape[-1])).expand(b, heads, -1, -1),
        attn_mask=attention_mask, dropout_p=dropout, is_causal=causal,
        scale=width**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return found[..., : value.shape[-1]].transpose(1, 2), None


def register() -> None:
    """Register the implementation: afterwards ``attn_implementation="tucker"`` is known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register("tucker", tucker_attention_forward)
    AttentionMaskInterface.register("tucker", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


register()
