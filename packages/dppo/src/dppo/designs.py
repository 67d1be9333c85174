"""Sampling designs: who is kept, and with what inclusion probability. Every function works on whole batches at once.

A design turns uniforms (one an item, see `draws`) into a keep mask and reports for every item the true probability P
with which it is removed. Any term ℓ that is weighted by 1/(1−P) where kept has its expectation untouched
(Horvitz and Thompson 1952).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

MIN_INCLUSION = 0.05  # 1 - MAX_RATE: the least inclusion probability of an item whose term is not zero


def floor_count(rate: float, n: Tensor) -> Int64[Tensor, ...]:
    """floor(rate·n) as people mean it: 0.29·100 is 29."""
    return torch.floor(rate * n.to(torch.float64) + 1e-9).to(torch.int64)


def rank_in_stratum(
    value: Float64[Tensor, " batch"], member: Bool[Tensor, " batch"], stratum: Int64[Tensor, " batch"]
) -> Int64[Tensor, " batch"]:
    """Position of each member among the members of its stratum, by ascending value (ties: the earliest first).

    Items that are no members have a rank without meaning.
    """
    count = int(stratum.max()) + 1 if len(stratum) else 0
    slot = torch.where(member, stratum, count)
    order = torch.argsort(value, stable=True)
    order = order[torch.argsort(slot[order], stable=True)]
    size = torch.bincount(slot, minlength=count + 1)
    start = torch.cumsum(size, 0) - size
    rank = torch.empty_like(stratum)
    rank[order] = torch.arange(len(stratum), device=stratum.device) - start[slot[order]]
    return rank


def remove_count(
    uniform: Float64[Tensor, " batch"],
    low: Bool[Tensor, " batch"],
    stratum: Int64[Tensor, " batch"],
    removed: Int64[Tensor, " strata"],
) -> Bool[Tensor, " batch"]:
    """Keeps all but `removed[s]` low items of each stratum, chosen uniformly: those with the smallest uniforms go."""
    return ~low | (rank_in_stratum(uniform, low, stratum) >= removed[stratum])


def low_count(low: Bool[Tensor, " batch"], stratum: Int64[Tensor, " batch"], strata: int) -> Int64[Tensor, " strata"]:
    """How many low items each stratum has."""
    return torch.zeros(strata, dtype=torch.int64, device=low.device).index_add_(0, stratum, low.to(torch.int64))


def truncated_binomial(
    n: Int64[Tensor, " strata"], least: Int64[Tensor, " strata"], keep_probability: float
) -> Float64[Tensor, "strata count"]:
    """Cumulative distribution of K ~ Binomial(n, p) given K >= least, over K = 0, 1, ..., max n.

    Conditioning independent draws of equal probability on a minimal count leaves them exchangeable: given K, every
    subset of size K is equally likely, so an item's inclusion probability is E[K]/n.
    """
    top = int(n.max()) if len(n) else 0
    k = torch.arange(top + 1, dtype=torch.float64, device=n.device)
    total = n.to(torch.float64)[:, None]
    log_choose = torch.lgamma(total + 1) - torch.lgamma(k + 1) - torch.lgamma((total - k).clamp(min=0) + 1)
    p = torch.tensor(keep_probability, dtype=torch.float64, device=n.device)
    log_mass = log_choose + torch.xlogy(k, p) + torch.xlogy((total - k).clamp(min=0), 1 - p)
    mass = torch.where((k <= total) & (k >= least[:, None]), log_mass.exp(), 0.0)
    return torch.cumsum(mass, 1) / mass.sum(1, keepdim=True)


def expected_count(cumulative: Float64[Tensor, "strata count"]) -> Float64[Tensor, " strata"]:
    """E[K] = Σ_k P(K > k)."""
    return (1 - cumulative).sum(1)


def water_fill(
    score: Float64[Tensor, " batch"], cost: Float64[Tensor, " batch"], budget: float, floor: float = MIN_INCLUSION
) -> Float64[Tensor, " batch"]:
    """Inclusion probabilities π_i = clip(λ·s_i/√c_i, floor, 1) with Σ c_i π_i = budget.

    They minimise Σ s_i²/π_i, the design-dependent part of the variance of Σ m_i x_i/π_i when s_i stands for ‖x_i‖
    and m has uncorrelated entries (Neyman allocation; Lagrange: s_i²/π_i² = c_i/λ²). The floor keeps every
    weight at most 1/floor.

    Args:
        score: s >= 0.
        cost: c > 0 (1 for a budget in items, token counts for a budget in tokens).
        budget: expected cost kept; capped at Σ c_i, raised to floor·Σ c_i.
    """
    total = float(cost.sum())
    if budget >= total or not len(score):
        return torch.ones_like(score)
    density = score / cost.sqrt()
    if float(density.max()) == 0:
        density = torch.ones_like(score)

    def spent(scale: float) -> float:
        return float((cost * (scale * density).clamp(floor, 1)).sum())

    low, high = 0.0, 1.0 / float(density[density > 0].min())
    for _ in range(200):  # each halves the interval; ends when the midpoint is an end
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (low, middle) if spent(middle) > budget else (middle, high)
    return (high * density).clamp(floor, 1)


def systematic(
    inclusion: Float64[Tensor, " batch"], order: Int64[Tensor, " batch"], start: float
) -> Bool[Tensor, " batch"]:
    """Systematic draw: item i is kept iff an integer k exists with C_{i−1} <= start + k < C_i, C the running sum of π.

    For start uniform in [0, 1) the inclusion probabilities are exactly π (Madow 1949), and the number kept differs
    from Σπ by less than 1. Items with π = 1 are kept outside the sum, so that rounding cannot lose them.

    Args:
        inclusion: π in (0, 1].
        order: permutation in which the items are run through; must not depend on `start`.
        start: in [0, 1).
    """
    certain = inclusion >= 1
    ends = torch.cumsum(torch.where(certain, 0.0, inclusion)[order], 0)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    hit = torch.ceil(ends - start) > torch.ceil(begins - start)
    keep = torch.empty_like(certain)
    keep[order] = hit
    return keep | certain
