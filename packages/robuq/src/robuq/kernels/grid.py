"""A uniform quantiser of tokens, as the few numbers that kernels need, and its plain reference."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor


class Grid(NamedTuple):
    """``d = step * statistic(y)``; code ``k = clip(floor(y/d), low, high)``, or rounded half to even; value
    ``(k + offset) d gain``.

    Attributes:
        statistic: ``"rms"`` or ``"max"`` (of magnitudes) over the token.
        step: delta.
        rounds: round half to even (levels at ``k d``) instead of floor (levels at ``(k + 1/2) d``).
        low, high: smallest and largest code; -128 <= low, high <= 127.
        offset: 0.5 where floor is taken, else 0.
        reach: the gradient passes where ``|y| <= reach * d``; infinity: everywhere.
        gain: factor of the values.
    """

    statistic: Literal["rms", "max"]
    step: float
    rounds: bool
    low: int
    high: int
    offset: float
    reach: float
    gain: float


def token_step(y: Float[Tensor, "m n"], grid: Grid) -> Float[Tensor, " m"]:
    """``d`` of each token in float32 (float64 for float64); NaN where a value is not finite, 0 for a token of zeros.

    Squares are summed in float64, so no finite float32 overflows or vanishes.
    """
    if grid.statistic == "rms":
        found = y.double().square().mean(1).sqrt()
    else:
        found = y.double().abs().amax(1) if y.shape[1] else y.new_zeros(len(y), dtype=torch.float64)
    d = (found * grid.step).to(torch.float64 if y.dtype == torch.float64 else torch.float32)
    return torch.where(torch.isfinite(found), d, torch.nan)


def encode(y: Float[Tensor, "m n"], d: Float[Tensor, " m"], grid: Grid) -> Int8[Tensor, "m n"]:
    """Codes of tokens; 0 where d is 0 or NaN."""
    valid = d > 0
    ratio = y.to(d.dtype) / torch.where(valid, d, 1.0)[:, None]
    whole = ratio.round() if grid.rounds else ratio.floor()
    return torch.where(valid[:, None], whole.clamp(grid.low, grid.high), 0.0).to(torch.int8)


def within(y: Float[Tensor, "m n"], d: Float[Tensor, " m"], grid: Grid) -> Tensor:
    """Where the straight-through gradient passes, bool [m, n]: ``|y| <= reach d``."""
    return y.abs().to(d.dtype) <= (grid.reach * d)[:, None] if grid.reach != float("inf") else torch.ones_like(y).bool()
