"""The objective of order T, as functions of the pass rate: its value and the weight it gives a prompt."""

from __future__ import annotations

import math
from typing import overload

import numpy as np
import torch
from torch import Tensor

_OBJECTIVES = ("maxrl", "ml", "rl", "rloo", "dr_grpo", "reinforce", "grpo", "pass_at_k")


@overload
def weight(p: float, objective: str = ..., order: float | None = ...) -> float: ...
@overload
def weight(p: Tensor, objective: str = ..., order: float | None = ...) -> Tensor: ...
@overload
def weight(p: np.ndarray, objective: str = ..., order: float | None = ...) -> np.ndarray: ...
def weight(
    p: float | Tensor | np.ndarray, objective: str = "maxrl", order: float | None = None
) -> float | Tensor | np.ndarray:
    r"""Population weight ``w(p)`` of a prompt with pass rate ``p``: the objective's gradient is ``w(p) grad p``.

    - ``"maxrl"``: ``w_T(p) = sum_{k=1..T} (1-p)^{k-1} = (1 - (1-p)^T)/p`` (paper, App. C), evaluated as ``-expm1(T
      log1p(-p))/p``, so it keeps its digits for tiny p; ``w_T(0) = T`` exactly. ``order=None`` or ``math.inf`` is
      maximum likelihood, 1/p.
    - ``"ml"``: 1/p. ``"rl"``, ``"reinforce"``, ``"rloo"``, ``"dr_grpo"``: 1 (up to a constant).
    - ``"grpo"``: ``1/sqrt(p(1-p))`` (rises again as p -> 1).
    - ``"pass_at_k"`` with ``order`` = k: ``k (1-p)^{k-1}``.

    Args:
        p: pass rates in [0, 1]; a float, a tensor or an array of any shape.
        objective: see above.
        order: T (or k), a number >= 1.

    Returns:
        The same kind and shape as ``p``; computed in float64.

    Raises:
        ValueError: p outside [0, 1] or not finite, an unknown objective, order below 1.
    """
    values = _checked_probabilities(p)
    if objective not in _OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}: choose one of {', '.join(_OBJECTIVES)}")
    if order is not None and not order >= 1:
        raise ValueError(f"order = {order}: it must be at least 1 (order 1 is ordinary RL)")
    return _like(_weight(values, objective, order), p)


def _weight(p: Tensor, objective: str, order: float | None) -> Tensor:
    if objective in ("maxrl", "ml"):
        if objective == "ml" or order is None or math.isinf(order):
            return 1 / p
        w = -torch.expm1(order * torch.log1p(-p)) / p
        return torch.where(p == 0, torch.full_like(p, float(order)), w)
    if objective == "grpo":
        return 1 / torch.sqrt(p * (1 - p))
    if objective == "pass_at_k":
        if order is None:
            raise ValueError("objective 'pass_at_k' needs order = k")
        return order * (1 - p) ** (order - 1)
    return torch.ones_like(p)


def truncated_log_likelihood(p: float | Tensor | np.ndarray, order: float) -> float | Tensor | np.ndarray:
    r"""``J^(T)(p) = -sum_{k=1..T} (1-p)^k / k`` (paper, section 3.2); ``order=math.inf`` is ``log p``.

    ``p`` as in :func:`weight`; the result has its kind and shape, computed in float64.
    """
    values = _checked_probabilities(p)
    if not order >= 1:
        raise ValueError(f"order = {order}: it must be at least 1")
    if math.isinf(order):
        return _like(torch.log(values), p)
    total = torch.zeros_like(values)
    block = 4096
    for start in range(1, int(order) + 1, block):
        k = torch.arange(start, min(start + block, int(order) + 1), dtype=values.dtype, device=values.device)
        total -= ((1 - values).unsqueeze(-1) ** k / k).sum(-1)
    return _like(total, p)


def _checked_probabilities(p: float | Tensor | np.ndarray) -> Tensor:
    values = p.to(torch.float64) if isinstance(p, Tensor) else torch.as_tensor(p, dtype=torch.float64)
    if not bool(((values >= 0) & (values <= 1)).all()):
        bad = values[~((values >= 0) & (values <= 1))].flatten()[0].item()
        raise ValueError(f"p = {bad}: pass rates lie in [0, 1]")
    return values


def _like(result: Tensor, p: float | Tensor | np.ndarray) -> float | Tensor | np.ndarray:
    if isinstance(p, Tensor):
        return result
    if isinstance(p, np.ndarray):
        return result.numpy()
    return float(result)
