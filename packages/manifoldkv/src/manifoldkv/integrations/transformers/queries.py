"""The last queries of a prompt, layer by layer, for baselines that look at attention (SnapKV)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "manifoldkv_capture_queries"
_CAPTURED: ContextVar[tuple[dict[int, Tensor], int] | None] = ContextVar("manifoldkv_captured_queries", default=None)


@contextmanager
def capture_queries(model: Any, window: int) -> Iterator[dict[int, Tensor]]:
    """Collect the rotated queries ``[B, heads, window, D]`` of the last tokens of each forward, keyed by layer index.

    The model runs on scaled dot-product attention meanwhile and is restored on the way out.
    """
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
    usual = model.config._attn_implementation
    queries: dict[int, Tensor] = {}
    token = _CAPTURED.set((queries, window))
    model.set_attn_implementation(_NAME)
    try:
        yield queries
    finally:
        model.set_attn_implementation(usual)
        _CAPTURED.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    captured = _CAPTURED.get()
    if captured is not None:
        captured[0][module.layer_idx] = query[:, :, -captured[1] :].detach()
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
