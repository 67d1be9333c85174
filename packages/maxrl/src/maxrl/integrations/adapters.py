"""Advantage callables for trainers that take one: prime-rl and SkyRL.

OpenRLHF has a closed list of estimators: its README recipe is estimator ``reinforce`` with our advantage as the
reward, but that estimator whitens over the batch, so it is **not** equivalent to MaxRL.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxrl.advantages import maxrl_advantages


def prime_rl(inputs: Any, *, estimator: str = "maxrl", order: int | None = None, threshold: float | None = None) -> Any:
    """Custom advantage function of prime-rl: ``inputs.rewards`` (prompts, rollouts) in, advantages of that shape out.

    Args:
        inputs: an object with ``rewards``, a tensor of shape (prompts, rollouts per prompt); or that tensor itself.
        estimator, order, threshold: as in :func:`maxrl.maxrl_advantages`.

    Returns:
        What the library calls its outputs: an object of the inputs' module named ``AdvantageOutputs`` when it has one,
        else the tensor.
    """
    rewards: Tensor = inputs if isinstance(inputs, Tensor) else torch.as_tensor(inputs.rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (prompts, rollouts per prompt), got {tuple(rewards.shape)}")
    flat = maxrl_advantages(
        rewards.reshape(-1),
        group_size=max(rewards.shape[1], 1),
        estimator=estimator,
        order=order,
        threshold=threshold,
    )
    advantages = flat.view(rewards.shape)
    outputs = getattr(sys.modules.get(type(inputs).__module__), "AdvantageOutputs", None)
    return advantages if outputs is None else outputs(advantages=advantages)


def skyrl(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    *,
    estimator: str = "maxrl",
    order: int | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantage function of SkyRL's registry: (B, L) rewards and mask, prompt ids ``index`` (B,); advantages and
    returns."""
    a = maxrl_advantages(token_level_rewards.sum(-1).float(), group_ids=index, estimator=estimator, order=order)
    spread = a.unsqueeze(-1) * response_mask
    return spread, spread
