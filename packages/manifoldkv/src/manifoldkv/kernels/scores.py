"""Scores of keys against the centroid of their head and window: higher = farther = keep.

``l2``: ``s_i = ||k_i - mu||_2`` (ManifoldKV, arXiv 2602.08343). ``cosine``: ``s_i = -cos(k_i, a)`` (KeyDiff, arXiv
2504.15364).

The distance is summed over ``(k - mu)^2`` as it stands. Expanding it into ``k^2 - 2 k mu + mu^2`` would lose every
digit where the centroid is far longer than the keys' spread around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icml26_shared.kernels import Path, jit, launching_on, triton_language
from manifoldkv.kernels import layout

tl = triton_language()

_Protected = tuple[int | Tensor, int | Tensor]  # per row: tokens before the first and from the second on are protected


@torch.no_grad()
def l2_scores(
    keys: Float[Tensor, "batch heads tokens dim"],
    centroid: Float[Tensor, "batch heads windows dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    bounds: Sequence[int] | None = None,
    *,
    n_sink: int = 0,
    n_recent: int = 0,
    prefer: Path | None = None,
) -> Float[Tensor, "batch heads tokens"]:
    """``||k - mu||_2`` of each key to the centroid ``mu`` of its head and window. No gradient is recorded.

    Args:
        keys: ``[B, H, T, D]``; float32, bfloat16, float16 or float64; any strides. Computed in float32,
            float64 keys in float64.
        centroid: ``[B, H, W, D]``, one for each window of ``bounds``; from `centroids`.
        mask: ``[B, T]``, true where valid; default all. Padding scores ``-inf``.
        bounds: window starts followed by ``T``, ascending; default one window ``[0, T]``.
        n_sink, n_recent: the first and the last valid tokens of a row, so many of each, score ``+inf``.
        prefer: ``"triton"``, ``"cpu"`` or ``"torch"``; default by device (`icml26_shared.kernels.choose_path`).

    Returns:
        float32 ``[B, H, T]``. A key with a NaN or an infinity, or so far away that its squared distance is beyond
        float32's range, scores ``-inf``, even where protected; the score is never NaN.

    Raises:
        TypeError: another dtype. ValueError: a wrong shape, wrong bounds, or a path these tensors cannot take.
    """
    return _scores("l2", keys, centroid, mask, bounds, n_sink, n_recent, prefer)


@torch.no_grad()
def cosine_scores(
    keys: Float[Tensor, "batch heads tokens dim"],
    anchor: Float[Tensor, "batch heads windows dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    bounds: Sequence[int] | None = None,
    *,
    n_sink: int = 0,
    n_recent: int = 0,
    prefer: Path | None = None,
) -> Float[Tensor, "batch heads tokens"]:
    """``-cos(k, a)`` of each key and the anchor ``a`` of its head and window, in [-1, 1].

    The anchor is the mean of the unit keys (KeyDiff; ``centroids(keys, unit=True)``) or that of the keys
    (``"cosine_mean"``). Norms below 1e-8 count as 1e-8, so that a zero key scores 0; a key whose squared norm is beyond
    float32's range scores ``-inf``. All else as in `l2_scores`.
    """
    return _scores("cosine", keys, anchor, mask, bounds, n_sink, n_recent, prefer)


@torch.no_grad()
def key_norms(
    keys: Float[Tensor, "batch heads tokens dim"], *, prefer: Path | None = None
) -> Float[Tensor, "batch heads tokens"]:
    """``||k||_2`` of each key, float32; NaN or infinite where the key is."""
    layout.check_keys(keys)
    path = layout.pick_path(keys, prefer)
    norms = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    if keys.numel() == 0:
        return norms.zero_()
    bounds = (0, keys.shape[2])
    if path == "triton":
        with launching_on(keys):
            _launch("norm", keys, None, None, bounds, (0, keys.shape[2]), norms)
    elif path == "cpu":
        _score_tiles(keys, None, bounds, norms, _norm_tile)
    else:
        norms.copy_(keys.to(layout.work_dtype(keys)).norm(dim=-1))
    return norms


def _scores(
    metric: str,
    keys: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    bounds: Sequence[int] | None,
    n_sink: int,
    n_recent: int,
    prefer: Path | None,
) -> Tensor:
    layout.check_keys(keys)
    mask = layout.check_mask(mask, keys)
    checked = layout.check_bounds(bounds, keys.shape[2])
    layout.check_centroid(centroid, keys, checked, "centroid" if metric == "l2" else "anchor")
    if n_sink < 0 or n_recent < 0:
        raise ValueError(f"n_sink={n_sink} and n_recent={n_recent} are numbers of tokens: 0 or more")
    path = layout.pick_path(keys, prefer)
    centroid = centroid.to(layout.work_dtype(keys))
    if keys.numel() == 0:
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    protected = _protected_range(mask, keys.shape[2], n_sink, n_recent)
    if path == "torch":
        return scores_reference(metric, keys, centroid, mask, checked, protected)
    scores = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    if path == "triton":
        with launching_on(keys):
            _launch(metric, keys, centroid, mask, checked, protected, scores)
        return scores
    _score_tiles(keys, centroid, checked, scores, _l2_tile if metric == "l2" else _cosine_tile)
    return _protect(scores, mask, protected)


def _protected_range(mask: Tensor | None, length: int, n_sink: int, n_recent: int) -> _Protected:
    """``(first, last)``: valid tokens before ``first`` and from ``last`` on are protected; per row under a mask."""
    if mask is None:
        return min(n_sink, length), max(length - n_recent, 0)
    rank = mask.cumsum(-1)  # 1 at the first valid token
    first = (rank < n_sink).sum(-1) + (n_sink > 0)
    last = (rank <= rank[:, -1:] - n_recent).sum(-1)
    return first, last


def _protect(scores: Tensor, mask: Tensor | None, protected: _Protected) -> Tensor:
    """Protection and padding, in place; a faulty key's ``-inf`` stays."""
    first, last = protected
    if isinstance(first, int) and isinstance(last, int):
        for part in (scores[..., :first], scores[..., max(last, first) :]):
            part.masked_fill_(part > -torch.inf, torch.inf)
    else:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        kept = (tokens < first[:, None]) | (tokens >= last[:, None])  # type: ignore[index]
        scores.masked_fill_(kept[:, None] & (scores > -torch.inf), torch.inf)
    return scores if mask is None else scores.masked_fill_(~mask[:, None], -torch.inf)


