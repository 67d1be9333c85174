"""Exact expectations and variances of the estimators: every outcome of a group is enumerated, nothing is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from maxrl.coefficients import GroupCounts
from maxrl.estimators import get_estimator, group_coefficients


@dataclass(frozen=True)
class Moments:
    """Mean and variance of the gradient estimate ``g`` of one prompt; scalars, or one entry per parameter."""

    mean: Tensor
    variance: Tensor


def bernoulli_moments(
    p: float, n: int, *, estimator: str = "maxrl", order: int | None = None, beta: float = 1.0, drop_empty: bool = False
) -> Moments:
    """Moments of ``g`` for n rollouts of a policy with one logit: ``S = r - p`` and ``grad p = p (1 - p)``.

    The n + 1 possible success counts are weighed with their binomial probability. float64 scalars; divide ``mean`` by
    ``p (1 - p)`` for the weight w(p) that the estimator truly gives. n <= 500.
    """
    if n > 500:
        raise ValueError(f"n = {n}: exact enumeration is meant for up to 500 rollouts")
    k = torch.arange(n + 1, dtype=torch.float64)
    success, failure = _coefficients(k, n, estimator, order, beta, drop_empty)
    g = (k * success * (1 - p) + (n - k) * failure * (-p)) / n
    ways = torch.tensor([float(math.comb(n, j)) for j in range(n + 1)], dtype=torch.float64)
    return _moments(ways * p**k * (1 - p) ** (n - k), g)


def softmax_moments(
    logits: Float[Tensor, " actions"],
    correct: Bool[Tensor, " actions"],
    n: int,
    *,
    estimator: str = "maxrl",
    order: int | None = None,
    beta: float = 1.0,
) -> Moments:
    """Moments of ``g`` for n rollouts of a softmax policy over A actions, all A**n tuples of actions enumerated.

    ``logits`` (A,) float64, ``correct`` (A,) bool. Results (A,), one entry per logit; ``S = onehot(action) - softmax``.
    """
    actions = logits.numel()
    policy = torch.softmax(logits.double(), 0)
    tuples = torch.cartesian_prod(*[torch.arange(actions)] * n).view(-1, n)
    rewards = correct[tuples]
    success, failure = _coefficients(rewards.sum(1).double(), n, estimator, order, beta, False)
    a = torch.where(rewards, success[:, None], failure[:, None])
    score = torch.eye(actions, dtype=torch.float64) - policy
    chosen = torch.stack([(a * (tuples == action)).sum(1) for action in range(actions)], 1)
    return _moments(policy[tuples].prod(1), chosen @ score / n)


def _coefficients(
    k: Tensor, n: int, estimator: str, order: int | None, beta: float, drop_empty: bool
) -> tuple[Tensor, Tensor]:
    size = torch.full_like(k, float(n))
    t = torch.full_like(k, float(n if order is None else order))
    return group_coefficients(get_estimator(estimator), GroupCounts(k, size, t, beta=beta, drop_empty=drop_empty))


def _moments(probability: Tensor, g: Tensor) -> Moments:
    weights = probability if g.ndim == 1 else probability[:, None]
    mean = (weights * g).sum(0)
    return Moments(mean, (weights * (g - mean) ** 2).sum(0))
