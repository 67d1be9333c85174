"""Packed rows in any causal language model of transformers: attention implementation "dppo_packed".

Import this module once (it registers the implementation), then

    with packed_attention_of(model):
        logps = packed_logps(model, rows)

or load a model with `attn_implementation="dppo_packed"` and pass rows with restarting `position_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dppo.kernels import PackedLayout, packed_attention
from dppo.packed import PackedRow
from icml26_shared.errors import require

require("transformers", "dppo[transformers]")
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402 after the check that names the extra

NAME = "dppo_packed"
_PLAIN_LAYERS = {"full_attention", "attention"}


def packed_attention_forward(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens dim"],
    key: Float[Tensor, "1 kv_heads tokens dim"],
    value: Float[Tensor, "1 kv_heads tokens dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # before scaling, as in transformers' own functions: kvpress passes it by position
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. The layout comes as the model's keyword `packed_layout`; without one it is read
    off `position_ids`, which restart at each sequence.

    Raises:
        ValueError: a batch of several rows, dropout, or an attention variant with no packed form (sliding window,
            soft-cap, sinks, a cache).
    """
    if query.shape[0] != 1:
        raise ValueError(
            f"packed rows run one at a time, got a batch of {query.shape[0]}; lay them end to end in one row"
        )
    if dropout:
        raise ValueError("packed attention has no dropout; set the model's attention_dropout to 0")
    for name in ("sliding_window", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name}={others[name]!r}, which packed attention has not"
            )
    if key.shape[2] != query.shape[2]:
        raise ValueError("packed attention takes whole rows without a cache; call the model with use_cache=False")
    if packed_layout is None:
        if position_ids is None:
            raise ValueError("packed attention needs position_ids that restart at each sequence, or packed_layout")
        packed_layout = _layout_of(position_ids)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = packed_attention(q, k, v, packed_layout, scale=scaling)
    assert isinstance(out, Tensor)  # no lse was asked for
    return out[None], None


_last_layout: list[tuple[Tensor, PackedLayout]] = []


def _layout_of(position_ids: Tensor) -> PackedLayout:
    """One layout for all layers of a forward pass: they get the same tensor."""
    if _last_layout and _last_layout[0][0] is position_ids:
        return _last_layout[0][1]
    _last_layout[:] = [(position_ids, PackedLayout.from_position_ids(position_ids.reshape(-1)))]
    return _last_layout[0][1]


def _no_mask(*_: Any, **__: Any) -> None:
    """The layout says everything a mask could."""
    return


AttentionInterface.register(NAME, packed_attention_forward)
AttentionMaskInterface.register(NAME, _no_mask)


class UnsupportedModelError(ValueError):
    """The model cannot run packed rows."""


def check_packable(model: Any) -> None:
    """Refuses models whose layers carry state over a position reset, or look at other keys than full causal attention.

    Raises:
        UnsupportedModelError: says which layer or setting.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    advice = "run it with padding instead of packing (pack=False)"
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} carries a recurrent state across position resets; {advice}")
    for module in model.modules():
        kind = type(module).__name__
        if any(
            word in kind
            for word in ("Mamba", "GatedDeltaNet", "LinearAttention", "ShortConv", "RecurrentBlock", "RWKV", "Rwkv")
        ):
            raise UnsupportedModelError(f"{name} has {kind}, whose state ignores position resets; {advice}")
    other = set(getattr(config, "layer_types", None) or []) - _PLAIN_LAYERS
    if other:
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(sorted(other))}; {advice}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(f"{name} uses a sliding window of {config.sliding_window}; {advice}")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{name} does not take attention implementations by name; {advice}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; {advice}")


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Switches a model to the attention implementation `name`, and back."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def packed_attention_of(model: Any) -> Iterator[None]:
    """Switches a model to packed attention, and back. With gradient checkpointing the backward pass runs the layers
    again, so it must happen inside too.

    Raises:
        UnsupportedModelError: see `check_packable`.
    """
    check_packable(model)
    with attention_of(model, NAME):
        yield


def packed_logps(
    model: nn.Module, rows: Sequence[PackedRow], *, temperature: float = 1.0, entropy: bool = False
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Log-probabilities of all completion tokens, one forward pass a row.

    Args:
        model: under `packed_attention_of`, or loaded with `attn_implementation="dppo_packed"`.
        rows: of `dppo.packed.pack_sequences`.
        temperature: logits are divided by it.
        entropy: also return each position's entropy (in nats).

    Returns:
        (logps, entropies), by item: (tokens of its completion,) fp32; the second is empty unless asked for.
    """
    logps: dict[int, Tensor] = {}
    entropies: dict[int, Tensor] = {}
    for row in rows:
        output = model(
            input_ids=row.input_ids, position_ids=row.position_ids, packed_layout=row.layout,
            use_cache=False, logits_to_keep=row.predict,
        )  # fmt: skip
        logits = output.logits[0].float() / temperature
        normal = logits.logsumexp(-1)
        chosen = logits.gather(1, row.target[:, None]).squeeze(1) - normal
        logps.update(zip(row.items, chosen.split(row.counts), strict=True))
        if entropy:
            probabilities = (logits - normal[:, None]).exp()
            spread = normal - (probabilities * logits).sum(-1)
            entropies.update(zip(row.items, spread.split(row.counts), strict=True))
    return logps, entropies


def separate_logps(
    model: nn.Module, prompts: Sequence[Tensor], completions: Sequence[Tensor], *, temperature: float = 1.0
) -> list[Tensor]:
    """The same, one un-packed sequence after the other: what packing must equal."""
    result = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(torch.cat([prompt, completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits = logits.float() / temperature
        result.append(logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1))
    return result