def scores_reference(
    metric: str,
    keys: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    bounds: tuple[int, ...],
    protected: _Protected,
) -> Tensor:
    """The formulas in plain torch, computed in the centroid's dtype; float32 scores."""
    widths = torch.tensor([high - low for low, high in pairwise(bounds)], device=keys.device)
    own = centroid.repeat_interleave(widths, dim=2)
    keys = keys.to(centroid.dtype)
    if metric == "l2":
        scores = (keys - own).norm(dim=-1).float()
    else:
        direction = own / own.norm(dim=-1, keepdim=True).clamp(min=layout.COSINE_EPS)
        norms = keys.norm(dim=-1).clamp(min=layout.COSINE_EPS)
        cosines = (keys * direction).sum(-1) / norms
        scores = -cosines.float().masked_fill(~norms.isfinite(), torch.nan)  # x / inf would look like a right angle
    return _protect(scores.masked_fill(~scores.isfinite(), -torch.inf), mask, protected)


_ScoreTile = Callable[[Tensor, Tensor, Tensor], Tensor]


def _score_tiles(
    keys: Tensor, centroid: Tensor | None, bounds: tuple[int, ...], scores: Tensor, score_tile: _ScoreTile
) -> None:
    """CPU path: score tile by tile, each while it is in the cache."""
    space = layout.workspace(keys)
    if centroid is not None and score_tile is _cosine_tile:
        centroid = centroid / centroid.norm(dim=-1, keepdim=True).clamp(min=layout.COSINE_EPS)
    for tile in layout.cut(keys, bounds):
        part = tile.of_keys(keys)
        own = part if centroid is None else centroid[tile.rows, tile.heads, tile.windows, None]
        work = layout.like(part, space)
        made = score_tile(work.copy_(part) if part.dtype != work.dtype else part, own, work)
        made = made.to(scores.dtype)
        if centroid is not None and not bool(made.isfinite().all()):
            made.masked_fill_(~made.isfinite(), -torch.inf)
        scores[tile.rows, tile.heads, tile.tokens] = made.flatten(2)


def _l2_tile(part: Tensor, centroid: Tensor, work: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.sub(part, centroid, out=work), dim=-1)


