"""The policy loss in plain torch: every logit materialised, autograd for the gradients. What the other paths must
equal."""

from __future__ import annotations

import torch
from torch import Tensor

from maxrl.kernels.policy_loss_rows import LossSettings, Rows, transform_logits


def reference_policy_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """``(loss, logp (R,), entropy (R,) or None, clipped (R,) bool)``; shapes as in :func:`maxrl.fused_policy_loss`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    raw = hidden.to(dtype) @ weight.to(dtype).T
    log_probs = torch.log_softmax(transform_logits(raw, None if bias is None else bias.to(dtype), settings), dim=-1)
    logp = log_probs.gather(1, rows.targets.unsqueeze(1)).squeeze(1)
    old = logp.detach() if rows.old_logp is None else rows.old_logp
    ratio = torch.exp(logp - old)
    bounded = torch.clamp(ratio, 1 - settings.epsilon_low, 1 + settings.epsilon_high)
    loss = -torch.minimum(ratio * rows.advantages, bounded * rows.advantages)
    if settings.beta != 0.0 and rows.ref_logp is not None:
        d = rows.ref_logp - logp
        loss = loss + settings.beta * (torch.exp(d) - d - 1)
    a = rows.advantages
    clipped = ((a > 0) & (ratio > 1 + settings.epsilon_high)) | ((a < 0) & (ratio < 1 - settings.epsilon_low))
    entropy = -(log_probs.exp() * log_probs).sum(-1).detach() if settings.entropy else None
    return (loss * rows.weights).sum(), logp.detach(), entropy, clipped
