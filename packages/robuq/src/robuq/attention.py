"""Attention at 8 bits: per-token absmax int8 for Q, K and V, and unsigned 8 bits with scale 1/255 for the
probabilities.

RobuQ (arXiv 2509.23582) keeps the two products of attention at a fixed 8 bits.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantised: Tensor):  # type: ignore[no-untyped-def]
        return quantised

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def, override]
        return grad, None


def int8_tokens(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """``round(x / s) s`` with ``s = max|x| / 127`` over the last axis; zeros stay zeros; straight-through gradient."""
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    codes = (wide / torch.where(scale == 0, 1.0, scale)).round().clamp(-127, 127)
    return _StraightThrough.apply(x, (codes * scale).to(x.dtype))  # type: ignore[no-any-return, no-untyped-call]


def unsigned8(p: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """Probabilities in [0, 1] rounded to multiples of 1/255; straight-through gradient."""
    codes = (p.detach().float() * 255).round().clamp(0, 255)
    return _StraightThrough.apply(p, (codes / 255).to(p.dtype))  # type: ignore[no-any-return, no-untyped-call]


def quantised_attention(
    query: Float[Tensor, "*batch q d"],
    key: Float[Tensor, "*groups k d"],
    value: Float[Tensor, "*groups k v"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*batch q v"]:
    """``softmax(Q K^T scale + mask) V`` with all four operands at 8 bits; arguments as torch's attention takes them.

    The products run in floating point on quantised values.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = int8_tokens(query) @ int8_tokens(key).transpose(-1, -2) * factor
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    p = F.dropout(scores.softmax(-1), dropout_p)
    return unsigned8(p) @ int8_tokens(value)


class QuantisedAttention(TorchFunctionMode):
    """While active, ``F.scaled_dot_product_attention`` runs at 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's hook for every function called inside."""
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return quantised_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class AttentionBits:
    """Hooks that put a model's forward passes under :class:`QuantisedAttention`; ``bits=None`` switches it off."""

    def __init__(self, bits: int | None) -> None:
        self.bits = bits
        self._modes: list[QuantisedAttention] = []
        self._warned = False

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before the model's forward."""
        if self.bits is not None:
            mode = QuantisedAttention()
            mode.__enter__()
            self._modes.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also when it raises."""
        if not self._modes:
            return
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        if not mode.calls and not self._warned and output is not None:  # None: the forward pass raised
            self._warned = True
            warnings.warn(
                "attn_bits=8 had no effect: the model calls no F.scaled_dot_product_attention; load it "
                "with attn_implementation='sdpa'",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_modes": []}


NAME = "robuq_attention"


def install_attention_bits(model: nn.Module, bits: int | None) -> AttentionBits:
    """Quantise the attention of a model from now on; a second call changes the bits."""
    hooks = getattr(model, NAME, None)
    if not isinstance(hooks, AttentionBits):
        hooks = AttentionBits(bits)
        setattr(model, NAME, hooks)
        model.register_forward_pre_hook(hooks.enter)
        model.register_forward_hook(hooks.leave, always_call=True)
    hooks.bits = bits
    return hooks
