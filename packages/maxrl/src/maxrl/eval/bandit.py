"""A contextual bandit with shared features: the population objectives, ascended with exact gradients.

64 prompts, 50 actions, one right action each with a prior probability log-uniform in [1e-4, 0.5]. The policy's logits
are the prior's plus ``u_x . Theta v_a`` with fixed random features of low rank, so that prompts compete for the
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl.objective import weight


@dataclass(frozen=True)
class Bandit:
    """``prior`` (prompts, actions) log-probabilities, ``right`` (prompts,), features ``u`` (prompts, r), ``v``
    (actions, r)."""

    prior: Tensor
    right: Tensor
    u: Tensor
    v: Tensor

    def log_p(self, theta: Tensor) -> Tensor:
        """Log-probability of the right action of each prompt."""
        logits = self.prior + self.u @ theta @ self.v.T
        return torch.log_softmax(logits, -1).gather(1, self.right[:, None]).squeeze(1)


def make_bandit(seed: int, *, prompts: int = 64, actions: int = 50, rank: int = 8) -> Bandit:
    """The bandit of ``seed``, float64."""
    g = torch.Generator().manual_seed(seed)
    right = torch.randint(0, actions, (prompts,), generator=g)
    low, high = math.log(1e-4), math.log(0.5)
    p = torch.exp(low + (high - low) * torch.rand(prompts, generator=g, dtype=torch.float64))
    prior = ((1 - p) / (actions - 1))[:, None].expand(prompts, actions).clone()
    prior[torch.arange(prompts), right] = p
    u = torch.randn(prompts, rank, generator=g, dtype=torch.float64) / math.sqrt(rank)
    v = torch.randn(actions, rank, generator=g, dtype=torch.float64)
    return Bandit(prior.log(), right, u, v)


def ascend(
    bandit: Bandit, objective: str, order: float | None = None, *, steps: int = 300, size: float = 0.5
) -> Tensor:
    """Log-probabilities of the right actions after ``steps`` steps of length ``size`` along the normalised gradient of
    the objective (a name and order of :func:`maxrl.weight`): every objective walks the same distance."""
    theta = torch.zeros(bandit.u.shape[1], bandit.v.shape[1], dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        p = bandit.log_p(theta).exp()
        weights = weight(p.detach().clamp(1e-300, 1 - 1e-12), objective, order)
        (gradient,) = torch.autograd.grad((weights * p).mean(), theta)
        with torch.no_grad():
            theta += size * gradient / gradient.norm().clamp(min=1e-300)
    return bandit.log_p(theta).detach()
