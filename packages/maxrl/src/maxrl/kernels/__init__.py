"""Fused operations: linear head, log-probability and clipped policy loss in one, without the (R, V) logits.

The segment sums of :func:`maxrl.maxrl_advantages` have no kernel of their own: ``index_add`` on B numbers is far from
being a bottleneck on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxrl.kernels.policy_loss import PolicyLoss, fused_policy_loss

if TYPE_CHECKING:
    from icml26_shared.kernels import KernelSpec

__all__ = ["AOT_SPECS", "PolicyLoss", "fused_policy_loss"]


def AOT_SPECS() -> list[KernelSpec]:
    """The Triton kernels in their default configurations, to compile ahead of time."""
    from maxrl.kernels.policy_loss_triton import specs

    return specs()
