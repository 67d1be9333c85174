"""Sums over the keys of each head and window: what centroids are made of.

With ``V`` the valid, finite keys of a window: ``total = sum_V k``, ``squares = sum_V ||k||^2``, ``count = |V|``; with
``unit`` the total is ``sum_V k / ||k||``. The mean of keys is the centroid of ManifoldKV (arXiv 2602.08343), the mean
of unit keys the anchor of KeyDiff (arXiv 2504.15364).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icml26_shared.kernels import Path, jit, launching_on, triton_language
from manifoldkv.kernels import layout

tl = triton_language()


@dataclass(frozen=True)
class KeyStats:
    """Sums per batch row, head and window; float32, or float64 for float64 keys."""

    total: Float[Tensor, "batch heads windows dim"]
    squares: Float[Tensor, "batch heads windows"]
    count: Float[Tensor, "batch heads windows"]

    def mean(self) -> Float[Tensor, "batch heads windows dim"]:
        """``total / count``; zeros where a window has no valid key."""
        return self.total / self.count.clamp(min=1)[..., None]


@torch.no_grad()
def key_stats(
    keys: Float[Tensor, "batch heads tokens dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    bounds: Sequence[int] | None = None,
    *,
    unit: bool = False,
    prefer: Path | None = None,
) -> KeyStats:
    """Sum of keys, sum of squared norms and number of keys, per head and window. No gradient is recorded.

    Keys with a NaN or an infinity are left out, like padding. One pass over the keys; each stretch of keys is summed in
    float32 and the stretches in float64, in a fixed order, so that repeated calls agree bit for bit.

    Args:
        keys: ``[B, H, T, D]``; float32, bfloat16, float16 or float64; any strides.
        mask: ``[B, T]``, true where valid; default all.
        bounds: window starts followed by ``T``, ascending; default one window ``[0, T]``.
        unit: sum ``k / max(||k||, 1e-12)`` instead of ``k``.
        prefer: ``"triton"``, ``"cpu"`` or ``"torch"``; default by device (`icml26_shared.kernels.choose_path`).

    Raises:
        TypeError: another dtype. ValueError: a wrong shape, wrong bounds, or a path these tensors cannot take.
    """
    return _stats(keys, mask, bounds, unit, prefer)


@torch.no_grad()
def centroids(
    keys: Float[Tensor, "batch heads tokens dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    bounds: Sequence[int] | None = None,
    *,
    unit: bool = False,
    prefer: Path | None = None,
) -> Float[Tensor, "batch heads windows dim"]:
    """Mean of the valid, finite keys (``unit``: of the unit keys) of each head and window. See `key_stats`."""
    return _stats(keys, mask, bounds, unit, prefer, squares=False).mean()


def _stats(
    keys: Tensor,
    mask: Tensor | None,
    bounds: Sequence[int] | None,
    unit: bool,
    prefer: Path | None,
    squares: bool = True,
) -> KeyStats:
    """`key_stats`; without ``squares`` their sum may be left at 0 where it would cost time."""
    layout.check_keys(keys)
    mask = layout.check_mask(mask, keys)
    checked = layout.check_bounds(bounds, keys.shape[2])
    path = layout.pick_path(keys, prefer)
    if keys.numel() == 0:
        sums = keys.new_zeros((*keys.shape[:2], len(checked) - 1, keys.shape[3]), dtype=layout.work_dtype(keys))
        return KeyStats(sums, sums.sum(-1), sums.sum(-1))
    if path == "cpu":
        return _key_stats_cpu(keys, mask, checked, unit, squares)
    if path == "torch":
        return key_stats_reference(keys, mask, checked, unit)
    with launching_on(keys):
        return _key_stats_triton(keys, mask, checked, unit)


def key_stats_reference(keys: Tensor, mask: Tensor | None, bounds: tuple[int, ...], unit: bool) -> KeyStats:
    """The formulas in plain torch; float64 keys give the float64 answer."""
    keys = keys.to(layout.work_dtype(keys))
    valid = keys.isfinite().all(-1)
    if mask is not None:
        valid = valid & mask[:, None]
    keys = keys.where(valid[..., None], 0)
    norms = keys.norm(dim=-1)
    vectors = keys / norms.clamp(min=layout.UNIT_EPS)[..., None] if unit else keys

    def per_window(values: Tensor) -> Tensor:
        pieces = [values[:, :, low:high].sum(2) for low, high in pairwise(bounds)]
        return torch.stack(pieces, dim=2)

    return KeyStats(per_window(vectors), per_window(norms.square()), per_window(valid.to(keys.dtype)))


def _key_stats_cpu(
    keys: Tensor, mask: Tensor | None, bounds: tuple[int, ...], unit: bool, with_squares: bool
) -> KeyStats:
    batch, heads, _, dim = keys.shape
    longest = max(high - low for low, high in pairwise(bounds))
    whole = longest <= layout.tokens_per_tile(keys)[1]  # no window is summed in several pieces
    dtype = layout.work_dtype(keys) if whole else torch.float64
    sums = keys.new_zeros((batch, heads, len(bounds) - 1, dim + 2), dtype=dtype)
    space = layout.workspace(keys)
    for tile in layout.cut(keys, bounds):
        part = tile.of_keys(keys)
        weights = None if mask is None else tile.of_mask(mask)
        total, squares, count = _sum_tile(part, weights, space, unit, with_squares)
        if not bool(total.isfinite().all()):
            total, squares, count = _sum_faulty_tile(part, weights, unit)
        target = sums[tile.rows, tile.heads, tile.windows]
        target[..., :dim] += total
        if squares is not None:
            target[..., dim] += squares
        target[..., dim + 1] += count
    return _split(sums.to(layout.work_dtype(keys)), dim)


def _sum_tile(
    part: Tensor, valid: Tensor | None, space: Tensor, unit: bool, with_squares: bool
) -> tuple[Tensor, Tensor | None, Tensor | int]:
    """Sums over a tile ``[b, h, windows, tokens, D]``; a NaN or infinity anywhere in it shows up in the total."""
    work = layout.like(part, space)
    if part.dtype != work.dtype:
        part = work.copy_(part)
    weights = None if valid is None else valid.to(work.dtype)
    squares = None
    if unit or with_squares:
        norms = torch.linalg.vector_norm(part, dim=-1)
        squared = norms.square()
        squares = (squared if weights is None else squared * weights).sum(-1)
        if unit:
            inverse = norms.clamp_(min=layout.UNIT_EPS).reciprocal_()
            weights = inverse if weights is None else inverse * weights
    weighted = part if weights is None else torch.mul(part, weights[..., None], out=work)
    return weighted.sum(3), squares, part.shape[3] if valid is None else valid.sum(-1)


def _sum_faulty_tile(part: Tensor, valid: Tensor | None, unit: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same in float64 without the keys that hold a NaN or an infinity."""
    good = part.isfinite().all(-1)
    if valid is not None:
        good = good & valid
    clean = part.double().where(good[..., None], 0)
    total, squares, _ = _sum_tile(clean, good, torch.empty_like(clean).flatten(), unit, with_squares=True)
    return total, squares, good.sum(-1)


