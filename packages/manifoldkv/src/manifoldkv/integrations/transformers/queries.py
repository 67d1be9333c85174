"""The last queries of a prompt, layer by layer, for baselines that look at attention (SnapKV)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "manifoldkv_capture_queries"


@dataclass(frozen=True)
class _Capture:
    window: int
    usual: str
    queries: dict[int, Tensor] = field(default_factory=dict)

    def attention(self, module: nn.Module) -> Callable[..., Any]:
        """The attention function that the model runs with; the eager one lives beside the model's own classes."""
        if self.usual == "eager":
            own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
            return own
        usual: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.usual]
        return usual


_CAPTURE: ContextVar[_Capture | None] = ContextVar("manifoldkv_captured_queries", default=None)


@contextmanager
def capture_queries(model: Any, window: int) -> Iterator[dict[int, Tensor]]:
    """Collect the rotated queries ``[B, heads, window, D]`` of the last tokens of each forward, keyed by layer index.

    The model computes what it always does and is restored on the way out.
    """
    capture = _Capture(window, model.config._attn_implementation)
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[capture.usual])
    token = _CAPTURE.set(capture)
    model.set_attn_implementation(_NAME)
    try:
        yield capture.queries
    finally:
        model.set_attn_implementation(capture.usual)
        _CAPTURE.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:  # args: kvpress, once imported, passes the dropout by position
    capture = _CAPTURE.get()
    if capture is None:
        raise RuntimeError("the model was left with the attention of capture_queries")
    capture.queries[module.layer_idx] = query[:, :, -capture.window :].detach()  # type: ignore[index]
    return capture.attention(module)(module, query, key, value, attention_mask, *args, **kwargs)
