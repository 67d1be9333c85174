"""What the paths of the fused policy loss share: the settings, and the loss of a row as a function of its
log-probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSettings:
    """How a hidden state becomes a distribution, and a log-probability a loss."""

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    entropy: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Rows:
    """Per-row inputs of the live rows: ``targets`` (R,) int64, the others (R,) in the dtype of the loss.

    ``old_logp`` None means the current log-probability without its gradient (ratio 1).
    """

    targets: Tensor
    advantages: Tensor
    weights: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None

    def __getitem__(self, index: slice | Tensor) -> Rows:
        old = None if self.old_logp is None else self.old_logp[index]
        ref = None if self.ref_logp is None else self.ref_logp[index]
        return Rows(self.targets[index], self.advantages[index], self.weights[index], old, ref)


def transform_logits(raw: Tensor, bias: Tensor | None, settings: LossSettings) -> Tensor:
    """``softcap * tanh(scale * (raw + bias) / softcap) / temperature``; without a soft-cap the identity replaces it."""
    z = raw if bias is None else raw + bias
    z = z * settings.logit_scale
    if settings.softcap is not None:
        z = settings.softcap * torch.tanh(z / settings.softcap)
    return z / settings.temperature


@dataclass(frozen=True)
class RowLoss:
    """``loss`` of each row without its weight, its derivative ``slope`` by the log-probability, and where it was
    clipped."""

    loss: Tensor
    slope: Tensor
    clipped: Tensor


def row_loss(logp: Tensor, rows: Rows, settings: LossSettings) -> RowLoss:
    r"""``-min(rho a, clip(rho, 1-eps_low, 1+eps_high) a) + beta (e^d - d - 1)`` with ``rho = pi/pi_old``, ``d = ref -
    logp``.

    The derivative by logp is ``-a rho`` where the surrogate is not clipped and 0 where it is, plus ``beta (1 - e^d)``.
    """
    a = rows.advantages
    ratio = torch.ones_like(logp) if rows.old_logp is None else torch.exp(logp - rows.old_logp)
    clipped = ((a > 0) & (ratio > 1 + settings.epsilon_high)) | ((a < 0) & (ratio < 1 - settings.epsilon_low))
    bounded = torch.clamp(ratio, 1 - settings.epsilon_low, 1 + settings.epsilon_high)
    loss = -torch.minimum(ratio * a, bounded * a)
    slope = torch.where(clipped, torch.zeros_like(a), -a * ratio)
    if settings.beta != 0.0 and rows.ref_logp is not None:
        d = rows.ref_logp - logp
        loss = loss + settings.beta * (torch.exp(d) - d - 1)
        slope = slope + settings.beta * (1 - torch.exp(d))
    return RowLoss(loss, slope, clipped)
