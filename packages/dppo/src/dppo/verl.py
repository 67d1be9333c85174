"""Pruning in verl: call `prune_batch` on the batch right after `compute_advantage`.

Works on a DataProto (its `batch` of tensors and `non_tensor_batch`) or on a plain dict; verl itself is not imported.
(verl's own losses `dppo_tv` and `dppo_kl` are Divergence PPO, another method.)
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from dppo.config import PruningConfig
from dppo.draws import MaskGenerator
from dppo.pruning import PruneResult, prune_completions


def prune_batch(
    data: Any,
    cfg: PruningConfig | None = None,
    *,
    generator: MaskGenerator | int,
    weights: Literal["advantages", "rollout_is_weights"] = "advantages",
    progress: float = 0.0,
) -> PruneResult:
    """Draws the mask of a batch and writes its weights into it, in place.

    Args:
        data: with tensors "advantages" (B, L) and "response_mask" (B, L), and "uid", one a row, naming the group.
        cfg: options; the prompt level is not part of this call.
        generator: `MaskGenerator(seed, global_step)` or a seed.
        weights: where w goes. "advantages": A ← w·A. The clipped surrogate min(ρA, clip(ρ)A) is
            positively homogeneous in A, so this equals weighting the finished loss; a KL term in the loss would miss
            the weight. "rollout_is_weights": w multiplies (or becomes) the (B, L) weights verl applies to the finished
            loss.
        progress: share of training done.

    Returns:
        The PruneResult. Removed rows have an all-zero response_mask and advantages: drop them, with the
        normaliser of the full batch kept (loss_agg_mode "seq-mean-token-sum-norm" or a fixed global token count); or
        leave them in, which keeps every rank's batch size.

    Raises:
        ValueError: missing entries, or advantages that differ within a response.
    """
    tensors, others = _parts(data)
    for name in ("advantages", "response_mask"):
        if name not in tensors:
            raise ValueError(f"the batch has no {name!r}; call prune_batch after compute_advantage")
    uid = others.get("uid", tensors.get("uid"))
    if uid is None:
        raise ValueError("the batch has no 'uid', which names the group of each row")
    mask = tensors["response_mask"]
    advantages = _per_row(tensors["advantages"], mask)
    result = prune_completions(advantages, uid, cfg, generator=generator, lengths=mask.sum(1).long(), progress=progress)
    spread = result.weight.to(tensors["advantages"].dtype)[:, None]
    if weights == "advantages":
        tensors["advantages"] = tensors["advantages"] * spread
    elif weights == "rollout_is_weights":
        before = tensors.get("rollout_is_weights")
        tensors["rollout_is_weights"] = (torch.ones_like(tensors["advantages"]) if before is None else before) * spread
    else:
        raise ValueError(f"weights={weights!r}: must be 'advantages' or 'rollout_is_weights'")
    tensors["response_mask"] = mask * result.keep[:, None].to(mask.dtype)
    return result


def _parts(data: Any) -> tuple[MutableMapping[str, Any], Mapping[str, Any]]:
    """(tensors, the rest) of a DataProto or of a dict."""
    if isinstance(data, MutableMapping):
        return data, data
    if hasattr(data, "batch") and hasattr(data, "non_tensor_batch"):
        return data.batch, data.non_tensor_batch
    raise TypeError(f"expected a DataProto or a dict of tensors, got {type(data).__name__}")


def _per_row(advantages: Tensor, mask: Tensor) -> Tensor:
    """The one advantage of each response; 0 for responses without tokens."""
    if not mask.shape[1]:  # a batch of empty responses
        return advantages.new_zeros(len(mask))
    on = mask.bool()
    top = advantages.masked_fill(~on, float("-inf")).amax(1)
    bottom = advantages.masked_fill(~on, float("inf")).amin(1)
    some = on.any(1)
    uneven = some & (top - bottom > 1e-6 * top.abs().clamp(min=1))
    if bool(uneven.any()):
        raise ValueError(
            f"row {int(uneven.int().argmax())} has advantages that differ between its tokens; pruning decides by one "
            "advantage a response (an outcome-based estimator such as grpo)"
        )
    return torch.where(some, top, 0.0)
