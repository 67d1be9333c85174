"""Leaving rollouts with advantage 0 out of a TRL batch, with the loss of the full batch kept exactly."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

# The prompt of each row, counted over all processes; put there for ``off_policy="self_normalised"``.
GROUP = "maxrl_group"

# What TRL 1.16 puts into a batch, by what its rows and columns are.
_PER_COMPLETION_TOKEN = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
_PER_ROW = ("prompt_ids", "prompt_mask", "advantages", "old_logps", GROUP, *_PER_COMPLETION_TOKEN)
_WHOLE_BATCH = ("num_items_in_batch",)

_MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
_MEAN_OVER_TOKENS = ("bnpo",)
_FIXED_NORMALISER = ("dapo", "cispo", "vespo")


def why_keep(trainer: Any) -> str | None:
    """Why rows with advantage 0 must stay in this trainer's batches, or None when they have no gradient."""
    args = trainer.args
    loss_type = getattr(args, "loss_type", None)
    if getattr(trainer, "beta", 0.0) != 0.0:
        return f"the KL term (beta = {trainer.beta}) gives every rollout a gradient"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus gives every rollout a gradient"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the load-balancing loss of the mixture of experts gives every rollout a gradient"
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile takes its quantile over the tokens of every rollout"
    if loss_type is not None and loss_type not in (*_MEAN_OVER_ROWS, *_MEAN_OVER_TOKENS, *_FIXED_NORMALISER):
        return f"the normaliser of loss_type = {loss_type!r} is not known to maxrl"
    return None


def drop_dead_rows(trainer: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    """``(batch of the live rows, factor of its loss, completion tokens dropped on all processes)``.

    At least one row stays, so that the loss keeps its graph, and every process keeps as many rows as the one with the
    most live ones, because TRL gathers per-row statistics.
    """
    unknown = [k for k, v in inputs.items() if v is not None and k not in (*_PER_ROW, *_WHOLE_BATCH)]
    if unknown:
        _warn_once(trainer, f"drop_zero_advantage is off for batches with {', '.join(sorted(unknown))}")
        return inputs, 1.0, 0.0
    mask = inputs["completion_mask"]
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"]
    tokens = mask.sum(dim=1)
    live = (inputs["advantages"] != 0) & (tokens > 0)
    count = trainer.accelerator.gather(live.sum().reshape(1)).max().clamp(min=1)
    keep = _fill(live, tokens, int(count))
    kept = torch.zeros_like(live).index_fill_(0, keep, True)
    dropped = trainer.accelerator.reduce(tokens[~kept].sum().float(), reduction="sum")
    if keep.numel() == live.numel():
        return inputs, 1.0, float(dropped)
    batch = {k: v[keep] if k in _PER_ROW and v is not None else v for k, v in inputs.items()}
    _trim(batch, trainer)
    return batch, _loss_factor(trainer, tokens, keep), float(dropped)


def _fill(live: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Indices of the live rows, filled up to ``count`` with the shortest dead ones, in their order."""
    cost = torch.where(live, torch.full_like(tokens, -1), tokens)
    return torch.sort(torch.sort(cost, stable=True).indices[:count]).values


def _trim(batch: dict[str, Any], trainer: Any) -> None:
    """Cut the columns that are padding in every kept row. Only on the right: positions count from the left."""
    if getattr(trainer, "pad_to_multiple_of", None) is not None:
        return
    mask = batch["completion_mask"]
    width = max(int(mask.sum(dim=1).max()), 1)
    if not bool(mask[:, :width].any()) or bool(mask[:, width:].any()):
        return  # a mask with holes, from masked truncated completions or tools
    for name in _PER_COMPLETION_TOKEN:
        value = batch.get(name)
        if value is not None and value.dim() == 2 and value.shape[1] == mask.shape[1]:
            batch[name] = value[:, :width]


def _loss_factor(trainer: Any, tokens: Tensor, keep: Tensor) -> float:
    """TRL's normaliser of the kept rows over that of all rows."""
    loss_type = getattr(trainer.args, "loss_type", None)
    if loss_type in _FIXED_NORMALISER:
        return 1.0
    if loss_type in _MEAN_OVER_TOKENS:
        return float(tokens[keep].sum().clamp(min=1) / tokens.sum().clamp(min=1))
    return keep.numel() / tokens.numel()


def _warn_once(trainer: Any, message: str) -> None:
    if not getattr(trainer, "_maxrl_warned", False):
        trainer._maxrl_warned = True
        warnings.warn(message, stacklevel=3)
