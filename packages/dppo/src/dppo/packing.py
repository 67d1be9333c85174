"""Dense prompt packing: sequences into rows of a fixed number of tokens, in arrival order, with a look-ahead window.

Repeat: open a row with the item at the head of the queue, so that nothing starves; then, among the next W queued
items, take the longest that still fits (ties: the earliest), until none in the window fits. W = 1 is next-fit; a large
W approaches best-fit-decreasing while the order is roughly kept. An item at position k of the queue is placed in row k
at the latest.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

Overflow = Literal["error", "own_row", "truncate"]


@dataclass(frozen=True)
class Segment:
    """A stretch of a row: an item, or a prefix that items of the row share.

    Attributes:
        row, start, length: where it lies.
        item: index of the item, -1 for a prefix.
        prefix: index (in `Packing.segments`) of the prefix segment it continues, -1 if it stands alone.
        group: prefix id of a prefix segment, else None.
    """

    row: int
    start: int
    length: int
    item: int
    prefix: int = -1
    group: Any = None


@dataclass(frozen=True)
class Packing:
    """Which item lies in which row, and everything a packed forward needs.

    Tensors come in two views: "rows", (n_rows, width) with padding at the end of each row, and "flat", the valid tokens
    of all rows one after the other, as varlen attention wants them.

    Attributes:
        rows: item indices of each row, in order.
        lengths: (n,) tokens of each item (after truncation).
        widths: (n_rows,) tokens a row has room for.
        prefix_ids, prefix_lengths: of each item, or None; a prefix stands once in each row that needs it.
        truncated: items cut to the capacity.
    """

    rows: list[np.ndarray]
    lengths: np.ndarray
    widths: np.ndarray
    prefix_ids: Sequence[Any] | None = None
    prefix_lengths: np.ndarray | None = None
    truncated: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def segments(self) -> list[Segment]:
        """All segments, row by row; a prefix stands before the first item that needs it."""
        result: list[Segment] = []
        for row, items in enumerate(self.rows):
            start, placed = 0, {}
            for item in items.tolist():
                prefix = -1
                if self.prefix_ids is not None and self.prefix_lengths is not None:
                    group = self.prefix_ids[item]
                    if group not in placed:
                        placed[group] = len(result)
                        length = int(self.prefix_lengths[item])
                        result.append(Segment(row, start, length, -1, -1, group))
                        start += length
                    prefix = placed[group]
                length = int(self.lengths[item])
                result.append(Segment(row, start, length, item, prefix))
                start += length
        return result

    @property
    def tokens(self) -> int:
        """Valid tokens of all rows; a shared prefix counts once a row."""
        if self.prefix_ids is None:
            return int(self.lengths.sum())
        return sum(segment.length for segment in self.segments)

    @property
    def density(self) -> float:
        """Valid tokens / room of all rows; 1 for no rows."""
        room = int(self.widths.sum())
        return self.tokens / room if room else 1.0

    @property
    def width(self) -> int:
        """Length of the padded rows."""
        return int(self.widths.max()) if len(self.widths) else 0

    def _row_starts(self) -> np.ndarray:
        """Flat position at which each row starts."""
        used = np.zeros(len(self.rows) + 1, np.int64)
        for segment in self.segments:
            used[segment.row + 1] += segment.length
        return np.cumsum(used)

    def cu_seqlens(self) -> Int64[Tensor, " segments+1"]:
        """Boundaries of the segments in the flat view: 0, l_0, l_0 + l_1, ..."""
        return torch.nn.functional.pad(self._sizes().cumsum(0), (1, 0))

    def _sizes(self) -> Int64[Tensor, " segments"]:
        return torch.tensor([s.length for s in self.segments], dtype=torch.int64)

    def position_ids(self, *, flat: bool = False) -> Int64[Tensor, "..."]:
        """Position of each token within its own sequence: from 0, or from the prefix's length after a prefix."""
        sizes, bounds = self._sizes(), self.cu_seqlens()
        before = torch.tensor(
            [self.segments[s.prefix].length if s.prefix >= 0 else 0 for s in self.segments], dtype=torch.int64
        )
        shift = (bounds[:-1] - before).repeat_interleave(sizes)
        return self._place(torch.arange(len(shift)) - shift, flat, 0)

    def segment_ids(self, *, flat: bool = False) -> Int64[Tensor, "..."]:
        """Index of the segment of each token, -1 at padding."""
        sizes = self._sizes()
        return self._place(torch.arange(len(sizes)).repeat_interleave(sizes), flat, -1)

    def block_mask(self) -> Bool[Tensor, "rows width width"]:
        """Which key each query sees: itself and earlier ones of its own segment, and all of its prefix."""
        ids = self.segment_ids()
        prefix = torch.tensor([s.prefix for s in self.segments] + [-1])
        own = ids[:, :, None] == ids[:, None, :]
        causal = torch.arange(self.width)[:, None] >= torch.arange(self.width)
        shared = (prefix[ids][:, :, None] == ids[:, None, :]) & (prefix[ids] >= 0)[:, :, None]
        valid = (ids >= 0)[:, :, None] & (ids >= 0)[:, None, :]
        return ((own & causal) | shared) & valid

    def pack(
        self, items: Sequence[Shaped[Tensor, "..."]], prefixes: dict[Any, Tensor] | None = None, *,
        flat: bool = False, fill: float = 0,
    ) -> Shaped[Tensor, "..."]:  # fmt: skip
        """Lays one tensor (length, ...) an item, and one a prefix id, into the rows."""
        pieces = []
        for s in self.segments:
            piece = items[s.item] if s.item >= 0 else (prefixes or {})[s.group]
            if len(piece) < s.length:
                raise ValueError(f"item {s.item} has {len(piece)} entries, {s.length} are needed")
            pieces.append(piece[: s.length])
        return self._place(torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64), flat, fill)

    def unpack(self, packed: Shaped[Tensor, "..."], *, flat: bool = False) -> list[Shaped[Tensor, "..."]]:
        """The items' stretches, in the order of the items; the inverse of `pack`."""
        starts = self._row_starts()
        result: list[Tensor | None] = [None] * len(self.lengths)
        for s, begin in zip(self.segments, self.cu_seqlens().tolist(), strict=False):
            if s.item >= 0:
                row = packed if flat else packed[s.row]
                at = begin if flat else begin - int(starts[s.row])
                result[s.item] = row[at : at + s.length]
        return result  # type: ignore[return-value]

    def _place(self, joined: Tensor, flat: bool, fill: float) -> Tensor:
        """The flat view, or the rows of it."""
        if flat:
            return joined
        out = joined.new_full((len(self.rows), self.width, *joined.shape[1:]), fill)
        starts = self._row_starts()
        for row in range(len(self.rows)):
            out[row, : starts[row + 1] - starts[row]] = joined[starts[row] : starts[row + 1]]
        return out


