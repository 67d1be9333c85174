"""Where the sequences of a packed row lie, and which blocks of the attention matrix they touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

if TYPE_CHECKING:
    from dppo.packing import Packing


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Segments of T packed tokens. Query i sees key j iff j <= i and both are of one segment, or j lies in the prefix
    of i's segment.

    Args:
        cu_seqlens: (S+1,) boundaries 0, l_0, l_0+l_1, ..., T; segments may be empty.
        prefix_start, prefix_length: (S,) the stretch every token of the segment sees besides; length 0 for none. It
            must end at or before the segment's start. Default: no prefixes.

    Raises:
        ValueError: boundaries that decrease or do not start at 0, prefixes outside [0, segment start].
    """

    cu_seqlens: Int64[Tensor, " segments+1"]
    prefix_start: Int64[Tensor, " segments"] | None = None
    prefix_length: Int64[Tensor, " segments"] | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        bounds = torch.as_tensor(self.cu_seqlens).cpu().to(torch.int64)
        if bounds.dim() != 1 or len(bounds) < 1 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise ValueError("cu_seqlens must have one dimension, start at 0 and not decrease")
        segments = len(bounds) - 1
        zeros = torch.zeros(segments, dtype=torch.int64)
        start = zeros if self.prefix_start is None else torch.as_tensor(self.prefix_start).cpu().to(torch.int64)
        length = zeros if self.prefix_length is None else torch.as_tensor(self.prefix_length).cpu().to(torch.int64)
        if start.shape != zeros.shape or length.shape != zeros.shape:
            raise ValueError(f"prefix_start and prefix_length need one entry for each of the {segments} segments")
        bad = (length < 0) | ((length > 0) & ((start < 0) | (start + length > bounds[:-1])))
        if bool(bad.any()):
            raise ValueError(
                f"the prefix of segment {int(bad.int().argmax())} must be a stretch that ends before the segment starts"
            )
        object.__setattr__(self, "cu_seqlens", bounds)
        object.__setattr__(self, "prefix_start", torch.where(length > 0, start, 0))
        object.__setattr__(self, "prefix_length", length)

    @classmethod
    def from_packing(cls, packing: Packing) -> PackedLayout:
        """The flat view of a packing."""
        bounds = packing.cu_seqlens()
        prefix = torch.tensor([s.prefix for s in packing.segments], dtype=torch.int64)
        has = prefix >= 0
        start = torch.where(has, bounds[prefix.clamp(min=0)] if len(prefix) else prefix, 0)
        sizes = bounds.diff()
        length = torch.where(has, sizes[prefix.clamp(min=0)] if len(prefix) else prefix, 0)
        return cls(bounds, start, length)

    @classmethod
    def from_position_ids(cls, position_ids: Int64[Tensor, " tokens"]) -> PackedLayout:
        """Segments start wherever the positions do not go up by one."""
        positions = position_ids.detach().cpu()
        starts = torch.nonzero(positions[1:] != positions[:-1] + 1).flatten() + 1
        edge = torch.tensor([len(positions)])
        first = torch.zeros(min(len(positions), 1), dtype=torch.int64)
        return cls(torch.cat([first, starts, edge]))

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.cu_seqlens[-1])

    def segments(self) -> list[tuple[int, int, int, int]]:
        """(start, length, prefix start, prefix length) of each segment."""
        start, length = self.cu_seqlens[:-1], self.cu_seqlens.diff()
        assert self.prefix_start is not None  # set in __post_init__
        assert self.prefix_length is not None
        return list(
            zip(start.tolist(), length.tolist(), self.prefix_start.tolist(), self.prefix_length.tolist(), strict=True)
        )

    def token_arrays(self, device: torch.device | str) -> Int32[Tensor, "3 tokens"]:
        """For each token: start of its segment, start of its prefix, end of its prefix."""
        key = ("tokens", str(device))
        if key not in self._cache:
            assert self.prefix_start is not None
            assert self.prefix_length is not None
            rows = torch.stack([self.cu_seqlens[:-1], self.prefix_start, self.prefix_start + self.prefix_length])
            spread = rows.repeat_interleave(self.cu_seqlens.diff(), 1)
            self._cache[key] = spread.to(device=device, dtype=torch.int32).contiguous()
        return self._cache[key]

    def dense_mask(self, device: torch.device | str = "cpu") -> Bool[Tensor, "tokens tokens"]:
        """The whole mask; for references and short rows."""
        own, begin, end = self.token_arrays(device)
        i = torch.arange(self.tokens, device=device)
        query, key = i[:, None], i[None, :]
        return ((key <= query) & (key >= own[:, None])) | ((key >= begin[:, None]) & (key < end[:, None]))

    def block_lists(
        self, block_m: int, block_n: int, device: torch.device | str
    ) -> tuple[Int32[Tensor, "..."], Int32[Tensor, "..."], Int32[Tensor, "..."], Int32[Tensor, "..."]]:
        """The pairs of (query block, key block) that meet the mask, as two compressed lists.

        Returns:
            (row_ptr, row_blocks, column_ptr, column_blocks): the key blocks of query block m are
            row_blocks[row_ptr[m] : row_ptr[m+1]], ascending; likewise the query blocks of each key block.
        """
        key = ("blocks", block_m, block_n, str(device))
        if key not in self._cache:
            touched = self._touched(block_m, block_n)
            by_row, by_column = np.nonzero(touched), np.nonzero(touched.T)
            arrays = (
                np.concatenate([[0], np.cumsum(touched.sum(1))]), by_row[1],
                np.concatenate([[0], np.cumsum(touched.sum(0))]), by_column[1],
            )  # fmt: skip
            self._cache[key] = tuple(torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays)
        return self._cache[key]

    def _touched(self, block_m: int, block_n: int) -> np.ndarray:
        touched = np.zeros((-(-self.tokens // block_m), -(-self.tokens // block_n)), dtype=bool)
        for start, length, prefix, prefix_length in self.segments():
            if not length:
                continue
            for m in range(start // block_m, (start + length - 1) // block_m + 1):
                last = min(start + length, (m + 1) * block_m) - 1
                touched[m, start // block_n : last // block_n + 1] = True
                if prefix_length:
                    touched[m, prefix // block_n : (prefix + prefix_length - 1) // block_n + 1] = True
        return touched
