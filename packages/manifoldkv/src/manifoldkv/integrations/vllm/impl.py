"""The worker's side: after a layer's attention of the step, keep the best keys of the middle region."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from manifoldkv.config import KVConfig
from manifoldkv.integrations.vllm import layout, metrics
from manifoldkv.integrations.vllm.metadata import ATTRIBUTE, Eviction, Plan
from manifoldkv.scoring import score_keys
from manifoldkv.selection import select

logger = logging.getLogger("vllm.manifoldkv")
_layouts: dict[tuple[Any, ...], layout.BlockLayout] = {}


class EvictingImpl:
    """Mixin before a backend's attention implementation. Without a plan in the metadata it changes nothing."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)  # type: ignore[misc]
        plan = getattr(attn_metadata, ATTRIBUTE, None)
        if plan is not None:
            evict(self, layer, kv_cache, plan)
        return result


@torch.no_grad()
def evict(impl: Any, layer: Any, kv_cache: Tensor, plan: Plan) -> None:
    """Carry out a step's evictions in one layer.

    The scheduler frees the gap whatever happens here, so an error must not leave attention without valid tokens: the
    rows it hits keep what their middle region held, which loses the newly evictable tokens and nothing else.
    """
    for eviction in plan.evictions:
        try:
            _compact(impl, layer, kv_cache, eviction, plan.scoring)
        except Exception:  # noqa: BLE001 - serving goes on with the older tokens, see above
            rows = len(eviction.source)
            if rows == 1:
                metrics.worker.failures += 1
                metrics.log_once(logger, "selecting tokens failed; the middle region keeps its older tokens")
                continue
            for row in range(rows):  # one request's faulty keys are no reason to fail its neighbours
                single = Eviction(eviction.source[row : row + 1], eviction.target[row : row + 1])
                evict(impl, layer, kv_cache, Plan((single,), plan.scoring))


def _compact(impl: Any, layer: Any, kv_cache: Tensor, eviction: Eviction, scoring: KVConfig) -> None:
    """Move the best ``M`` tokens per head, in their order, to the front of the middle region.

    Heads keep different tokens, so a block's slots hold different tokens per head: attention over past tokens doesn't
    depend on their order, and their positions are in the keys already.
    """
    cells = layout_of(impl, layer, kv_cache)
    keys, values = cells.read(kv_cache, eviction.source)
    keep = eviction.target.shape[1] * cells.block
    kept = select(score_keys(keys, scoring, n=keep), keep)[..., None]
    keys, values = (tokens.gather(2, kept.expand(*kept.shape[:3], tokens.shape[-1])) for tokens in (keys, values))
    cells.write(kv_cache, eviction.target, keys, values)


def layout_of(impl: Any, layer: Any, kv_cache: Tensor) -> layout.BlockLayout:
    """The verified layout of a layer's cache; derived once for all layers alike."""
    shape = (*kv_cache.shape[1:], *kv_cache.stride())
    known = (type(impl), getattr(layer, "isa", None), impl.head_size, kv_cache.dtype, kv_cache.device, shape)
    if known not in _layouts:

        def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            impl.do_kv_cache_update(layer, key, value, cache, slots)

        _layouts[known] = layout.derive(write, kv_cache, impl.head_size)
    return _layouts[known]