def _split(sums: Tensor, dim: int) -> KeyStats:
    return KeyStats(sums[..., :dim], sums[..., dim], sums[..., dim + 1])


@jit
@no_type_check
def key_stats_kernel(
    keys_ptr,
    mask_ptr,
    bounds_ptr,
    partial_ptr,
    heads,
    splits,
    windows,
    stride_b,
    stride_h,
    stride_t,
    stride_d,
    stride_mask,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    UNIT_EPS: tl.constexpr,
):
    """Partial sums of one stretch of TOKENS tokens: DIM of the total, then squares, then count."""
    piece = tl.program_id(0) % (windows * splits)
    row_head = (tl.program_id(0) // (windows * splits)).to(tl.int64)
    window, split = piece // splits, piece % splits
    batch = row_head // heads
    begin = tl.load(bounds_ptr + window) + split * TOKENS
    end = tl.minimum(begin + TOKENS, tl.load(bounds_ptr + window + 1))

    columns = tl.arange(0, BLOCK_D)
    base = keys_ptr + batch * stride_b + (row_head % heads) * stride_h + columns[None, :] * stride_d
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    count = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        tokens = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        valid = tokens < end
        inside = valid[:, None] & (columns < DIM)[None, :]
        tile = tl.load(base + tokens[:, None] * stride_t, mask=inside, other=0.0).to(tl.float32)
        if MASKED:
            valid = valid & (tl.load(mask_ptr + batch * stride_mask + tokens, mask=valid, other=0) != 0)
        faulty = tl.where(tl.abs(tile) < float("inf"), 0, 1)  # a NaN compares false
        valid = valid & (tl.max(faulty, axis=1) == 0)
        tile = tl.where(valid[:, None], tile, 0.0)
        squared = tl.sum(tile * tile, axis=1)
        squares += squared
        count += valid.to(tl.float32)
        if UNIT:
            tile = tile / tl.maximum(tl.sqrt(squared), UNIT_EPS)[:, None]
        total += tile

    target = partial_ptr + ((row_head * windows + window) * splits + split) * (DIM + 2)
    tl.store(target + columns, tl.sum(total, axis=0), mask=columns < DIM)
    tl.store(target + DIM, tl.sum(squares, axis=0))
    tl.store(target + DIM + 1, tl.sum(count, axis=0))


def _key_stats_triton(keys: Tensor, mask: Tensor | None, bounds: tuple[int, ...], unit: bool) -> KeyStats:
    batch, heads, _, dim = keys.shape
    windows, splits = len(bounds) - 1, layout.split_count(bounds)
    partial = torch.empty((batch, heads, windows, splits, dim + 2), dtype=torch.float32, device=keys.device)
    flags = None if mask is None else mask.contiguous().view(torch.uint8)
    key_stats_kernel[(batch * heads * windows * splits,)](
        keys,
        keys if flags is None else flags,
        layout.bounds_on(bounds, keys.device),
        partial,
        heads,
        splits,
        windows,
        *keys.stride(),
        0 if flags is None else flags.stride(0),
        **stats_constants(dim, unit=unit, masked=mask is not None),
        num_warps=layout.NUM_WARPS,
    )
    sums = partial.sum(3, dtype=torch.float64)  # second stage: a fixed order, no atomics
    return _split(sums.float(), dim)


def stats_constants(dim: int, *, unit: bool, masked: bool) -> dict[str, int | float | bool]:
    """The constants `key_stats_kernel` is compiled with."""
    return {**layout.block_constants(dim, masked), "UNIT": unit, "UNIT_EPS": layout.UNIT_EPS}
