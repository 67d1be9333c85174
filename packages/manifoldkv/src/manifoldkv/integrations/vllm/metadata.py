"""What attention sees of a step: each request's blocks without its gap, and the evictions the step ends with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manifoldkv.config import KVConfig
from manifoldkv.integrations.vllm import metrics
from manifoldkv.integrations.vllm.schedule import Schedule

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

logger = logging.getLogger("vllm.manifoldkv")
ATTRIBUTE = "manifoldkv_plan"


@dataclass(frozen=True)
class Eviction:
    """Rows of a step whose middle regions are compacted together, because they have equally many candidates.

    Attributes:
        source: int64 ``[R, n]``, blocks of the candidates: the middle region, then the newly evictable tokens.
        target: int64 ``[R, m]``, the middle region's blocks, the first ``m`` of ``source``.
    """

    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class Plan:
    """Evictions to carry out in each layer after its attention of this step."""

    evictions: tuple[Eviction, ...]
    scoring: KVConfig


def compact(
    common: CommonAttentionMetadata, schedule: Schedule, scoring: KVConfig, block: int
) -> tuple[CommonAttentionMetadata, Plan | None]:
    """The step as attention must see it, and the evictions it ends with.

    Row ``r`` had ``c = seq_len - query_len`` computed tokens before the step: the columns of ``gap(c)`` leave its block
    table (those behind move left, zeros fill up) and its length shrinks by as many tokens. RoPE positions and slots
    stay as they are. The tensors of ``common`` are shared with other groups and layers: they are copied, never changed.
    """
    if common.num_reqs == 0:
        return common, None
    ends = common.query_start_loc_cpu.numpy().astype(np.int64)
    after = _lengths(common)
    before = after - (ends[1 : len(after) + 1] - ends[: len(after)])
    done, due = (_events(schedule, counts) for counts in (before, after))
    _count_blocks(after, schedule.interval * done, block)
    try:
        pending = _pending(common, ends, done, due)
        plan = _plan(common, schedule, scoring, block, pending) if pending else None
    except Exception:  # noqa: BLE001 - serving goes on, as after a failed selection: the older tokens stay
        metrics.worker.failures += 1
        metrics.log_once(logger, "planning a step's evictions failed; the middle regions keep their older tokens")
        plan = None
    if not done.any():
        return common, plan
    if common.causal is not True:
        raise ValueError("manifoldkv can't serve attention that isn't causal; turn it off with MANIFOLDKV_BUDGET=0")
    return _without_gaps(common, schedule, after, schedule.interval * done, block), plan


def _lengths(common: CommonAttentionMetadata) -> np.ndarray:
    """Tokens of each row after the step. The host's copy is exact without speculative decoding, which is refused."""
    host = common.seq_lens_cpu_upper_bound
    lengths = common.seq_lens if host is None else host
    return lengths[: common.num_reqs].cpu().numpy().astype(np.int64)


def _events(schedule: Schedule, counts: np.ndarray) -> np.ndarray:
    """``Schedule.events`` over an array."""
    return np.maximum(0, (counts - schedule.gap_start - schedule.recent) // schedule.interval)


def _count_blocks(after: np.ndarray, gaps: np.ndarray, block: int) -> None:
    held = int((-(-(after - gaps) // block)).max(initial=0))
    metrics.worker.peak_blocks = max(metrics.worker.peak_blocks, held)


def _pending(
    common: CommonAttentionMetadata, ends: np.ndarray, done: np.ndarray, due: np.ndarray
) -> list[tuple[int, int, int]]:
    """``(row, events before, events after)`` of the rows that evict. Warm-up rows, without slots, evict nothing."""
    rows = np.flatnonzero(due > done)
    if len(rows) == 0:
        return []
    last = torch.from_numpy(ends[rows + 1] - 1).to(common.slot_mapping.device)
    real = (common.slot_mapping[last] >= 0).cpu().numpy()
    return [(int(row), int(done[row]), int(due[row])) for row in rows[real]]


def _plan(
    common: CommonAttentionMetadata,
    schedule: Schedule,
    scoring: KVConfig,
    block: int,
    pending: list[tuple[int, int, int]],
) -> Plan:
    table = common.block_table_tensor
    first, middle = schedule.sink // block, schedule.middle // block
    groups: dict[int, list[Tensor]] = {}
    for row, old, new in pending:
        start = (schedule.gap_start + schedule.interval * old) // block
        stop = (schedule.gap_start + schedule.interval * new) // block
        blocks = torch.cat([table[row, first : first + middle], table[row, start:stop]]).to(torch.int64)
        groups.setdefault(stop - start, []).append(blocks)
        metrics.worker.evictions += 1
        metrics.worker.tokens_evicted += schedule.interval * (new - old)
        metrics.worker.blocks_freed += stop - start
    evictions = (torch.stack(rows) for rows in groups.values())
    return Plan(tuple(Eviction(source, source[:, :middle]) for source in evictions), scoring)


def _without_gaps(
    common: CommonAttentionMetadata, schedule: Schedule, after: np.ndarray, gaps: np.ndarray, block: int
) -> CommonAttentionMetadata:
    table = common.block_table_tensor
    dropped = torch.from_numpy(gaps).to(table.device)[:, None]
    columns = torch.arange(table.shape[1], device=table.device)[None]
    source = columns + (columns >= schedule.gap_start // block) * (dropped // block)
    inside = source < table.shape[1]
    rows = table[: len(gaps)]
    compacted = torch.zeros_like(table)
    compacted[: len(gaps)] = torch.where(inside, rows.gather(1, source.clamp(max=table.shape[1] - 1)), 0)
    shorter: dict[str, Any] = {}
    for field in ("seq_lens", "seq_lens_cpu_upper_bound"):
        lengths = getattr(common, field)
        if lengths is not None:
            lengths = lengths.clone()
            lengths[: len(gaps)] -= torch.from_numpy(gaps).to(lengths)
            shorter[field] = lengths
    return replace(
        common,
        block_table_tensor=compacted,
        max_seq_len=int((after - gaps).max()),
        _num_computed_tokens_cache=None,
        **shorter,
    )
