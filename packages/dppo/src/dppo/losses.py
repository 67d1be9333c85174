"""The per-token surrogates of GRPO-type training, weighted per completion and divided by a fixed normaliser.

    L = (1/Z) Σ_i w_i Σ_t c_it · mask_it,   c_it = −min(ρ_it A_i, clip(ρ_it, 1−ε_low, 1+ε_high) A_i) + β·KL_it

The weight multiplies the finished per-token loss: it is neither in the ratio ρ nor in the clip. Z is that of the full
batch before pruning, so that L with w = 1/(1−P) has the full batch's gradient in expectation. For "grpo" the inner
sum is a mean over the completion's tokens and Z counts completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
SEQUENCE_LOSSES = ("grpo", "dr_grpo")  # Z counts completions; the others count tokens


@dataclass(frozen=True)
class Surrogate:
    """Which surrogate is minimised.

    Args:
        loss_type: "grpo" (mean over tokens, then over completions), "bnpo" and "dapo" (mean over the tokens of the
            batch), "dr_grpo" (constant B·L_max), "cispo" (clipped detached ratio times log-probability; token mean).
        level: importance ratio of a "token" or of the "sequence" (GSPO: geometric mean over the tokens).
        epsilon_low, epsilon_high: clip range; for "cispo" epsilon_high is the upper bound of the ratio itself.
        delta: upper bound of the unclipped ratio (two-sided clipping), or None.
        beta: weight of the k3 estimate of KL(π_θ ‖ π_ref).
        max_length: L_max, for "dr_grpo".
    """

    loss_type: LossType = "grpo"
    level: Literal["token", "sequence"] = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} is not supported: pruning is exact for losses that are additive over "
                f"completions with a fixed normaliser: {', '.join(LOSS_TYPES)}"
            )
        if self.level not in ("token", "sequence"):
            raise ValueError(f"level={self.level!r}: must be 'token' or 'sequence'")
        if self.loss_type == "dr_grpo" and not self.max_length:
            raise ValueError("loss_type='dr_grpo' needs max_length, the completion length the loss is divided by")

    def normalizer(self, mask: Shaped[Tensor, "batch time"]) -> float:
        """Z of the full batch whose completion mask this is: B, B·L_max or the number of completion tokens."""
        if self.loss_type == "grpo":
            return max(float(mask.shape[0]), 1.0)
        if self.loss_type == "dr_grpo":
            return max(float(mask.shape[0] * (self.max_length or 1)), 1.0)
        return max(float(mask.sum()), 1.0)

    def per_token(
        self,
        logps: Float[Tensor, "batch time"],
        old_logps: Float[Tensor, "batch time"] | None,
        advantages: Float[Tensor, " batch"],
        mask: Shaped[Tensor, "batch time"],
        ref_logps: Float[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "batch time"]:
        """c_it, before weights and masks. `old_logps=None` means on-policy: ρ = 1 with the gradient of logps."""
        old_logps = logps.detach() if old_logps is None else old_logps
        log_ratio = logps - old_logps
        if self.level == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ratio, signal = log_ratio.exp(), advantages[:, None]
        if self.loss_type == "cispo":
            loss = -ratio.clamp(max=self.epsilon_high).detach() * signal * logps
        else:
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
            loss = -torch.minimum(bounded * signal, clipped * signal)
        if self.beta:
            if ref_logps is None:
                raise ValueError(f"beta={self.beta} needs ref_logps, the log-probabilities under the reference model")
            gap = ref_logps - logps
            loss = loss + self.beta * (gap.exp() - gap - 1)
        return loss.expand_as(logps)

    def loss(
        self,
        logps: Float[Tensor, "batch time"],
        advantages: Float[Tensor, " batch"],
        mask: Shaped[Tensor, "batch time"],
        *,
        weight: Float[Tensor, " batch"] | None = None,
        normalizer: float | None = None,
        old_logps: Float[Tensor, "batch time"] | None = None,
        ref_logps: Float[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, ""]:
        """L of the kept completions.

        Args:
            logps: (B, T) log-probabilities of the completion tokens, with a graph.
            advantages: (B,) from the full groups.
            mask: (B, T) 1 at completion tokens.
            weight: (B,) w, default 1.
            normalizer: Z of the full batch; default that of this mask, right only if nothing was pruned.
            old_logps, ref_logps: (B, T), see `per_token`.
        """
        summed = (self.per_token(logps, old_logps, advantages, mask, ref_logps) * mask).sum(1)
        if self.loss_type == "grpo":
            summed = summed / mask.sum(1).clamp(min=1)
        if weight is not None:
            summed = summed * weight.to(summed.dtype)
        return summed.sum() / (self.normalizer(mask) if normalizer is None else normalizer)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)  # type: ignore[attr-defined]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * weight, None


def scale_gradient(values: Float[Tensor, "batch time"], weight: Float[Tensor, " batch"]) -> Float[Tensor, "batch time"]:
    """The values unchanged; gradients flowing back into row i are multiplied by weight[i].

    If row i of a loss depends on the parameters through these values alone, this weights the whole gradient of that
    row, whatever function of the values the loss is: ratio, clip and KL see the values as they are.
    """
    return _ScaleGradient.apply(values, weight.to(values.dtype)[:, None])
