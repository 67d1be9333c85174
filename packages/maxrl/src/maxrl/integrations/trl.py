"""MaxRL in TRL: :class:`MaxRLTrainer` in the place of ``GRPOTrainer``, a mixin for its relatives, and :func:`patch`.

TRL has no hook for advantages. The mixin keeps the gathered rewards that ``_calculate_rewards`` returns, lets TRL do
the rest of ``_generate_and_score_completions``, and then puts its own advantages into the batch **and** into the log,
which would otherwise show TRL's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from icml26_shared.errors import require
from maxrl import off_policy
from maxrl.advantages import REWARD_MODES, group_statistics, maxrl_advantages
from maxrl.estimators import check_order, effective_order, get_estimator
from maxrl.integrations import trl_off_policy, trl_resume, trl_rows

_trl = require("trl", "trl")
GRPOConfig, GRPOTrainer = _trl.GRPOConfig, _trl.GRPOTrainer


@dataclass
class MaxRLArguments:
    """The settings of MaxRL; mix them into another trainer's config: ``class C(MaxRLArguments, RLOOConfig)``.

    Attributes:
        estimator: a name of ``maxrl.estimators.ESTIMATORS``; the default has order ``num_generations - 1``.
        order: T, for the estimators that take one; default ``num_generations``.
        maxrl_beta: size of the control variate (``beta`` is TRL's KL coefficient).
        reward_mode: ``"binary"`` or ``"nonnegative"``.
        reward_threshold: a reward of at least this is a success; default: rewards must be 0 or 1.
        success_reward: name of the reward function that defines success. Default: the product of all of them.
        aux_weight: weight of the other reward functions' RLOO advantage; only with ``success_reward``.
        drop_zero_advantage: leave rollouts with advantage 0 out of forward and backward. The gradient stays the same;
            it is switched off, and said so once, where such rollouts have a gradient after all.
        off_policy: ``"behaviour"``: multiply the advantage by the sequence ratio pi/pi_old instead of clipping token
            ratios; the order is the estimator's, the pass rate in the weight the behaviour's. ``"self_normalised"``:
            the advantage is ``N r_i rho_i / sum_j r_j rho_j``, consistent for ``grad log p`` of the current policy;
            one more forward pass over the rollouts with a success in every update, where a generation serves several.
        max_unscorable: stop when more rollouts than this could not be scored (NaN or None) in the run; default: never.
    """

    estimator: str = field(default="maxrl", metadata={"help": "Advantage estimator of MaxRL."})
    order: int | None = field(default=None, metadata={"help": "Order T of the objective (default: num_generations)."})
    maxrl_beta: float = field(default=1.0, metadata={"help": "Size of the control variate."})
    reward_mode: str = field(default="binary", metadata={"help": "'binary' or 'nonnegative'."})
    reward_threshold: float | None = field(default=None, metadata={"help": "Success means reward >= threshold."})
    success_reward: str | None = field(default=None, metadata={"help": "Reward function that defines success."})
    aux_weight: float = field(default=0.0, metadata={"help": "Weight of the other rewards' RLOO advantage."})
    drop_zero_advantage: bool = field(default=True, metadata={"help": "Skip rollouts with advantage 0."})
    off_policy: str | None = field(default=None, metadata={"help": "None, 'behaviour' or 'self_normalised'."})
    max_unscorable: int | None = field(default=None, metadata={"help": "Stop after this many unscorable rollouts."})


@dataclass
class MaxRLConfig(MaxRLArguments, GRPOConfig):  # type: ignore[misc, valid-type]
    """``GRPOConfig`` with the settings of :class:`MaxRLArguments`. ``loss_type="dapo"`` (TRL's default) is the paper's;
    ``"dr_grpo"`` divides by a constant and keeps the estimator exactly unbiased.

    Raises:
        ValueError: settings that MaxRL would ignore (``scale_rewards``, ``multi_objective_aggregation``) or cannot use.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_arguments(self)


def _fill_defaults(args: Any) -> None:
    """Give a plain ``GRPOConfig`` the default settings."""
    for setting in fields(MaxRLArguments):
        if not hasattr(args, setting.name):
            setattr(args, setting.name, setting.default)


def _check_arguments(args: Any) -> None:
    known = get_estimator(args.estimator)
    check_order(known, args.order)
    n = args.num_generations
    if args.order is not None and args.order > n:
        raise ValueError(f"order = {args.order} with num_generations = {n}: the order must lie in 1..{n}")
    if n < known.min_group:
        raise ValueError(f"estimator {known.name!r} needs at least {known.min_group} generations per prompt, got {n}")
    if args.reward_mode not in REWARD_MODES:
        raise ValueError(f"reward_mode = {args.reward_mode!r}: choose one of {', '.join(REWARD_MODES)}")
    if args.off_policy not in (None, *off_policy.MODES):
        raise ValueError(f"off_policy = {args.off_policy!r}: choose None, 'behaviour' or 'self_normalised'")
    if args.off_policy == "self_normalised":
        _check_self_normalised(args)
    _check_ignored(args)


def _check_self_normalised(args: Any) -> None:
    if args.estimator not in ("maxrl", "conditional"):
        raise ValueError(
            f"off_policy = 'self_normalised' is an estimator of its own and would ignore estimator = "
            f"{args.estimator!r}: leave it at its default, or use off_policy = 'behaviour'"
        )
    if args.aux_weight != 0.0:
        raise ValueError("off_policy = 'self_normalised' cannot be mixed with aux_weight: use off_policy = 'behaviour'")


def _check_ignored(args: Any) -> None:
    """Settings of the host that the recomputed advantages would silently ignore."""
    expected: dict[str, Any] = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    expected |= {"normalize_advantages": False, "reward_clip_range": None}
    for name, value in expected.items():
        given = getattr(args, name, value)
        if given != value:
            raise ValueError(
                f"{name} = {given!r} would be ignored: MaxRL computes the advantages itself; leave it at {value!r}"
            )
    if hasattr(args, "normalize_advantages") and getattr(args, "beta", 0.0) != 0.0:
        raise ValueError(
            f"beta = {args.beta}: RLOOTrainer adds the KL term to the reward, which MaxRL replaces; set beta=0.0"
        )
    if args.aux_weight != 0.0 and args.success_reward is None:
        raise ValueError("aux_weight weighs the reward functions that do not define success: name success_reward")
    vllm_corrects = getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False)
    if args.off_policy is not None and vllm_corrects:
        raise ValueError(
            "off_policy and vllm_importance_sampling_correction correct the same ratio: switch one of them off"
        )


class MaxRLMixin:
    """Put before a TRL trainer with GRPO's interface: ``class T(MaxRLMixin, RLOOTrainer)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("args", args[2] if len(args) > 2 else None)
        if given is not None:  # before the host builds models that a bad setting would waste
            _fill_defaults(given)
            _check_arguments(given)
        super().__init__(*args, **kwargs)
        self._start_maxrl()

    # -- advantages ------------------------------------------------------------------------------------------------

    def _start_maxrl(self) -> None:
        _fill_defaults(self.args)
        _check_arguments(self.args)
        self._success_columns = self._find_success_columns()
        self._unscorable = 0
        self._train_sampler: Any = None
        self._gathered_rewards: Tensor | None = None
        self._off_policy_inputs: dict[str, Any] | None = None
        self._off_policy_scale: Tensor | None = None
        self._log_scale: Tensor | None = None
        self._log_scale_of: tuple[int, Any] = (-1, None)
        reason = trl_rows.why_keep(self) if self.args.drop_zero_advantage else None
        self._drops_rows = self.args.drop_zero_advantage and reason is None
        if reason is not None:
            warnings.warn(f"drop_zero_advantage is off: {reason}", stacklevel=3)

    def _find_success_columns(self) -> list[int]:
        names, wanted = list(self.reward_func_names), self.args.success_reward
        if wanted is None:
            if any(float(w) != 1.0 for w in self.reward_weights):
                raise ValueError(
                    "reward_weights would be ignored: success is the product of all reward functions; name "
                    "success_reward, and weigh the others with aux_weight"
                )
            return list(range(len(names)))
        if names.count(wanted) != 1:
            raise ValueError(
                f"success_reward = {wanted!r} must name one reward function; there are: {', '.join(names)}"
            )
        if self.args.aux_weight == 0.0 and len(names) > 1:
            others = ", ".join(name for name in names if name != wanted)
            warnings.warn(f"aux_weight is 0: these reward functions are only logged: {others}", stacklevel=4)
        return [names.index(wanted)]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._gathered_rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        return self._gathered_rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self._gathered_rewards is None:
            raise RuntimeError(
                "this TRL no longer calls _calculate_rewards: maxrl needs the rewards to compute advantages"
            )
        rewards, self._gathered_rewards = self._gathered_rewards, None
        mode = "train" if self.model.training else "eval"
        n = self.num_generations if mode == "train" else self.num_generations_eval
        everywhere = self._maxrl_advantages(rewards, n, mode)
        rows = output["advantages"].shape[0]
        start = self.accelerator.process_index * rows
        output["advantages"] = everywhere[start : start + rows].to(output["advantages"].device)
        if mode == "train" and self.args.off_policy == "self_normalised":
            output[trl_rows.GROUP] = torch.arange(start, start + rows, device=output["advantages"].device) // n
        log = self._logs["advantages"]
        for _ in range(min(len(log), everywhere.numel())):
            log.pop()
        log.extend(everywhere.tolist())
        return output

    def _maxrl_advantages(self, rewards: Tensor, n: int, mode: str) -> Tensor:
        """Advantages (B,) of all processes from their rewards (B, reward functions)."""
        args = self.args
        success, valid = self._success(rewards)
        if mode == "train":
            self._count_unscorable(valid)
        known = get_estimator("conditional" if args.off_policy == "self_normalised" else args.estimator)
        if n < known.min_group:  # evaluation with one generation a prompt: there is nothing to compare
            advantages = torch.zeros_like(success, dtype=torch.float32)
        else:
            order = None if args.order is None else min(args.order, n)
            advantages = maxrl_advantages(
                success,
                group_size=n,
                estimator=known.name,
                order=order,
                beta=args.maxrl_beta,
                reward_mode=args.reward_mode,
                valid=valid,
            )
            self._log_maxrl(mode, success, valid, advantages, n, order)
        return advantages + self._aux_advantages(rewards, valid, n)

    def _success(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Success (B,), with NaN where no function could score, and where it is valid (B,)."""
        columns = rewards[:, self._success_columns].float()
        known = ~columns.isnan()
        valid = known.any(dim=1)
        if self.args.reward_threshold is not None:
            columns = (columns >= self.args.reward_threshold).float()
        elif self.args.reward_mode == "binary":
            # A product of 2 and 0.5 is 1: each function must be pass/fail, not only their product. The check is the
            # advantage function's own.
            maxrl_advantages(columns.flatten(), group_size=1, estimator="reinforce", valid=known.flatten())
        return torch.where(known, columns, 1.0).prod(dim=1), valid

    def _aux_advantages(self, rewards: Tensor, valid: Tensor, n: int) -> Tensor | float:
        if self.args.aux_weight == 0.0 or n < 2:
            return 0.0
        others = [i for i in range(rewards.shape[1]) if i not in self._success_columns]
        total = (rewards[:, others] * self.reward_weights.to(rewards.device)[others]).nansum(dim=1)
        # RLOO does not change when all rewards shift together, so negative ones may be lifted to 0.
        lifted = total - total[valid].min() if bool(valid.any()) else total
        loo = maxrl_advantages(lifted, group_size=n, estimator="rloo", reward_mode="nonnegative", valid=valid)
        return self.args.aux_weight * loo

    def _count_unscorable(self, valid: Tensor) -> None:
        self._unscorable += int((~valid).sum())
        limit = self.args.max_unscorable
        if limit is not None and self._unscorable > limit:
            raise RuntimeError(
                f"{self._unscorable} rollouts could not be scored, more than max_unscorable = {limit}: look at "
                "the verifier"
            )

    def _log_maxrl(self, mode: str, success: Tensor, valid: Tensor, a: Tensor, n: int, order: int | None) -> None:
        metrics = self._metrics[mode]
        stats = group_statistics(success, group_size=n, valid=valid, threshold=0.5)
        if self.args.reward_mode == "nonnegative":
            stats = group_statistics(success, group_size=n, valid=valid, threshold=torch.finfo(torch.float32).tiny)
        else:
            # Self-normalised ratios are consistent for log p, and of order N where every ratio is 1.
            name = "conditional" if self.args.off_policy == "self_normalised" else self.args.estimator
            true_order = effective_order(name, n, order)
            if true_order is not None:
                metrics["maxrl/effective_order"].append(float(true_order))
        metrics["maxrl/frac_groups_no_success"].append(stats.share_without_success)
        metrics["maxrl/frac_groups_all_success"].append(stats.share_all_success)
        metrics["maxrl/max_advantage"].append(float(a.max()) if a.numel() else 0.0)

    # -- loss ------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        factor = 1.0
        scale = self._self_normalising_scale(model, inputs)
        if self._drops_rows and self.model.training:
            inputs, factor, dropped = trl_rows.drop_dead_rows(self, inputs)
            self._metrics["train"]["maxrl/dropped_tokens"].append(dropped)
        with self._off_policy(inputs, scale) as seen:
            loss = super()._compute_loss(model, seen)  # type: ignore[misc]
        return loss if factor == 1.0 else loss * factor

    def _self_normalising_scale(self, model: Any, inputs: dict[str, Any]) -> Tensor | None:
        """Factor of each group under the current weights: computed once an update, for all micro-batches of the
        generation together."""
        if trl_rows.GROUP not in inputs:
            return None
        batches = self._buffered_inputs if self._buffered_inputs is not None else [inputs]
        step, known = self._log_scale_of
        if step != self.state.global_step or known is not batches:
            self._log_scale = trl_off_policy.log_group_scale(self, model, batches)
            self._log_scale_of = (self.state.global_step, batches)
        return self._log_scale

    @contextmanager
    def _off_policy(self, inputs: dict[str, Any], scale: Tensor | None) -> Iterator[dict[str, Any]]:
        if self.args.off_policy is None:
            yield inputs
            return
        self._off_policy_inputs, self._off_policy_scale = dict(inputs), scale
        try:
            yield self._off_policy_inputs
        finally:
            self._off_policy_inputs = self._off_policy_scale = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._off_policy_inputs is not None:
            # TRL reads advantages and old log-probabilities after this call: from here on the token ratio is 1 and the
            # advantage carries the ratio of the whole sequence.
            trl_off_policy.fold_sequence_ratio(self._off_policy_inputs, result[0].detach(), self._off_policy_scale)
        return result

    # -- resuming --------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        return self._train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        trl_resume.save(self, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            trl_resume.load(self, checkpoint)

    # What the methods above find on the trainer they are mixed into.
    args: Any
    model: Any
    accelerator: Any
    num_generations: int
    num_generations_eval: int
    reward_func_names: list[str]
    reward_weights: Tensor
    _metrics: Any
    _logs: Any
    _buffered_inputs: Any
    state: Any


class MaxRLTrainer(MaxRLMixin, GRPOTrainer):  # type: ignore[misc, valid-type]
    """``trl.GRPOTrainer`` with MaxRL's advantages: same constructor, :class:`MaxRLConfig` as ``args``.

    Each step logs ``maxrl/effective_order``, ``maxrl/frac_groups_no_success``, ``maxrl/frac_groups_all_success``,
    ``maxrl/max_advantage`` and ``maxrl/dropped_tokens``. TRL's own ``clip_ratio/high_*`` is the share of clipped tokens
    with a > 0 and ``clip_ratio/low_*`` that with a < 0; over the live rollouts when dead ones are dropped.
    """

    _name = "MaxRL"
    _tag_names = ["trl", "maxrl"]  # noqa: RUF012 - as TRL declares it


def patch(trainer: Any, **settings: Any) -> Any:
    """Give an existing ``GRPOTrainer`` or ``RLOOTrainer`` MaxRL's advantages; returns the same object.

    Args:
        trainer: a trainer that has not begun a step.
        settings: fields of :class:`MaxRLArguments`.

    Raises:
        ValueError: an unknown setting, or settings of the trainer that MaxRL would ignore.
        TypeError: not a trainer of this kind.
    """
    names = {setting.name for setting in fields(MaxRLArguments)}
    if unknown := set(settings) - names:
        raise ValueError(f"unknown settings {sorted(unknown)}: choose from {sorted(names)}")
    if not hasattr(trainer, "_generate_and_score_completions"):
        raise TypeError(
            f"{type(trainer).__name__} is no GRPO-like trainer: maxrl needs _generate_and_score_completions"
        )
    for name, value in settings.items():
        setattr(trainer.args, name, value)
    before = type(trainer)
    if not isinstance(trainer, MaxRLMixin):
        trainer.__class__ = type(f"MaxRL{before.__name__}", (MaxRLMixin, before), {})
    try:
        trainer._start_maxrl()
    except ValueError:
        trainer.__class__ = before
        raise
    return trainer
