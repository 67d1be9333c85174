"""One attention layer of a compressed cache: append, evict from what is stored, let the step attend everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from manifoldkv.config import KVConfig, Metric
from manifoldkv.integrations.transformers.explain import Trace
from manifoldkv.kernels import gather_kv
from manifoldkv.rope import Rotary
from manifoldkv.scoring import score_keys
from manifoldkv.selection import select, select_per_window
from manifoldkv.windows import tumbling_bounds


class CacheTrimError(ValueError):
    """A crop reaches tokens that were evicted, so the earlier state can't be restored."""


@dataclass
class LayerStats:
    """What one layer holds. Bytes count keys and values; ``dense_bytes`` is what an uncompressed cache would hold."""

    layer: int
    logical_length: int
    stored_length: int
    stored_bytes: int
    dense_bytes: int
    evictions: int
    metric: str


class ManifoldLayer(DynamicLayer):
    """A full-attention layer that keeps ``n`` tokens per key-value head.

    ``update`` returns the full keys and values of the step, so the attention of that step is exact; what it stores is
    the selection. ``get_seq_length`` is the *logical* length, so positions go on as if nothing had been evicted.

    With left padding the remaining pads stay in front (they score ``-inf`` and the order is ascending). A row keeps
    ``min(n, valid)`` valid tokens, so exactly ``max(0, stored - valid)`` pads remain, and these are the zeros that the
    model's 2-D mask has in its last ``stored`` columns: the stock mask code stays right with the offset
    ``logical - stored`` from ``get_mask_sizes``.
    """

    keys: Any  # Tensor [B, H, stored, D], or None before the first update, as in the base class
    values: Any

    def __init__(
        self,
        cfg: KVConfig,
        index: int,
        metric: Callable[[ManifoldLayer], str | None],
        step_padding: Callable[[int, int, Tensor], Tensor | None],
        rotary: Rotary | None = None,
    ):
        super().__init__()
        self.cfg, self.index, self.rotary = cfg, index, rotary
        self._metric, self._step_padding = metric, step_padding
        self.choose: Callable[[int, Tensor], Tensor] | None = None  # another rule than the metric, and its name
        self.label = "custom"
        self.tracing = False
        self._clear()

    def _clear(self) -> None:
        self.logical = 0
        self.evictions = 0
        self.metric_used: str = self.cfg.metric
        self.positions: Int64[Tensor, "batch heads stored"] | None = (
            None  # of stored tokens; None until the first eviction
        )
        self.pads: Int64[Tensor, " batch"] | None = None  # stored padding slots at the front of each row
        self.padded: Int64[Tensor, " batch"] | None = None  # padding slots seen, stored or not
        self.trace: Trace | None = None  # of the first eviction, where asked for
        self.waiting: int | None = None  # tokens to keep, where the cache evicts all layers at the end of the step
        self._decode_budget: int | None = None

    # -- the step -----------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, H, q, D]`` keys and values, evict if the phase says so, return everything this step attends."""
        self._check_step(key_states, value_states)
        first = self.logical == 0
        self._note_padding(key_states)
        if self.positions is not None:
            self.positions = torch.cat((self.positions, self._step_positions(key_states)), dim=-1)
        keys, values = super().update(key_states, value_states)
        self.logical += key_states.shape[-2]
        target = self._target(first, key_states.shape[-2])
        if target is not None and target < self.fill():
            self._evict_to(target)
        return keys, values

    def _check_step(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"layer {self.index}: keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in batch, heads "
                "or tokens"
            )
        if self.is_initialized and self.keys.numel() and self.keys.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"layer {self.index}: the cache holds {self.keys.shape[0]} rows and {self.keys.shape[1]} key-value "
                f"heads, but the step brings {keys.shape[0]} and {keys.shape[1]}; use a fresh ManifoldCache for "
                "another batch or model"
            )

    def _note_padding(self, keys: Tensor) -> None:
        step = self._step_padding(self.logical, keys.shape[-2], keys)
        if step is None:
            return
        zeros = torch.zeros_like(step)
        self.pads = (zeros if self.pads is None else self.pads) + step
        self.padded = (zeros if self.padded is None else self.padded) + step

    def _step_positions(self, keys: Tensor) -> Int64[Tensor, "batch heads step"]:
        """Logical positions (0 at a row's first valid token) of the tokens that this step appends."""
        steps = torch.arange(self.logical, self.logical + keys.shape[-2], device=keys.device).expand(keys.shape[0], -1)
        if self.padded is not None:
            steps = (steps - self.padded[:, None]).clamp(min=0)
        return steps[:, None].expand(-1, keys.shape[1], -1)

    def _target(self, first: bool, step: int) -> int | None:
        """Tokens to keep after this step, or ``None`` where the phase says to leave the store alone."""
        stored = self.fill()
        if first:
            self._decode_budget = self.cfg.keep_count(self.logical) if self.cfg.budget is None else self.cfg.budget
        phase = self.cfg.phase
        if phase == "chunked" and (first or step > 1):
            return min(self.cfg.keep_count(self.logical), stored)
        if phase in ("prefill", "both") and first:
            return self.cfg.keep_count(self.logical)
        if phase in ("decode", "both") and not first:
            budget = self._decode_budget if self._decode_budget is not None else stored
            return budget if stored >= budget + self.cfg.interval else None
        return None

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _evict_to(self, n: int) -> None:
        metric = self._metric(self)
        if metric is None:
            self.waiting = n
        else:
            self.evict(n, metric)

    @torch.no_grad()
    def evict(self, n: int, metric: str) -> None:
        """Keep the best ``n`` stored tokens of each head by ``metric``."""
        auto = self.cfg.metric == "auto" and self.choose is None
        self._evict(n, replace(self.cfg, metric=cast(Metric, metric)) if auto else self.cfg)
        self.evictions += 1
        self.waiting = None
        self.metric_used = metric

    def _evict(self, n: int, cfg: KVConfig) -> None:
        if self.choose is None:
            scores = self.scores(cfg, n)
            indices = self._choose(scores, n, cfg)
            self._note_trace(scores, indices, cfg)
        else:
            indices = self.choose(self.index, self.keys)
        positions = self.stored_positions()
        self.keys, self.values = gather_kv(self.keys, self.values, indices, check=False)
        self.positions = positions.gather(-1, indices)
        if self.pads is not None and self.padded is not None:
            self.pads = torch.minimum(self.pads, (n - (self.logical - self.padded)).clamp(min=0))

    def _note_trace(self, scores: Tensor, indices: Tensor, cfg: KVConfig) -> None:
        if self.tracing and self.trace is None:
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)
            self.trace = Trace.of(self.keys, scores, kept, self.valid_mask(), cfg.metric)

    def scores(self, cfg: KVConfig, n: int) -> Float[Tensor, "batch heads stored"]:
        """Scores of the stored keys as an eviction to ``n`` tokens sees them."""
        return score_keys(
            self.keys, cfg, self.valid_mask(), n=n, positions=self.positions, rotary=self.rotary, layer=self.index
        )

    def _choose(self, scores: Tensor, n: int, cfg: KVConfig) -> Int64[Tensor, "batch heads kept"]:
        if cfg.allocation != "per_window":
            mask = self.valid_mask()
            if mask is not None:  # a faulty key scores -inf as padding does, but only padding may stay in front
                scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(~mask[:, None], -torch.inf)
            return select(scores, n)
        if self.pads is None or not bool(self.pads.any()):
            return select_per_window(scores, n, tumbling_bounds(scores.shape[-1], cfg.window))
        rows = []
        for row, pads in enumerate(self.pads.tolist()):  # windows start at the first valid token of a row
            valid = scores.shape[-1] - pads
            own = (
                select_per_window(scores[row : row + 1, :, pads:], min(n, valid), tumbling_bounds(valid, cfg.window))
                + pads
            )
            front = torch.arange(n - own.shape[-1], device=own.device).expand(1, own.shape[1], -1)
            rows.append(torch.cat((front, own), dim=-1))
        return torch.cat(rows)

    def valid_mask(self) -> Tensor | None:
        """``[B, stored]``, true at tokens, false at padding; ``None`` where there is no padding."""
        if self.pads is None:
            return None
        return torch.arange(self.keys.shape[-2], device=self.keys.device) >= self.pads[:, None]

    def stored_positions(self) -> Int64[Tensor, "batch heads stored"]:
        """Logical position of each stored token among its row's valid ones (padding: 0)."""
        if self.positions is not None:
            return self.positions
        steps = torch.arange(self.keys.shape[-2], device=self.keys.device).expand(self.keys.shape[0], -1)
        if self.pads is not None:
            steps = (steps - self.pads[:, None]).clamp(min=0)
        return steps[:, None].expand(-1, self.keys.shape[1], -1)

    # -- transformers' cache interface --------------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """Tokens stored per head."""
        return self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0

    def fill(self) -> int:
        """Stored tokens per head that count against the budget."""
        return self.stored

    def get_seq_length(self) -> int:
        """Logical length: every token ever appended, evicted or not."""
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(stored + query_length, logical - stored)``: length and offset of the keys that the next step attends."""
        return self.stored + query_length, self.logical - self.stored

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None  # the base class of transformers 5.16 and 5.17 only zeroes them
        self.is_initialized = False
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a negative count, or (older form) the positive length to keep.

        Raises:
            CacheTrimError: the crop reaches tokens some head has evicted.
        """
        remove = self.check_crop(tokens_to_remove)
        if remove == 0:
            return
        self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]
        self.logical -= remove
        if self.positions is not None:
            self.positions = self.positions[..., :-remove]
        if self.pads is not None:
            self.pads = self.pads.clamp(max=self.keys.shape[-2])
        if self.padded is not None:
            self.padded = self.padded.clamp(max=self.logical)

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that :meth:`crop` will remove; changes nothing. Raises what ``crop`` raises."""
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(self.logical - tokens_to_remove, 0)
        if remove > self.logical:
            raise CacheTrimError(f"layer {self.index}: can't remove {remove} of {self.logical} tokens")
        if remove > self._intact():
            raise CacheTrimError(
                f"layer {self.index}: removing {remove} tokens reaches evicted ones; at most the last {self._intact()} "
                "are still whole (n_recent protects more)"
            )
        return remove

    def _intact(self) -> int:
        """How many of the last tokens every head still stores."""
        if self.positions is None:
            return self.stored
        pads = 0 if self.padded is None else self.padded[:, None, None]
        expected = torch.arange(self.logical - self.stored, self.logical, device=self.keys.device) - pads
        gone = self.positions != expected
        mask = self.valid_mask()
        if mask is not None:
            gone &= mask[:, None]  # a row with padding left has lost no token
        gone = gone.flip(-1).int()
        return int(torch.where(gone.any(-1), gone.argmax(-1), self.stored).min())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows: keys, values, positions and padding."""
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._rows(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def _rows(self, pick: Callable[[Tensor], Tensor]) -> None:
        if self.logical == 0:
            return
        self.keys, self.values = pick(self.keys), pick(self.values)
        for name in self._row_tensors():
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, pick(tensor))

    def _row_tensors(self) -> tuple[str, ...]:
        return ("positions", "pads", "padded")

    def stats(self) -> LayerStats:
        """Lengths, bytes, evictions and the metric last used."""
        stored = self.stored
        per_token = (
            0 if stored == 0 else (self.keys[:, :, 0].numel() + self.values[:, :, 0].numel()) * self.keys.element_size()
        )
        metric = self.metric_used
        return LayerStats(
            self.index, self.logical, stored, stored * per_token, self.logical * per_token, self.evictions, metric
        )
