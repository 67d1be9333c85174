r"""The estimators of maximum-likelihood RL and the objective each of them truly ascends.

Every estimator is a coefficient ``a_i`` per rollout; the gradient estimate of one prompt is ``g = (1/N) sum_i a_i S_i``
with the score ``S_i = grad log m(z_i | x)``. Its *order* is the T for which ``E[g] = grad J^(T)`` exactly, for every
pass rate p and every N, where ``J^(T) = -sum_{k<=T} (1-p)^k / k`` is the log-likelihood of success cut after T terms.

==================  =====================================================  ==========  ==============================
name                a_i                                                    order       source
==================  =====================================================  ==========  ==============================
conditional         (N/K) r_i, 0 when K = 0                                N           paper Eq. 9
control_variate     (N/K) r_i - 1; -1 for all when K = 0                   N           paper Eq. 10
maxrl               (r_i - mean)/mean, 0 when K = 0                        N - 1       paper Alg. 1; order derived
subset              N c_{T,N}(K) r_i                                       T           official code; closed form
derived subset_cv           N c_{T,N}(K) r_i - beta                                T           official code
loo                 N (r_i - K_{-i}/(N-1)) c_{T,N}(K_{-i}+1)               T           derived
maclaurin           1 for a success; 1 - N c_{T,N}(K+1) for a failure      T           official code; closed form
derived ==================  =====================================================  ==========
==============================

``maxrl`` has order N - 1 because ``E[(1/N) sum_i S_i 1{K=0}] = (1-p)^N grad log(1-p) = -(1-p)^(N-1) grad p``: dropping
the groups without a success removes exactly the term k = N of the series. So N = 2 is RLOO and N = 1 is zero.

``maclaurin`` sums U-statistics, ``-sum_{k=2..T} prod_{j<k} (F-j)/(N-j)`` for a failure with F = N - K; the sum
telescopes to the closed form in the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maxrl.baselines import BASELINES
from maxrl.coefficients import Estimator, GroupCounts, RealRewards, ratio_or_zero, subset_coefficient


def _conditional(c: GroupCounts) -> tuple[Tensor, Tensor]:
    success = ratio_or_zero(c.size, c.successes + c.eps * c.size)
    return success, torch.zeros_like(success)


def _control_variate(c: GroupCounts) -> tuple[Tensor, Tensor]:
    success, failure = _conditional(c)
    return success - c.beta, failure - c.beta


def _maxrl(c: GroupCounts) -> tuple[Tensor, Tensor]:
    mean_times_n = c.successes + c.eps * c.size
    return ratio_or_zero(c.failures, mean_times_n), -ratio_or_zero(c.successes, mean_times_n)


def _subset(c: GroupCounts) -> tuple[Tensor, Tensor]:
    success = c.size * subset_coefficient(c.size, c.successes, c.order)
    return success, torch.zeros_like(success)


def _subset_cv(c: GroupCounts) -> tuple[Tensor, Tensor]:
    success, failure = _subset(c)
    failure = failure - c.beta
    if c.drop_empty:
        failure = torch.where(c.successes == 0, torch.zeros_like(failure), failure)
    return success - c.beta, failure


def _loo(c: GroupCounts) -> tuple[Tensor, Tensor]:
    others = c.size - 1
    one_more = torch.minimum(c.successes + 1, c.size)
    success = (1 - ratio_or_zero(c.successes - 1, others)) * subset_coefficient(c.size, c.successes, c.order)
    failure = -ratio_or_zero(c.successes, others) * subset_coefficient(c.size, one_more, c.order)
    return c.size * success, c.size * failure


def _maclaurin(c: GroupCounts) -> tuple[Tensor, Tensor]:
    one_more = torch.minimum(c.successes + 1, c.size)
    return torch.ones_like(c.size), 1 - c.size * subset_coefficient(c.size, one_more, c.order)


def _real_conditional(r: RealRewards) -> Tensor:
    return ratio_or_zero(r.rewards, r.mean + r.eps)


def _real_control_variate(r: RealRewards) -> Tensor:
    return _real_conditional(r) - r.beta


def _real_maxrl(r: RealRewards) -> Tensor:
    return ratio_or_zero(r.rewards - r.mean, r.mean + r.eps)


def _full(n: int, order: int | None) -> int | None:
    return n if order is None else order


_PAPER: tuple[Estimator, ...] = (
    Estimator("maxrl", "(r_i - mean)/mean", _maxrl, lambda n, t: n - 1, min_group=2, real=_real_maxrl),
    Estimator("conditional", "(N/K) r_i", _conditional, lambda n, t: n, real=_real_conditional),
    Estimator(
        "control_variate",
        "(N/K) r_i - beta, -beta when K = 0",
        _control_variate,
        lambda n, t: n,
        takes_beta=True,
        real=_real_control_variate,
    ),
    Estimator("subset", "N c(K) r_i", _subset, _full, takes_order=True),
    Estimator("subset_cv", "N c(K) r_i - beta", _subset_cv, _full, takes_order=True, takes_beta=True),
    Estimator("loo", "N (r_i - K_{-i}/(N-1)) c(K_{-i}+1)", _loo, _full, min_group=2, takes_order=True),
    Estimator("maclaurin", "1 or 1 - N c(K+1)", _maclaurin, _full, takes_order=True),
)

ESTIMATORS: dict[str, Estimator] = {e.name: e for e in (*_PAPER, *BASELINES)}


def get_estimator(name: str) -> Estimator:
    """The estimator called ``name``; ValueError with the list of names otherwise."""
    try:
        return ESTIMATORS[name]
    except KeyError:
        raise ValueError(f"unknown estimator {name!r}: choose one of {', '.join(ESTIMATORS)}") from None


def group_coefficients(estimator: Estimator, counts: GroupCounts) -> tuple[Tensor, Tensor]:
    """``(a of a success, a of a failure)`` of each group, (G,) float64: the estimator's formula, and 0 in groups with
    too few rollouts to compare (rollouts can be lost to a crashed verifier)."""
    success, failure = estimator.coefficients(counts)
    if estimator.min_group > 1:
        alone = counts.size < estimator.min_group
        success, failure = success.masked_fill(alone, 0.0), failure.masked_fill(alone, 0.0)
    return success, failure


def effective_order(estimator: str, n: int, order: int | None = None) -> int | None:
    """The order T of the objective that ``estimator`` with ``n`` rollouts a prompt truly ascends.

    ``effective_order("maxrl", 16)`` is 15: dropping the groups without a success costs one order. 1 means ordinary RL
    (the pass rate itself, possibly times a constant: ``dr_grpo`` has the factor 1 - 1/n), 0 means that the gradient is
    identically zero, and None that no ``J^(T)`` has this gradient (``grpo``, ``pkpo``).

    Args:
        estimator: a name of :data:`ESTIMATORS`.
        n: rollouts per prompt, >= 1.
        order: the T asked for, 1 <= T <= n, for the estimators that take one (default: n).

    Raises:
        ValueError: unknown estimator, n < 1, order outside 1..n, or an order given to an estimator that takes none.
    """
    known = get_estimator(estimator)
    if n < 1:
        raise ValueError(f"n = {n}: a prompt needs at least one rollout")
    check_order(known, order)
    if order is not None and order > n:
        raise ValueError(
            f"order = {order} with {n} rollouts: the order must lie in 1..{n}; draw more rollouts or lower it"
        )
    return known.order(n, order)


def check_order(estimator: Estimator, order: int | None) -> None:
    """Raise ValueError unless ``order`` is None or a whole number >= 1 that ``estimator`` can use."""
    if order is None:
        return
    if isinstance(order, bool) or not isinstance(order, int):
        raise ValueError(f"order = {order!r}: a whole number >= 1 or None is needed")
    if order < 1:
        raise ValueError(f"order = {order}: the order of the objective is at least 1 (order 1 is ordinary RL)")
    if not estimator.takes_order:
        takers = ", ".join(name for name, e in ESTIMATORS.items() if e.takes_order)
        raise ValueError(f"estimator {estimator.name!r} has a fixed order; an order can be chosen for: {takers}")