def pack_window(
    lengths: Sequence[int] | np.ndarray | Tensor,
    capacity: int,
    window: int = 64,
    *,
    prefix_ids: Sequence[Any] | None = None,
    prefix_lengths: Sequence[int] | np.ndarray | None = None,
    overflow: Overflow = "error",
) -> Packing:
    """Packs items in arrival order with a look-ahead window.

    Args:
        lengths: tokens of each item, >= 0 (without its prefix, where prefixes are given).
        capacity: C, tokens of a row.
        window: W >= 1, how many queued items after the head are looked at.
        prefix_ids: a hashable id an item; items of one id share a prefix (their prompt), stored once a row. Among the
            window's items that fit, those whose prefix is in the row already come first.
        prefix_lengths: tokens of each item's prefix, the same for equal ids.
        overflow: what to do with an item longer than C: "error", "own_row" (a row of that length), or "truncate".

    Returns:
        Packing. Cost: O(n log W) comparisons without prefixes, O(n·W) with.

    Raises:
        ValueError: negative lengths, capacity or window < 1, an item that does not fit with overflow="error".
    """
    items, widths_of, prefix, cut = _checked(lengths, capacity, prefix_ids, prefix_lengths, overflow)
    if window < 1:
        raise ValueError(f"window={window}: at least 1 queued item must be looked at")
    if prefix is None:
        rows = _window_rows(items.tolist(), capacity, window)
    else:
        rows = _window_rows_with_prefixes(items.tolist(), list(prefix_ids or ()), prefix.tolist(), capacity, window)
    return _packing(rows, items, widths_of, capacity, prefix_ids, prefix, cut)