def _cosine_tile(part: Tensor, direction: Tensor, work: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(part, dim=-1).clamp_(min=layout.COSINE_EPS)
    cosines = torch.mul(part, direction, out=work).sum(-1).div_(norms)
    return cosines.neg_().masked_fill_(norms == torch.inf, torch.nan)  # x / inf would look like a right angle


def _norm_tile(part: Tensor, unused: Tensor, work: Tensor) -> Tensor:
    return torch.linalg.vector_norm(part, dim=-1)


@jit
@no_type_check
def scores_kernel(
    keys_ptr,
    centroid_ptr,
    mask_ptr,
    bounds_ptr,
    first_ptr,
    last_ptr,
    scores_ptr,
    heads,
    splits,
    windows,
    length,
    first,
    last,
    stride_b,
    stride_h,
    stride_t,
    stride_d,
    stride_mask,
    METRIC: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    EPS: tl.constexpr,
):
    """Scores of one stretch of TOKENS tokens of one window. METRIC: "l2", "cosine" or "norm"."""
    piece = tl.program_id(0) % (windows * splits)
    row_head = (tl.program_id(0) // (windows * splits)).to(tl.int64)
    window, split = piece // splits, piece % splits
    batch = row_head // heads
    begin = tl.load(bounds_ptr + window) + split * TOKENS
    end = tl.minimum(begin + TOKENS, tl.load(bounds_ptr + window + 1))
    if MASKED:
        first = tl.load(first_ptr + batch)
        last = tl.load(last_ptr + batch)

    columns = tl.arange(0, BLOCK_D)
    base = keys_ptr + batch * stride_b + (row_head % heads) * stride_h + columns[None, :] * stride_d
    if METRIC != "norm":
        centroid = tl.load(centroid_ptr + (row_head * windows + window) * DIM + columns, mask=columns < DIM, other=0.0)
        if METRIC == "cosine":
            centroid = centroid / tl.maximum(tl.sqrt(tl.sum(centroid * centroid, axis=0)), EPS)
    for start in range(begin, end, BLOCK_T):
        tokens = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = tokens < end
        tile = tl.load(
            base + tokens[:, None] * stride_t, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0
        ).to(tl.float32)
        if METRIC == "norm":
            score = tl.sqrt(tl.sum(tile * tile, axis=1))
        else:
            if METRIC == "l2":
                away = tile - centroid[None, :]
                squared = tl.sum(away * away, axis=1)
                score = tl.sqrt(squared)
            else:
                squared = tl.sum(tile * tile, axis=1)
                score = -tl.sum(tile * centroid[None, :], axis=1) / tl.maximum(tl.sqrt(squared), EPS)
            keep = squared < float("inf")  # false for NaN too
            if MASKED:
                keep = keep & (tl.load(mask_ptr + batch * stride_mask + tokens, mask=inside, other=0) != 0)
            score = tl.where((tokens < first) | (tokens >= last), float("inf"), score)
            score = tl.where(keep, score, float("-inf"))
        tl.store(scores_ptr + row_head * length + tokens, score, mask=inside)


def _launch(
    metric: str,
    keys: Tensor,
    centroid: Tensor | None,
    mask: Tensor | None,
    bounds: tuple[int, ...],
    protected: _Protected,
    scores: Tensor,
) -> None:
    batch, heads, length, dim = keys.shape
    windows, splits = len(bounds) - 1, layout.split_count(bounds)
    first, last = protected
    flags, firsts, lasts = keys, keys, keys  # stand in where there is no mask; not read then
    if mask is not None:
        flags = mask.contiguous().view(torch.uint8)
        firsts, lasts = (torch.as_tensor(edge, dtype=torch.int32, device=keys.device) for edge in protected)
        first, last = 0, 0
    scores_kernel[(batch * heads * windows * splits,)](
        keys,
        keys if centroid is None else centroid.contiguous(),
        flags,
        layout.bounds_on(bounds, keys.device),
        firsts,
        lasts,
        scores,
        heads,
        splits,
        windows,
        length,
        first,
        last,
        *keys.stride(),
        0 if mask is None else flags.stride(0),
        **scores_constants(metric, dim, masked=mask is not None),
        num_warps=layout.NUM_WARPS,
    )


def scores_constants(metric: str, dim: int, *, masked: bool) -> dict[str, int | float | bool | str]:
    """The constants `scores_kernel` is compiled with."""
    return {
        "METRIC": metric,
        **layout.block_constants(dim, masked),
        "EPS": layout.COSINE_EPS,
    }
