"""How keys are checked at the door and cut into tiles and windows; shared by the operations of this folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from icml26_shared.kernels import Path, choose_path

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT_EPS = 1e-12  # least norm a key is divided by to make it a unit key
COSINE_EPS = 1e-8  # least norm in a cosine's denominator

_TILE_ELEMENTS = (2 << 20) // 4  # 2 MiB of float32: a tile and its work stay in the second-level caches of two cores
_LEAST_TOKENS = 512  # of one head in a tile, where there are so many: shorter rows vectorise badly
NUM_WARPS = 4
TOKENS_PER_PROGRAM = 256  # of a GPU program: many programs at any batch size, and the centroid's load is amortised


@dataclass(frozen=True)
class Tile:
    """A piece of keys ``[B, H, T, D]`` that holds ``windows`` whole windows of one length, or a part of one window."""

    rows: slice
    heads: slice
    tokens: slice
    windows: slice

    @property
    def count(self) -> int:
        return self.windows.stop - self.windows.start

    def of_keys(self, keys: Tensor) -> Tensor:
        """The piece as ``[b, h, windows, tokens, D]``, a view."""
        return keys[self.rows, self.heads, self.tokens].unflatten(2, (self.count, -1))

    def of_mask(self, mask: Tensor) -> Tensor:
        """The piece of a mask ``[B, T]`` as ``[b, 1, windows, tokens]``, a view."""
        return mask[self.rows, None, self.tokens].unflatten(2, (self.count, -1))


def check_keys(keys: Tensor) -> None:
    if not isinstance(keys, Tensor) or keys.ndim != 4:
        got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(f"keys must be a tensor of shape [batch, heads, tokens, dim], not {got}")
    if keys.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"keys of dtype {keys.dtype} are not supported; convert them to one of {names}")


def check_mask(mask: Tensor | None, keys: Tensor) -> Tensor | None:
    """``mask`` as bool on the keys' device."""
    if mask is None:
        return None
    expected = (keys.shape[0], keys.shape[2])
    if mask.shape != expected:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be [batch, tokens] = {expected}")
    return mask.to(device=keys.device, dtype=torch.bool)


def check_bounds(bounds: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """Window starts followed by ``length``; one window where ``bounds`` is None."""
    if bounds is None:
        return (0, length)
    checked = tuple(map(int, bounds))
    ascending = all(low < high for low, high in pairwise(checked))
    if checked != (0, 0) and (len(checked) < 2 or checked[0] != 0 or checked[-1] != length or not ascending):
        raise ValueError(
            f"bounds={list(checked[:6])}{'...' if len(checked) > 6 else ''} must be window starts followed by the "
            f"number of tokens: ascending from 0 to {length}"
        )
    return checked


def check_centroid(centroid: Tensor, keys: Tensor, bounds: tuple[int, ...], name: str) -> None:
    expected = (*keys.shape[:2], len(bounds) - 1, keys.shape[3])
    if centroid.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(centroid.shape)}; it must be [batch, heads, windows, dim] = {expected}"
        )


def pick_path(keys: Tensor, prefer: Path | None) -> Path:
    """`choose_path`, but float64 keys never take the Triton path: its kernels compute in float32."""
    path = choose_path(keys, prefer=prefer)
    if path == "triton" and keys.dtype == torch.float64:
        if prefer == "triton":
            raise TypeError("float64 keys have no Triton kernel; use float32, bfloat16 or float16, or prefer='torch'")
        return "torch"
    return path


def work_dtype(keys: Tensor) -> torch.dtype:
    """The dtype of sums and distances: float32, or float64 for float64 keys."""
    return torch.float64 if keys.dtype == torch.float64 else torch.float32


def tokens_per_tile(keys: Tensor) -> tuple[int, int]:
    """Heads and tokens of a tile."""
    vectors = max(_TILE_ELEMENTS // max(keys.shape[3], 1), 1)
    heads = min(keys.shape[1], max(vectors // _LEAST_TOKENS, 1))
    return heads, max(vectors // heads, 1)


def cut(keys: Tensor, bounds: tuple[int, ...]) -> Iterator[Tile]:
    """Cut keys into tiles of about 2 MiB of float32; no tile holds parts of two windows."""
    batch, all_heads, length, _ = keys.shape
    heads, tokens = tokens_per_tile(keys)
    rows = max(1, min(batch, tokens // max(length, 1))) if heads == all_heads else 1
    pieces = list(_pieces(bounds, tokens))
    for row in range(0, batch, rows):
        for head in range(0, all_heads, heads):
            row_slice, head_slice = slice(row, min(row + rows, batch)), slice(head, min(head + heads, all_heads))
            for token_slice, window_slice in pieces:
                yield Tile(row_slice, head_slice, token_slice, window_slice)


def _pieces(bounds: tuple[int, ...], limit: int) -> Iterator[tuple[slice, slice]]:
    """Slices of tokens and of windows: as many equal windows as ``limit`` tokens hold, or at most that much of one."""
    first, last = 0, len(bounds) - 1
    while first < last:
        width = bounds[first + 1] - bounds[first]
        stop = first + 1
        while stop < last and bounds[stop + 1] - bounds[stop] == width and bounds[stop + 1] - bounds[first] <= limit:
            stop += 1
        for start in range(bounds[first], bounds[stop], limit if stop == first + 1 else bounds[stop] - bounds[first]):
            end = min(start + limit, bounds[stop]) if stop == first + 1 else bounds[stop]
            yield slice(start, end), slice(first, stop)
        first = stop


def workspace(keys: Tensor) -> Tensor:
    """Flat memory for one tile's intermediate results."""
    heads, tokens = tokens_per_tile(keys)
    size = min(max(heads * tokens, 1) * keys.shape[3], keys.numel())
    return torch.empty(size, dtype=work_dtype(keys), device=keys.device)


def like(tile: Tensor, space: Tensor) -> Tensor:
    """The workspace in the shape of the tile."""
    return space[: tile.numel()].view(tile.shape)


def split_count(bounds: tuple[int, ...]) -> int:
    """GPU programs that share the longest window."""
    longest = max((high - low for low, high in pairwise(bounds)), default=0)
    return -(-longest // TOKENS_PER_PROGRAM)


@functools.lru_cache(maxsize=64)
def bounds_on(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """The bounds on the device; kept, since a model's layers share them."""
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def block_constants(dim: int, masked: bool) -> dict[str, int | float | bool]:
    """Constants of the kernels that read keys. A tile has 4096 numbers: 32 registers of each of 128 threads."""
    width = next_power_of_2(dim)
    tokens = max(min(4096 // width, TOKENS_PER_PROGRAM), 1)
    return {"DIM": dim, "BLOCK_D": width, "BLOCK_T": tokens, "TOKENS": TOKENS_PER_PROGRAM, "MASKED": masked}