def _window_rows(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """The window as a sorted list of keys length·n + (n−1−index): the largest key under a bound is the longest
    item that fits, the earliest among equals."""
    n = len(lengths)
    queue: list[int] = []
    taken = bytearray(n)
    rows: list[list[int]] = []
    ahead = head = 0
    while True:
        while head < n and taken[head]:
            head += 1
        if head == n:
            return rows
        if head < ahead:
            del queue[bisect.bisect_left(queue, lengths[head] * n + n - 1 - head)]
        else:
            ahead = head + 1
        taken[head] = 1
        row, room = [head], capacity - lengths[head]
        while True:
            while len(queue) < window and ahead < n:
                bisect.insort(queue, lengths[ahead] * n + n - 1 - ahead)
                ahead += 1
            at = bisect.bisect_left(queue, (room + 1) * n) - 1
            if at < 0:
                break
            key = queue.pop(at)
            item = n - 1 - key % n
            taken[item] = 1
            row.append(item)
            room -= lengths[item]
        rows.append(row)


def _window_rows_with_prefixes(
    lengths: list[int], ids: list[Any], prefix: list[int], capacity: int, window: int
) -> list[list[int]]:
    queue = list(range(len(lengths)))[::-1]  # the head is at the end
    rows: list[list[int]] = []
    while queue:
        head = queue.pop()
        row, present, room = [head], {ids[head]}, capacity - lengths[head] - prefix[head]
        while True:
            best, best_key = -1, (-1, -1)
            for back in range(1, min(window, len(queue)) + 1):
                item = queue[-back]
                shared = ids[item] in present
                cost = lengths[item] + (0 if shared else prefix[item])
                if cost <= room and (int(shared), cost) > best_key:
                    best, best_key = back, (int(shared), cost)
            if best < 0:
                break
            item = queue.pop(-best)
            row.append(item)
            present.add(ids[item])
            room -= best_key[1]
        rows.append(row)
    return rows


def pack_next_fit(lengths: Any, capacity: int, *, overflow: Overflow = "error") -> Packing:
    """Each item into the open row if it fits, else into a new one: `pack_window` with W = 1."""
    return pack_window(lengths, capacity, 1, overflow=overflow)


def pack_first_fit_decreasing(lengths: Any, capacity: int, *, overflow: Overflow = "error") -> Packing:
    """Longest first, into the first row with room; the order of arrival is lost. O(n log n) by a tree of maxima."""
    items, widths_of, _, cut = _checked(lengths, capacity, None, None, overflow)
    size = 1 << max(len(items) - 1, 0).bit_length()
    room = [0] * size + [capacity] * size
    for node in range(size - 1, 0, -1):
        room[node] = capacity
    rows: list[list[int]] = []
    for item in np.argsort(-items, kind="stable").tolist():
        need, node = int(items[item]), 1
        if need > capacity:
            rows.append([item])
            node = size + len(rows) - 1
            room[node] = -1
        else:
            while node < size:
                node = 2 * node if room[2 * node] >= need else 2 * node + 1
            if node - size == len(rows):
                rows.append([])
            rows[node - size].append(item)
            room[node] -= need
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return _packing(rows, items, widths_of, capacity, None, None, cut)


def pack_best_fit_decreasing(lengths: Any, capacity: int, *, overflow: Overflow = "error") -> Packing:
    """Longest first, into the fullest row with room; the order of arrival is lost."""
    items, widths_of, _, cut = _checked(lengths, capacity, None, None, overflow)
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    rows: list[list[int]] = []
    for item in np.argsort(-items, kind="stable").tolist():
        need = int(items[item])
        at = bisect.bisect_left(open_rows, (need, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
        else:
            room, row = max(capacity, need), len(rows)
            rows.append([])
        rows[row].append(item)
        bisect.insort(open_rows, (room - need, row))
    return _packing(rows, items, widths_of, capacity, None, None, cut)


def pad_batches(lengths: Any, batch_size: int = 8) -> Packing:
    """No packing: batches in arrival order, every item padded to the longest of its batch; one item a row."""
    items = _length_array(lengths)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    longest = [items[i : i + batch_size].max() for i in range(0, len(items), batch_size)]
    widths = np.repeat(np.array(longest, dtype=np.int64), batch_size)[: len(items)]
    return Packing([np.array([i]) for i in range(len(items))], items, widths)


def _length_array(lengths: Any) -> np.ndarray:
    values = lengths.cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"lengths must be whole numbers of tokens, got {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"lengths must have one dimension, got shape {values.shape}")
    if (values < 0).any():
        bad = int(np.argmax(values < 0))
        raise ValueError(f"length of item {bad} is {values[bad]}; lengths are >= 0")
    return values.astype(np.int64)


def _checked(
    lengths: Any, capacity: int, prefix_ids: Sequence[Any] | None, prefix_lengths: Any, overflow: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """(lengths, tokens each item needs with its prefix, prefix lengths, truncated items)."""
    if overflow not in ("error", "own_row", "truncate"):
        raise ValueError(f"overflow={overflow!r}: must be 'error', 'own_row' or 'truncate'")
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: a row must have room for at least 1 token")
    items = _length_array(lengths)
    prefix = None
    if (prefix_ids is None) != (prefix_lengths is None):
        raise ValueError("prefix_ids and prefix_lengths must be given together")
    if prefix_ids is not None:
        prefix = _length_array(prefix_lengths)
        _check_prefixes(items, prefix_ids, prefix)
    need = items if prefix is None else items + prefix
    long = np.flatnonzero(need > capacity)
    if len(long) and overflow == "error":
        raise ValueError(
            f"item {long[0]} has {need[long[0]]} tokens, a row {capacity} ({len(long)} such items); raise the "
            "capacity or choose overflow='own_row' or overflow='truncate'"
        )
    if not len(long) or overflow == "own_row":
        return items, need, prefix, np.zeros(0, np.int64)
    room = capacity - (0 if prefix is None else prefix)
    if np.any(np.asarray(room) < 0):
        raise ValueError(f"a prefix alone is longer than the capacity {capacity}; truncating items cannot help")
    items = np.minimum(items, room)
    return items, items if prefix is None else items + prefix, prefix, long


def _check_prefixes(items: np.ndarray, ids: Sequence[Any], prefix: np.ndarray) -> None:
    if not len(items) == len(ids) == len(prefix):
        raise ValueError(f"{len(items)} items, {len(ids)} prefix_ids, {len(prefix)} prefix_lengths; one each is needed")
    known: dict[Any, int] = {}
    for group, length in zip(ids, prefix.tolist(), strict=True):
        if known.setdefault(group, length) != length:
            raise ValueError(
                f"prefix {group!r} has lengths {known[group]} and {length}; items of one id share one prefix"
            )


def _packing(
    rows: list[list[int]], items: np.ndarray, need: np.ndarray, capacity: int,
    prefix_ids: Sequence[Any] | None, prefix: np.ndarray | None, cut: np.ndarray,
) -> Packing:  # fmt: skip
    widths = np.array([max(capacity, int(need[row[0]])) for row in rows], dtype=np.int64)
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    return Packing(arrays, items, widths, prefix_ids, prefix, cut)
