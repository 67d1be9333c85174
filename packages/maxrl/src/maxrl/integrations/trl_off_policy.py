"""Sequence ratios in a TRL batch: what ``off_policy`` puts in the place of clipped token ratios.

See :mod:`maxrl.off_policy` for what each mode ascends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maxrl.coefficients import ratio_or_zero
from maxrl.integrations.trl_rows import GROUP

_BEHAVIOUR = ("old_logps", "sampling_per_token_logps", "old_per_token_logps")


def sequence_log_ratio(inputs: dict[str, Any], logps: Tensor) -> Tensor | None:
    """``log pi(z)/b(z)`` of each row, (B,), from the current token log-probabilities ``logps`` (B, L), or None when
    the batch holds none of the behaviour policy: generation and update are in step, and the ratio is 1."""
    mask = _mask(inputs)
    if inputs.get("old_logps") is not None:  # RLOO: one number a sequence
        return (logps * mask).sum(dim=1) - inputs["old_logps"]
    behaviour = inputs.get("sampling_per_token_logps")
    behaviour = inputs.get("old_per_token_logps") if behaviour is None else behaviour
    return None if behaviour is None else ((logps - behaviour) * mask).sum(dim=1)


def fold_sequence_ratio(inputs: dict[str, Any], logps: Tensor, log_scale: Tensor | None = None) -> None:
    """Replace the advantage a by ``rho a`` with the sequence ratio rho, and the old log-probabilities by the current
    ones, so that every token ratio is 1. ``log_scale`` (groups,) joins the exponent: a factor of each row's group."""
    log_ratio = sequence_log_ratio(inputs, logps)
    if log_ratio is None:
        return
    if inputs.get("old_logps") is not None:
        inputs["old_logps"] = (logps * _mask(inputs)).sum(dim=1)
    else:
        inputs["old_per_token_logps"] = logps
    if log_scale is not None:
        log_ratio = log_ratio + log_scale[inputs[GROUP]]
    inputs["advantages"] = inputs["advantages"] * torch.exp(log_ratio).to(inputs["advantages"].dtype)


@torch.no_grad()
def log_group_scale(trainer: Any, model: Any, batches: list[dict[str, Any]]) -> Tensor | None:
    """Log of the factor that makes ``a_i rho_i`` self-normalised, (groups,) float64 over all processes.

    ``a_i = r_i/mean`` has the sum N in a group with a success, so ``a_i rho_i (sum_j a_j)/(sum_j a_j rho_j)`` is
    ``N r_i rho_i / sum_j r_j rho_j``. ``batches`` are all micro-batches of this process that the generation was split
    into, for a group is spread over them; one forward pass over their rows with an advantage. None when the ratio is 1.

    Raises:
        ValueError: a batch with images, which this forward pass does not show the model.
    """
    ratios = []
    for batch in batches:
        if batch.get("pixel_values") is not None:
            raise ValueError("off_policy = 'self_normalised' takes text only: use off_policy = 'behaviour' with images")
        if all(batch.get(name) is None for name in _BEHAVIOUR):
            return None
        live = batch["advantages"] != 0
        if not bool(live.any()):
            live[:1] = True  # every process makes as many forward passes
        rows = {k: v[live] for k, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] == live.shape}
        log_ratio = sequence_log_ratio(rows, _log_probs(trainer, model, rows))
        assert log_ratio is not None  # the batch has the behaviour's log-probabilities, for the type checker
        ratios.append((rows[GROUP], rows["advantages"].double(), log_ratio.double()))
    group, a, log_ratio = (torch.cat(parts) for parts in zip(*ratios, strict=True))
    gather = trainer.accelerator.gather
    # The largest ratio of all cancels within each group; without it exp() stays in range.
    top = gather(log_ratio[a != 0].max().reshape(1) if bool((a != 0).any()) else log_ratio.new_full((1,), -1e30)).max()
    count = int(gather(group.max().reshape(1)).max()) + 1
    sums = torch.zeros(2, count, dtype=torch.float64, device=a.device)
    sums[0].index_add_(0, group, a)
    sums[1].index_add_(0, group, torch.where(a != 0, a * torch.exp(log_ratio - top), torch.zeros_like(a)))
    sums = trainer.accelerator.reduce(sums, reduction="sum")
    scale = ratio_or_zero(sums[0], sums[1])
    return torch.where(scale > 0, scale.log() - top, torch.zeros_like(scale))


def _log_probs(trainer: Any, model: Any, rows: dict[str, Any]) -> Tensor:
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, rows["completion_ids"].shape[1])[0]


def _mask(inputs: dict[str, Any]) -> Tensor:
    mask = inputs["completion_mask"]
    return mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]
