"""MaxRL in verl: registers ``maxrl``, ``maxrl_loo``, ``maxrl_subset`` and ``pkpo`` as advantage estimators.

Set ``VERL_USE_EXTERNAL_MODULES=maxrl.verl`` and ``algorithm.adv_estimator=maxrl``; the order T of ``maxrl_subset`` and
``maxrl_loo`` and the k of ``pkpo`` come from ``algorithm.maxrl_order`` (default: the number of rollouts of a prompt).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icml26_shared.errors import require
from maxrl.advantages import maxrl_advantages

_core_algos = require("verl.trainer.ppo.core_algos", "verl")

ESTIMATORS = {"maxrl": "maxrl", "maxrl_loo": "loo", "maxrl_subset": "subset", "pkpo": "pkpo"}


def outcome_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: Any = None,
    *,
    estimator: str = "maxrl",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, L) in verl's convention, from pass/fail rewards of whole responses.

    Args:
        token_level_rewards: (B, L); a response's reward is its sum, which must be 0 or 1.
        response_mask: (B, L), 1 on response tokens.
        index: (B,) the prompt's uid of each response.
        config: has ``get("maxrl_order")``, or is None.
        estimator: a name of ``maxrl.estimators.ESTIMATORS``.

    Returns:
        Twice the same tensor: the response's advantage on each of its tokens, 0 elsewhere, without a graph.
    """
    order = config.get("maxrl_order") if config is not None else None
    a = maxrl_advantages(
        token_level_rewards.sum(dim=-1).float(),
        group_ids=index,
        estimator=estimator,
        order=None if order is None else int(order),
    )
    with torch.no_grad():
        spread = a.unsqueeze(-1).to(token_level_rewards.device) * response_mask
    return spread, spread


def _register(name: str, estimator: str) -> None:
    def fn(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return outcome_advantages(token_level_rewards, response_mask, index, config, estimator=estimator)

    fn.__name__ = fn.__qualname__ = name
    register: Callable[[str], Callable[[Any], Any]] = _core_algos.register_adv_est
    register(name)(fn)


for _name, _estimator in ESTIMATORS.items():
    _register(_name, _estimator)
