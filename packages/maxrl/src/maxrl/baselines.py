"""The estimators the paper compares with: REINFORCE, RLOO, Dr. GRPO, GRPO, PKPO and differential smoothing.

Same interface as the estimators of the paper (:mod:`maxrl.estimators`): ``maxrl_advantages(..., estimator="grpo")``.
Differential smoothing looks at the log-probabilities of the rollouts as well, so it is a term to add to advantages.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from maxrl.coefficients import Estimator, GroupCounts, RealRewards, log_miss_probability, ratio_or_zero


def _reinforce(c: GroupCounts) -> tuple[Tensor, Tensor]:
    return torch.ones_like(c.size), torch.zeros_like(c.size)


def _rloo(c: GroupCounts) -> tuple[Tensor, Tensor]:
    others = c.size - 1
    return ratio_or_zero(c.failures, others), -ratio_or_zero(c.successes, others)


def _dr_grpo(c: GroupCounts) -> tuple[Tensor, Tensor]:
    return ratio_or_zero(c.failures, c.size), -ratio_or_zero(c.successes, c.size)


def _grpo(c: GroupCounts) -> tuple[Tensor, Tensor]:
    # The standard deviation of K ones and F zeros comes from the counts: it is exactly 0 in a uniform group.
    std = torch.sqrt(ratio_or_zero(c.successes * c.failures, c.size * (c.size - c.ddof)))
    success, failure = _dr_grpo(c)
    return ratio_or_zero(success, std + c.eps), ratio_or_zero(failure, std + c.eps)


def _choose_ratio(n: Tensor, a: Tensor, k: Tensor) -> Tensor:
    """``C(a, k) / C(n, k)`` for float64 whole numbers 0 <= a <= n, 0 <= k <= n; (G,) each."""
    return torch.exp(log_miss_probability(n, n - a, k))


def _pkpo(c: GroupCounts) -> tuple[Tensor, Tensor]:
    others, k = (c.size - 1).clamp(min=0), (c.order - 1).clamp(min=0)
    # F_{-i}: failures among the others; all F for a success, F - 1 for a failure.
    success_scale = _choose_ratio(others, torch.minimum(c.failures, others), k)
    failure_scale = _choose_ratio(others, (c.failures - 1).clamp(min=0), k)
    success_baseline = c.beta * ratio_or_zero((c.successes - 1).clamp(min=0), others)
    failure_baseline = c.beta * ratio_or_zero(torch.minimum(c.successes, others), others)
    return (1 - success_baseline) * success_scale, -failure_baseline * failure_scale


def _pkpo_official(c: GroupCounts) -> tuple[Tensor, Tensor]:
    others, k = (c.size - 1).clamp(min=0), (c.order - 1).clamp(min=0)
    value = _choose_ratio(others, torch.minimum(c.failures, others), k)
    success = value * (1 - ratio_or_zero((c.successes - 1).clamp(min=0), others))
    return success, -value * ratio_or_zero(c.successes, others)


def _real_reinforce(r: RealRewards) -> Tensor:
    return r.rewards


def _real_rloo(r: RealRewards) -> Tensor:
    return ratio_or_zero((r.rewards - r.mean) * r.size, r.size - 1)


def _real_dr_grpo(r: RealRewards) -> Tensor:
    return r.rewards - r.mean


def _real_grpo(r: RealRewards) -> Tensor:
    return ratio_or_zero(r.rewards - r.mean, r.std + r.eps)


def differential_smoothing(
    rewards: Shaped[Tensor, " b"], mean_log_probs: Float[Tensor, " b"], gamma: float = 0.05
) -> Float[Tensor, " b"]:
    r"""The term of differential smoothing: ``-gamma l_i`` for a success, ``+gamma l_i`` for a failure, added to GRPO's
    advantages.

    ``l_i`` is the mean log-probability of the tokens of rollout i (official code, ``core_algos.py``, gamma = 0.05): a
    rare success gains and a rare failure loses.

    Args:
        rewards: (B,) 0 or 1.
        mean_log_probs: (B,) float, of the policy that drew the rollouts; taken without its graph.
        gamma: size of the term, a finite number.

    Returns:
        (B,) float32 on the device of ``mean_log_probs``.

    Raises:
        ValueError: shapes that differ, rewards other than 0 and 1, log-probabilities or gamma that are not finite.
    """
    if rewards.shape != mean_log_probs.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)} and mean_log_probs {tuple(mean_log_probs.shape)}: one of each "
            "per rollout is needed, (B,)"
        )
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        raise ValueError("differential smoothing is defined for rewards 0 and 1: binarise them first")
    if not math.isfinite(gamma) or not bool(torch.isfinite(mean_log_probs).all()):
        raise ValueError(f"gamma = {gamma} and every mean log-probability must be finite")
    sign = 1.0 - 2.0 * rewards.to(torch.float32)
    return gamma * sign * mean_log_probs.detach().to(torch.float32)


BASELINES: tuple[Estimator, ...] = (
    Estimator("reinforce", "r_i", _reinforce, lambda n, t: 1, real=_real_reinforce),
    Estimator("rloo", "(r_i - mean) N/(N-1)", _rloo, lambda n, t: 1, min_group=2, real=_real_rloo),
    Estimator("dr_grpo", "r_i - mean", _dr_grpo, lambda n, t: 1 if n > 1 else 0, real=_real_dr_grpo),
    Estimator("grpo", "(r_i - mean)/(std + eps)", _grpo, lambda n, t: None, min_group=2, real=_real_grpo),
    Estimator(
        "pkpo",
        "(r_i - beta K_{-i}/(N-1)) C(F_{-i},k-1)/C(N-1,k-1)",
        _pkpo,
        lambda n, t: 1 if t == 1 else None,
        min_group=2,
        takes_order=True,
        takes_beta=True,
    ),
    Estimator(
        "pkpo_official",
        "v_i - mean_{j!=i} v_j with v_i = r_i C(F,k-1)/C(N-1,k-1); biased",
        _pkpo_official,
        lambda n, t: 1 if t == 1 else None,
        min_group=2,
        takes_order=True,
    ),
)
