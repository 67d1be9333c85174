"""Building blocks of the estimators: what a group of rollouts is, and the subset coefficient ``c_{T,N}(K)``.

With a pass/fail reward every estimator of the paper is a function of the number of successes ``K`` and the number of
rollouts ``N`` of a group only: one number for its successes and one for its failures. That is how they are written
here, on vectors over groups, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupCounts:
    """Sizes of G groups and the options of the estimator.

    ``successes`` K (G,) and ``size`` N (G,) are float64 whole numbers, ``order`` T (G,) float64 with 1 <= T <= N
    (0 where a group is empty). ``beta`` scales the control variate, ``eps`` joins the denominator, ``ddof`` belongs to
    the standard deviation of GRPO, ``drop_empty`` zeroes the groups without a success.
    """

    successes: Tensor
    size: Tensor
    order: Tensor
    beta: float = 1.0
    eps: float = 0.0
    ddof: int = 1
    drop_empty: bool = False

    @property
    def failures(self) -> Tensor:
        return self.size - self.successes


Coefficients = Callable[[GroupCounts], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Estimator:
    """One estimator of the family ``g = (1/N) sum_i a_i S_i``.

    ``coefficients`` gives (a of a success, a of a failure), each (G,) float64. ``order(n, T)`` is the T for which
    ``E[g]`` is the gradient of ``J^(T)`` exactly, up to a constant factor, or None when there is no such T.
    ``min_group`` is the least number of rollouts for which it is defined. ``takes_order``: the user may ask for T < N.
    ``real`` is its form for rewards that are non-negative numbers, given rewards, their group means and the group sizes
    per row; None when the estimator is defined for pass/fail only.
    """

    name: str
    formula: str
    coefficients: Coefficients
    order: Callable[[int, int | None], int | None]
    min_group: int = 1
    takes_order: bool = False
    takes_beta: bool = False
    real: Callable[[RealRewards], Tensor] | None = None
    instead: str = field(default="'conditional', which for one rollout is REINFORCE")


@dataclass(frozen=True)
class RealRewards:
    """Row-wise view of non-negative rewards: ``rewards``, and per row its group's ``mean``, ``size`` and ``std``."""

    rewards: Tensor
    mean: Tensor
    size: Tensor
    std: Tensor
    eps: float
    beta: float


def ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and exactly 0 where the denominator is 0."""
    safe = torch.where(denominator == 0, torch.ones_like(denominator), denominator)
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / safe)


def log_miss_probability(n: Tensor, c: Tensor, k: Tensor) -> Tensor:
    r"""``log [ C(n-c, k) / C(n, k) ]``: no success among k drawn of n without replacement when c of n succeed.

    Computed as ``sum_{j < m} log(1 - M/(n-j))`` with m = min(c, k), M = max(c, k) (the ratio is symmetric in c and k),
    so nothing overflows and small complements keep their digits: ``-expm1`` of it is accurate for n = 100,000. Shapes:
    all (G,) float64 whole numbers, 0 <= c <= n, 0 <= k <= n; result (G,) float64, ``-inf`` when c + k > n. Cost: O(sum
    of min(c, k)) without a loop over groups.
    """
    few, many = torch.minimum(c, k), torch.maximum(c, k)
    certain = c + k > n
    terms = torch.where(certain, torch.zeros_like(few), few).long()
    group = torch.repeat_interleave(torch.arange(n.numel(), device=n.device), terms)
    start = torch.cumsum(terms, 0) - terms
    j = torch.arange(group.numel(), device=n.device, dtype=n.dtype) - start[group].to(n.dtype)
    logs = torch.log1p(-many[group] / (n[group] - j))
    total = torch.zeros_like(n).index_add_(0, group, logs)
    return torch.where(certain, torch.full_like(n, -torch.inf), total)


def subset_coefficient(n: Tensor, successes: Tensor, order: Tensor) -> Tensor:
    r"""``c_{T,N}(K) = [1 - C(N-K, T)/C(N, T)] / K``, with c(0) = 0: the mean over all subsets of size T that hold a
    given success of 1 over the number of their successes, times T/N.

    It equals (the unbiased estimate of pass@T) / K: T = N gives 1/K and T = 1 gives 1/N. Shapes: (G,) float64 each.
    """
    if bool((order == n).all()):
        hit = (successes > 0).to(n.dtype)
    else:
        hit = -torch.expm1(log_miss_probability(n, successes, order))
    return ratio_or_zero(hit, successes)
