"""The one-line change: a GRPO step and the MaxRL step, which differ in the line that makes the advantages."""

from __future__ import annotations

import difflib
import inspect

import torch
from torch import Tensor

from maxrl.advantages import maxrl_advantages


def grpo_step(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, n: int
) -> Tensor:
    """One on-policy step of GRPO on a classifier whose sampled classes are the rollouts; returns the advantages."""
    log_probs = torch.log_softmax(policy(inputs), -1)
    actions = torch.multinomial(log_probs.detach().exp(), n, replacement=True)
    rewards = (actions == labels[:, None]).float().flatten()
    advantages = maxrl_advantages(rewards, group_size=n, estimator="grpo", eps=1e-6)
    loss = -(advantages.view(-1, n) * log_probs.gather(1, actions)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return advantages


def maxrl_step(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, n: int
) -> Tensor:
    """One on-policy step of MaxRL on a classifier whose sampled classes are the rollouts; returns the advantages."""
    log_probs = torch.log_softmax(policy(inputs), -1)
    actions = torch.multinomial(log_probs.detach().exp(), n, replacement=True)
    rewards = (actions == labels[:, None]).float().flatten()
    advantages = maxrl_advantages(rewards, group_size=n)
    loss = -(advantages.view(-1, n) * log_probs.gather(1, actions)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return advantages


def changed_lines() -> list[str]:
    """The lines by which the bodies of the two steps differ, as a diff shows them."""
    before, after = (_body(inspect.getsource(step)) for step in (grpo_step, maxrl_step))
    return [line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]


def _body(source: str) -> list[str]:
    return source.split('"""', 2)[2].splitlines()
