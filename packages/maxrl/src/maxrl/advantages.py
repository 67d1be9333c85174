"""``maxrl_advantages``: rewards and groups in, one advantage per rollout out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from maxrl.coefficients import Estimator, GroupCounts, RealRewards, ratio_or_zero
from maxrl.estimators import ESTIMATORS, check_order, get_estimator, group_coefficients
from maxrl.groups import GroupIds, Groups, make_groups

REWARD_MODES = ("binary", "nonnegative")
SCALES = ("mean", "batch")


def maxrl_advantages(
    rewards: Shaped[Tensor, " b"],
    *,
    group_size: int | None = None,
    group_ids: GroupIds | None = None,
    estimator: str = "maxrl",
    order: int | None = None,
    beta: float = 1.0,
    reward_mode: str = "binary",
    threshold: float | None = None,
    valid: Bool[Tensor, " b"] | None = None,
    eps: float = 0.0,
    ddof: int = 1,
    drop_empty: bool = False,
    scale: str = "mean",
) -> Float[Tensor, " b"]:
    r"""Advantages of maximum-likelihood RL: ``a_i = (r_i - mean)/mean`` within each prompt's group, 0 without a
    success.

    One line of a GRPO loop changes: the group *mean* divides where the standard deviation did. The gradient estimate
    of a prompt is ``(1/N) sum_i a_i grad log m(z_i|x)``; averaged over prompts it ascends the log-likelihood of success
    cut at order ``effective_order(estimator, N, order)``. See :mod:`maxrl.estimators` for every estimator, its formula
    and its source.

    Args:
        rewards: (B,) float, int or bool on any device; 0 or 1 in the default mode. bfloat16 and float16 are accepted.
        group_size: N, when rollouts of a prompt stand together and all prompts have N of them.
        group_ids: (B,) ids otherwise: an integer tensor, a list of strings, an object array, of unequal group sizes
            in any order.
        estimator: a name of ``maxrl.estimators.ESTIMATORS``.
        order: T, for the estimators that take one (``subset``, ``subset_cv``, ``loo``, ``maclaurin``, and k of
            ``pkpo``); default N.
        beta: size of the control variate of ``control_variate``, ``subset_cv`` and ``pkpo``; any value keeps the order.
        reward_mode: ``"binary"`` raises on rewards other than 0 and 1. ``"nonnegative"`` takes any reward >= 0 and is
            the ratio estimator of ``grad log E[r]`` (bias O(1/N)).
        threshold: binarise first: success means ``r >= threshold``. Only with ``"binary"``.
        valid: (B,) bool; rollouts that are False (crashed verifier, NaN reward) leave N and K and get 0. When that
            shrinks a group below ``order`` (or below two), its order shrinks with it (its advantage is 0).
        eps: added to the denominator; 0 is exact, 1e-6 is the official code's, 1e-4 TRL's for ``grpo``.
        ddof: of the standard deviation of ``grpo``: 1 in the LLM runs of the paper and in TRL, 0 in its image runs.
        drop_empty: zero the groups without a success for ``subset_cv``; with T = N and beta = 1 this is ``maxrl``.
        scale: ``"mean"`` leaves a_i as in the formulas, to be averaged over the rollouts of the group. ``"batch"``
            multiplies by ``B/(G N_g)``, with G the groups that have a valid rollout, so that the plain mean over the
            batch weighs every prompt equally when groups are unequal or some rollouts are invalid.

    Returns:
        (B,) float32 on the device of ``rewards``, without a graph. Sums are taken in float64. Deterministic, no loop
        over groups; O(B), plus O(sum of K) when 1 <= T < N.

    Raises:
        ValueError: see the arguments; also NaN or infinite rewards that ``valid`` does not exclude, negative rewards,
            and a group of one rollout with an estimator that compares rollouts.
        TypeError: rewards that are not a tensor.
    """
    known = get_estimator(estimator)
    check_order(known, order)
    _check_options(known, reward_mode, threshold, eps, beta, ddof, drop_empty, scale)
    _check_rewards(rewards, valid)
    with torch.no_grad():
        groups = make_groups(rewards.shape[0], rewards.device, group_size, group_ids)
        _check_group_sizes(known, groups, order)
        values = _clean(rewards, valid, reward_mode, threshold)
        size = _sizes(groups, valid)
        if reward_mode == "binary":
            counts = GroupCounts(groups.sum(values), size, _orders(size, order), beta, eps, ddof, drop_empty)
            success, failure = group_coefficients(known, counts)
            advantages = torch.where(values > 0, groups.spread(success.float()), groups.spread(failure.float()))
        else:
            advantages = _from_reals(known, groups, values, valid, size, eps, beta, ddof)
        if valid is not None:
            advantages = advantages.masked_fill(~valid, 0.0)
        if scale == "batch":
            factor = rewards.shape[0] / ((size > 0).sum().clamp(min=1) * size)
            advantages = advantages * groups.spread(torch.where(size > 0, factor, torch.zeros_like(factor)))
        return advantages.to(torch.float32)


@dataclass(frozen=True)
class GroupStatistics:
    """Counts of a batch of pass/fail rewards: ``size`` (G,), ``successes`` (G,), and shares of the G groups."""

    size: Tensor
    successes: Tensor

    @property
    def share_without_success(self) -> float:
        return self._share(self.successes == 0)

    @property
    def share_all_success(self) -> float:
        return self._share(self.successes == self.size)

    def _share(self, which: Tensor) -> float:
        alive = self.size > 0
        return float((which & alive).sum() / alive.sum().clamp(min=1))


def group_statistics(
    rewards: Shaped[Tensor, " b"],
    *,
    group_size: int | None = None,
    group_ids: GroupIds | None = None,
    threshold: float | None = None,
    valid: Bool[Tensor, " b"] | None = None,
) -> GroupStatistics:
    """N and K of every group, with the same rules and errors as :func:`maxrl_advantages` in binary mode."""
    _check_rewards(rewards, valid)
    groups = make_groups(rewards.shape[0], rewards.device, group_size, group_ids)
    values = _clean(rewards, valid, "binary", threshold)
    return GroupStatistics(_sizes(groups, valid).long(), groups.sum(values).long())


def _sizes(groups: Groups, valid: Tensor | None) -> Tensor:
    """N of each group without the invalid rollouts, (G,) float64."""
    return groups.given.double() if valid is None else groups.sum(valid.double())


def _orders(size: Tensor, order: int | None) -> Tensor:
    return size if order is None else torch.clamp(size, max=float(order))


def _from_reals(
    known: Estimator,
    groups: Groups,
    values: Tensor,
    valid: Tensor | None,
    size: Tensor,
    eps: float,
    beta: float,
    ddof: int,
) -> Tensor:
    mean = groups.spread(ratio_or_zero(groups.sum(values), size))
    deviation = values - mean if valid is None else (values - mean).masked_fill(~valid, 0.0)
    std = torch.sqrt(ratio_or_zero(groups.sum(deviation * deviation), (size - ddof).clamp(min=0)))
    rows = RealRewards(values, mean, groups.spread(size), groups.spread(std), eps, beta)
    assert known.real is not None  # checked by _check_options
    advantages = known.real(rows)
    if known.min_group > 1:
        return torch.where(rows.size >= known.min_group, advantages, torch.zeros_like(advantages))
    return advantages


def _check_options(
    known: Estimator,
    reward_mode: str,
    threshold: float | None,
    eps: float,
    beta: float,
    ddof: int,
    drop_empty: bool,
    scale: str,
) -> None:
    if reward_mode not in REWARD_MODES:
        raise ValueError(f"reward_mode = {reward_mode!r}: choose one of {', '.join(REWARD_MODES)}")
    if scale not in SCALES:
        raise ValueError(f"scale = {scale!r}: choose one of {', '.join(SCALES)}")
    if reward_mode == "nonnegative" and known.real is None:
        able = ", ".join(name for name, e in ESTIMATORS.items() if e.real is not None)
        raise ValueError(
            f"estimator {known.name!r} is defined for pass/fail rewards only; non-negative rewards: {able}"
        )
    if threshold is not None and reward_mode != "binary":
        raise ValueError("threshold makes rewards pass/fail: use it with reward_mode='binary'")
    if threshold is not None and threshold != threshold:
        raise ValueError("threshold is NaN")
    if not (eps >= 0 and np.isfinite(eps)):
        raise ValueError(f"eps = {eps}: a finite number >= 0 is needed")
    if not np.isfinite(beta):
        raise ValueError(f"beta = {beta}: a finite number is needed")
    if ddof not in (0, 1):
        raise ValueError(f"ddof = {ddof}: 0 (divide by N) or 1 (divide by N - 1)")
    if drop_empty and known.name != "subset_cv":
        raise ValueError(f"drop_empty belongs to estimator 'subset_cv', not to {known.name!r}")


def _check_rewards(rewards: Tensor, valid: Tensor | None) -> None:
    if not isinstance(rewards, Tensor):
        raise TypeError(f"rewards must be a torch tensor, got {type(rewards).__name__}: wrap them in torch.tensor(...)")
    if rewards.ndim != 1:
        raise ValueError(
            f"rewards must have shape (B,), got {tuple(rewards.shape)}: flatten them and pass group_size or group_ids"
        )
    if rewards.is_complex():
        raise TypeError("rewards are complex numbers")
    if valid is None:
        return
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != rewards.shape:
        raise ValueError(f"valid must be a bool tensor of the shape of rewards, {tuple(rewards.shape)}")
    if valid.device != rewards.device:
        raise ValueError(f"valid is on {valid.device} and rewards on {rewards.device}: move them to one device")


def _check_group_sizes(known: Estimator, groups: Groups, order: int | None) -> None:
    if groups.count == 0 or (known.min_group == 1 and order is None):
        return
    smallest = int(groups.given.min())
    if smallest < known.min_group:
        raise ValueError(
            f"estimator {known.name!r} compares the rollouts of a prompt and a group has {smallest}: draw at least "
            f"{known.min_group}, or use {known.instead}"
        )
    if order is not None and order > smallest:
        raise ValueError(
            f"order = {order}, but a group has only {smallest} rollouts: the order must lie in 1..{smallest}"
        )


def _clean(rewards: Tensor, valid: Tensor | None, reward_mode: str, threshold: float | None) -> Tensor:
    """Rewards as float64, invalid rows 0, checked and binarised."""
    values = rewards.to(torch.float64)
    if valid is not None:
        values = values.masked_fill(~valid, 0.0)
    if values.numel() == 0:
        return values
    low, high = (float(v) for v in torch.aminmax(values))
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError(
            f"{_first(values, ~torch.isfinite(values))}: rewards must be finite; exclude rollouts that could not be "
            "scored with valid="
        )
    if low < 0:
        raise ValueError(
            f"{_first(values, values < 0)} is negative, and a likelihood of success has no negative mass: shift the "
            "rewards, or binarise them with threshold="
        )
    if threshold is not None:
        # Compared in the dtype of the rewards: a float32 reward of 0.7 reaches a threshold of 0.7.
        dtype = rewards.dtype if rewards.is_floating_point() else torch.float64
        passed = rewards >= torch.tensor(threshold, dtype=dtype, device=rewards.device)
        return (passed if valid is None else passed & valid).to(torch.float64)
    if reward_mode == "binary":
        odd = values * values != values  # true for everything but 0 and 1
        if bool(odd.any()):
            raise ValueError(
                f"{_first(values, odd)} is neither 0 nor 1, and MaxRL is defined for pass/fail rewards: pass "
                "threshold= to say from where on a reward is a success, or reward_mode='nonnegative' for the "
                "ratio estimator of grad log E[r]"
            )
    return values


def _first(values: Tensor, where: Tensor) -> str:
    row = int(torch.nonzero(where)[0])
    return f"reward {float(values[row])!r} at row {row}"
