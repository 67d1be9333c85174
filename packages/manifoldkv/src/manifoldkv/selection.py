"""Which tokens stay: the best ``n`` of each head, in their original order, with exact and stable ties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor


@torch.no_grad()
def select(
    scores: Float[Tensor, "batch heads tokens"], n: int, mask: Shaped[Tensor, "batch tokens"] | None = None
) -> Int64[Tensor, "batch heads kept"]:
    """Indices of the ``n`` highest scores of each head, ascending.

    Of equal scores the smaller index wins, so the result doesn't depend on the device or on how a sort breaks ties.

    Args:
        scores: higher is kept; ``+inf`` always first, ``-inf`` always last. Shape ``[B, H, T]``.
        n: tokens kept per head, >= 0. ``n >= T`` keeps every token.
        mask: ``[B, T]``, bool or 0/1, true where a token is valid; the others count as ``-inf``.

    Returns:
        int64 ``[B, H, min(n, T)]``.

    Raises:
        ValueError: scores of another rank, NaN among them, a negative ``n`` or a mask of another shape.
    """
    _check_scores(scores)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n={n!r} must be an integer >= 0 (tokens kept per head), not {type(n).__name__}")
    if n < 0:
        raise ValueError(f"n={n} is negative; it is the number of tokens kept per head, 0 or more")
    if mask is not None:
        scores = scores.masked_fill(~check_mask(mask, scores.shape[0], scores.shape[2])[:, None], -torch.inf)
    batch, heads, length = scores.shape
    if n >= length:
        return torch.arange(length, device=scores.device).expand(batch, heads, length).contiguous()
    return keep_mask(scores, n).nonzero()[:, -1].view(batch, heads, n)


def keep_mask(scores: Float[Tensor, "*rows tokens"], n: int) -> Bool[Tensor, "*rows tokens"]:
    """True at the ``n`` highest scores of each row; of equal scores the smaller index wins. ``0 <= n <= T``, no NaN."""
    if n == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(n, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, level = scores > least, scores == least
    missing = n - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= missing))


@torch.no_grad()
def select_per_window(
    scores: Float[Tensor, "batch heads tokens"], n: int, bounds: Sequence[int]
) -> Int64[Tensor, "batch heads kept"]:
    """Like :func:`select`, but each window keeps its proportional share of ``n``.

    Window ``j`` of ``w_j`` tokens keeps ``floor(n w_j / T)``; what remains goes to the largest fractional parts, of
    equal ones to the earlier window. Protected tokens (``+inf``) stay whatever their window's share; a window with more
    of them than its share takes the difference from the others.

    Args:
        scores: ``[B, H, T]``.
        n: tokens kept per head; ``n >= T`` keeps every token.
        bounds: window starts followed by ``T``: ``[0, ..., T]``.
    """
    _check_scores(scores)
    batch, heads, length = scores.shape
    if n >= length or not scores.numel():
        return select(scores, n)
    rows = scores.reshape(batch * heads, 1, length)
    pieces = list(itertools.pairwise(bounds))
    protected = torch.stack([(rows[:, 0, a:b] == torch.inf).sum(-1) for a, b in pieces], dim=-1)
    kept = torch.empty((batch * heads, 1, n), dtype=torch.int64, device=scores.device)
    for pattern in protected.unique(dim=0):  # one, unless heads have lost different protected tokens
        alike = (protected == pattern).all(-1)
        quotas = window_quotas(n, [b - a for a, b in pieces], pattern.tolist())
        chosen = [select(rows[alike][..., a:b], quota) + a for (a, b), quota in zip(pieces, quotas, strict=True)]
        kept[alike] = torch.cat(chosen, dim=-1)
    return kept.view(batch, heads, n)


def window_quotas(n: int, sizes: Sequence[int], floors: Sequence[int] | None = None) -> list[int]:
    """Split ``n`` over windows in proportion to their sizes by largest remainders, each at least its floor.

    Exact in integers. Raises ValueError where ``n`` exceeds the tokens there are or the floors exceed ``n``.
    """
    floors = [0] * len(sizes) if floors is None else list(floors)
    if n > sum(sizes) or sum(floors) > n:
        raise ValueError(f"n={n} must lie between the {sum(floors)} protected and the {sum(sizes)} stored tokens")
    free = list(range(len(sizes)))
    quotas = [0] * len(sizes)
    while True:
        left, total = n - sum(floors[j] for j in range(len(sizes)) if j not in free), sum(sizes[j] for j in free)
        shares = {j: divmod(left * sizes[j], total) for j in free} if total else {}
        by_fraction = sorted(free, key=lambda j: (-shares[j][1], j)) if total else []
        extra = set(by_fraction[: left - sum(share for share, _ in shares.values())])
        short = [j for j in free if shares and shares[j][0] + (j in extra) < floors[j]]
        if not short:
            break
        free = [j for j in free if j not in short]
    for j in range(len(sizes)):
        quotas[j] = shares[j][0] + (j in extra) if j in free and total else floors[j]
    return quotas


@torch.no_grad()
def select_adaptive(
    scores: Float[Tensor, "batch heads tokens"], n: int, floor: float = 0.2
) -> Bool[Tensor, "batch heads tokens"]:
    """Share a layer's ``H n`` tokens among its heads by z-normalised score (the rule of Ada-KV, arXiv 2407.11550).

    Within each batch row the scores of each head are brought to mean 0 and standard deviation 1 over their finite
    values; the best ``H n`` of all heads together are kept, but every head keeps at least ``ceil(floor n)`` of its own
    best. ``+inf`` (protected) is kept first and ``-inf`` (padding) last, as in :func:`select`.

    Returns:
        bool ``[B, H, T]``, true where kept: ``H n`` tokens a row, in numbers that differ from head to head.
    """
    _check_scores(scores)
    batch, heads, length = scores.shape
    if n >= length:
        return torch.ones_like(scores, dtype=torch.bool)
    finite = scores.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.where(finite, 0).double().sum(-1, keepdim=True) / count
    var = (scores.double() - mean).where(finite, 0).square().sum(-1, keepdim=True) / count
    z = torch.where(finite, (scores.double() - mean) / var.sqrt().clamp(min=1e-12), scores.double())
    least = math.ceil(round(floor * n, 9))  # rounded: 0.2 * 35 is a hair over 7 in floating point
    own = keep_mask(scores, least) if least else torch.zeros_like(finite)
    ranked = z.masked_fill(own, torch.inf).view(batch, heads * length)
    return keep_mask(ranked, heads * n).view(batch, heads, length)


def check_mask(mask: Tensor, batch: int, length: int) -> Bool[Tensor, "batch tokens"]:
    """``mask`` as bool, or ValueError where its shape isn't ``[batch, length]``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor of shape [batch, tokens], not {type(mask).__name__}")
    if mask.shape != (batch, length):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but the keys are of {batch} rows and {length} tokens")
    return mask.bool()


def _check_scores(scores: Tensor) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a tensor of shape [batch, heads, tokens], not {type(scores).__name__}")
    if scores.ndim != 3:
        raise ValueError(f"scores must have shape [batch, heads, tokens], not {tuple(scores.shape)}")
    if scores.isnan().any():
        raise ValueError("scores contain NaN; give -inf to a token that must not be kept")
