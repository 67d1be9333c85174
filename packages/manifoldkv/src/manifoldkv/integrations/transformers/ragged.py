"""Per-head budgets: each head of a layer keeps a number of tokens of its own.

Heads are stored in one rectangle as wide as the fullest head, the others filled up in front; so the memory of a layer
follows its fullest head. The stock mask knows one length for all heads; inside ``compress`` an attention function puts
a mask per head in its place.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from manifoldkv.config import KVConfig
from manifoldkv.integrations.transformers.explain import Trace
from manifoldkv.integrations.transformers.layer import ManifoldLayer
from manifoldkv.kernels import gather_kv
from manifoldkv.scoring import score_keys
from manifoldkv.selection import select_adaptive

ATTENTION = "manifoldkv_per_head"
CURRENT: ContextVar[Any] = ContextVar("manifoldkv_current_cache", default=None)


class RaggedLayer(ManifoldLayer):
    """A full-attention layer whose heads share ``H n`` tokens; ``front[b, h]`` slots before a head's own are empty."""

    def _clear(self) -> None:
        super()._clear()
        self.front: Int64[Tensor, "batch heads"] | None = None
        self.step_front: Int64[Tensor, "batch heads"] | None = None  # of what the current step attends

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As :meth:`ManifoldLayer.update`; the heads must be attended with a mask each once they differ in length."""
        running = CURRENT.get()
        if self.front is not None and (running is None or self not in running.layers):
            raise ValueError(
                "this cache has budgets per head, which need an attention with a mask per head: run the model inside "
                "compress(model, head_budget='adaptive', ...)"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def fill(self) -> int:
        """Mean number of tokens a head holds, of the fullest row."""
        if self.front is None:
            return super().fill()
        return int((self.stored - self.front).double().mean(-1).max())

    def _evict(self, n: int, cfg: KVConfig) -> None:
        scores = self.scores(cfg, n)
        keep = select_adaptive(scores, n) & self.head_mask()
        if self.tracing and self.trace is None:
            self.trace = Trace.of(self.keys, scores, keep, self.valid_mask(), cfg.metric)
        counts = keep.sum(-1)
        width = int(counts.max())
        # the stable sort puts a head's kept slots last and in order, its dropped ones before them as filling
        indices = (
            keep.int().argsort(dim=-1, stable=True)[..., -width:] if width else keep.nonzero().view(*keep.shape[:2], 0)
        )
        positions = self.stored_positions().gather(-1, indices)
        self.keys, self.values = gather_kv(self.keys, self.values, indices, check=False)
        self.front, self.pads = width - counts, None
        self.positions = positions.where(self.head_mask(), -1)

    def head_mask(self) -> Bool[Tensor, "batch heads stored"]:
        """True at the slots that hold a token of the head."""
        batch, heads, stored = self.keys.shape[:3]
        if self.front is not None:
            return torch.arange(stored, device=self.keys.device) >= self.front[..., None]
        valid = self.valid_mask()
        if valid is None:
            return torch.ones((batch, heads, stored), dtype=torch.bool, device=self.keys.device)
        return valid[:, None].expand(batch, heads, stored)

    def scores(self, cfg: KVConfig, n: int) -> Float[Tensor, "batch heads stored"]:
        if self.front is None:
            return super().scores(cfg, n)
        batch, heads, stored, dim = self.keys.shape
        scores = score_keys(  # a mask per head: heads become rows
            self.keys.reshape(batch * heads, 1, stored, dim),
            cfg,
            self.head_mask().flatten(0, 1),
            n=n,
            positions=self.stored_positions().reshape(batch * heads, 1, stored),
            rotary=self.rotary,
            layer=self.index,
        )
        return scores.view(batch, heads, stored)

    def _note_padding(self, keys: Tensor) -> None:
        step = self._step_padding(self.logical, keys.shape[-2], keys)
        if self.front is None or step is None:
            super()._note_padding(keys)
        else:  # padding only comes before a row's first token, so nothing of that row is stored yet
            self.front = self.front + step[:, None]
            self.padded = step if self.padded is None else self.padded + step
        self.step_front = self.front

    def _row_tensors(self) -> tuple[str, ...]:
        return (*super()._row_tensors(), "front")


def attention_per_head(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # kvpress, once imported, passes it by position
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, with a mask per key-value head where the layer's heads differ in length."""
    cache = CURRENT.get()
    layer = None if cache is None else cache.layers[module.layer_idx]
    if isinstance(layer, RaggedLayer) and layer.step_front is not None:
        attention_mask = _head_causal_mask(layer.step_front, query.shape[2], key.shape[2])
        attention_mask = attention_mask.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, **kwargs)


def _head_causal_mask(
    front: Int64[Tensor, "batch heads"], step: int, width: int
) -> Bool[Tensor, "batch heads step width"]:
    slots = torch.arange(width, device=front.device)
    causal = slots <= torch.arange(width - step, width, device=front.device)[:, None]
    return causal & (slots >= front[..., None, None])


def register_attention() -> str:
    """Make the per-head attention known to transformers; returns its name."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_per_head)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    return ATTENTION
