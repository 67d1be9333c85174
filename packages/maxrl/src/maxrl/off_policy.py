r"""Advantages for rollouts drawn from another policy than the one trained: replay, asynchronous trainers, stale
weights.

With rollouts of a behaviour policy b and sequence ratios ``rho_i = pi_theta(z_i)/b(z_i)``,

``E_b[(1/N) sum_i a_i rho_i S_i] = w_T(p_b) grad p_theta`` with T the order of the estimator:

the direction is right, and the weight of a prompt's difficulty is stale: it is that of the behaviour's pass rate p_b
(derived: a_i depends on the rewards only, and rho_i corrects the one factor that depends on theta).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from maxrl.advantages import maxrl_advantages
from maxrl.coefficients import ratio_or_zero
from maxrl.groups import GroupIds, make_groups

MODES = ("behaviour", "self_normalised")


def off_policy_advantages(
    rewards: Shaped[Tensor, " b"],
    log_ratio: Float[Tensor, " b"],
    *,
    mode: str = "behaviour",
    group_size: int | None = None,
    group_ids: GroupIds | None = None,
    estimator: str = "maxrl",
    order: int | None = None,
    beta: float = 1.0,
    threshold: float | None = None,
    valid: Tensor | None = None,
) -> Float[Tensor, " b"]:
    r"""Advantages that multiply the scores of off-policy rollouts.

    - ``"behaviour"``: ``rho_i a_i``; expectation ``w_T(p_b) grad p_theta``, exact.
    - ``"self_normalised"``: ``N r_i rho_i / sum_j r_j rho_j`` in each group (0 without a success): consistent for
      ``grad log p_theta`` with bias O(1/N). ``estimator``, ``order`` and ``beta`` do not enter.

    Args:
        rewards: (B,) pass/fail rewards, see :func:`maxrl.maxrl_advantages`.
        log_ratio: (B,) ``log pi_theta(z_i) - log b(z_i)``, the **sum** over the tokens of the completion.
        mode: see above.

    Returns:
        (B,) float32, without a graph.

    Raises:
        ValueError: unknown mode, log ratios that are not finite, and everything ``maxrl_advantages`` raises.
    """
    if mode not in MODES:
        raise ValueError(f"off_policy mode {mode!r}: choose one of {', '.join(MODES)}")
    if log_ratio.shape != rewards.shape:
        raise ValueError(
            f"log_ratio has shape {tuple(log_ratio.shape)}, rewards {tuple(rewards.shape)}: one ratio per rollout"
        )
    kept = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    if not bool(torch.isfinite(log_ratio.detach())[kept].all()):
        raise ValueError("log_ratio holds NaN or infinite values: exclude those rollouts with valid=")
    name = estimator if mode == "behaviour" else "conditional"
    on_policy = maxrl_advantages(
        rewards,
        group_size=group_size,
        group_ids=group_ids,
        estimator=name,
        order=order if mode == "behaviour" else None,
        beta=beta,
        threshold=threshold,
        valid=valid,
    )
    with torch.no_grad():
        log_rho = log_ratio.detach().double().masked_fill(~kept, 0.0)
        if mode == "behaviour":
            return (on_policy.double() * log_rho.exp()).float()
        return _self_normalised(on_policy, log_rho, group_size, group_ids, kept)


def _self_normalised(
    conditional: Tensor, log_rho: Tensor, group_size: int | None, group_ids: GroupIds | None, kept: Tensor
) -> Tensor:
    groups = make_groups(log_rho.numel(), log_rho.device, group_size, group_ids)
    success = conditional > 0
    # The largest ratio of the batch cancels within each group; subtracting it keeps exp() in range.
    top = log_rho[success].max() if bool(success.any()) else log_rho.new_zeros(())
    rho = torch.where(success, (log_rho - top).exp(), torch.zeros_like(log_rho))
    size = groups.sum(kept.double())
    return (rho * groups.spread(ratio_or_zero(size, groups.sum(rho)))).float()
