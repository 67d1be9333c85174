"""Linear head, log-probability and clipped policy loss in one operation."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icml26_shared.kernels import ENVIRONMENT_VARIABLE, Path, choose_path
from maxrl.kernels.policy_loss_chunked import ChunkedResult, Needs, chunked_policy_loss
from maxrl.kernels.policy_loss_reference import reference_policy_loss
from maxrl.kernels.policy_loss_rows import LossSettings, Rows

IGNORED = -100


@dataclass(frozen=True)
class PolicyLoss:
    """What :func:`fused_policy_loss` returns. Only ``loss`` carries a graph.

    Attributes:
        loss: scalar, ``sum_r w_r l_r``.
        logp: (R,) log-probability of each target; 0 for rows that were skipped.
        entropy: (R,) entropy of each row's distribution in nats, 0 for skipped rows; None unless asked for.
        live: (R,) bool, the rows that were computed.
        clipped: (R,) bool, rows whose surrogate was clipped.
        advantages: (R,) as given, for the shares below.
    """

    loss: Float[Tensor, ""]
    logp: Float[Tensor, " r"]
    entropy: Float[Tensor, " r"] | None
    live: Bool[Tensor, " r"]
    clipped: Bool[Tensor, " r"]
    advantages: Float[Tensor, " r"]

    @property
    def clip_share_positive(self) -> float:
        """Share of the live rows with a > 0 whose ratio was above ``1 + epsilon_high``."""
        return self._share(self.advantages > 0)

    @property
    def clip_share_negative(self) -> float:
        """Share of the live rows with a < 0 whose ratio was below ``1 - epsilon_low``."""
        return self._share(self.advantages < 0)

    def _share(self, sign: Tensor) -> float:
        rows = self.live & sign
        return float((self.clipped & rows).sum() / rows.sum().clamp(min=1))


def fused_policy_loss(
    hidden: Float[Tensor, "r d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, " r"],
    advantages: Float[Tensor, " r"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    old_logp: Float[Tensor, " r"] | None = None,
    ref_logp: Float[Tensor, " r"] | None = None,
    normalizer: float | Tensor | None = None,
    row_weights: Float[Tensor, " r"] | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    deterministic: bool | None = None,
    path: Path | None = None,
) -> PolicyLoss:
    r"""Clipped policy loss of completion tokens from their hidden states, without the (R, V) logits.

    ``loss = (1/Z) sum_r [ -min(rho_r a_r, clip(rho_r, 1-eps_low, 1+eps_high) a_r) + beta (e^d - d - 1) ]`` with
    ``logp_r = log softmax(logits_r)[target_r]``, ``rho_r = exp(logp_r - old_logp_r)``, ``d = ref_logp_r - logp_r`` and
    ``logits = softcap tanh(logit_scale (H W^T + bias)/softcap)/temperature`` (paper, App. F: beta = 0, Z the number of
    completion tokens of the mini-batch).

    Rows whose advantage is 0 have no gradient and are skipped, forward and backward, unless ``beta`` gives them one;
    rows with the target -100 are always skipped. Z keeps counting them, so that loss and gradients equal those of the
    full batch: MaxRL gives weight 0 to every rollout of a prompt without a success.

    Args:
        hidden: (R, D) float32, float64, bfloat16 or float16, contiguous or not; one row a completion token.
        weight: (V, D) head, dtype of ``hidden``; may be tied to an embedding.
        targets: (R,) token ids in 0..V-1, or -100 to ignore a row.
        advantages: (R,) the advantage of each token's rollout.
        bias: (V,) or None.
        old_logp: (R,) log-probabilities of the policy that sampled; None: on-policy, the ratio is 1.
        ref_logp: (R,) of the reference model; needed when ``beta`` is not 0.
        normalizer: Z; default the number of targets other than -100, and at least 1.
        row_weights: (R,) further factors of each row; default 1.
        epsilon_low, epsilon_high: clip range of the ratio.
        beta: weight of the KL estimate k3.
        temperature, softcap, logit_scale: of the logits.
        entropy: also return each row's entropy. It carries no gradient; an entropy bonus needs another loss.
        deterministic: bitwise repeatable gradients on a GPU; default ``torch.are_deterministic_algorithms_enabled()``.
            The other paths are deterministic anyway.
        path: ``"triton"``, ``"cpu"`` (chunks of rows) or ``"torch"`` (the reference, which does materialise the
            logits); default: by device, see ``icml26_shared.kernels.choose_path``.

    Returns:
        A :class:`PolicyLoss`. Loss and log-probabilities are float32 (float64 for float64 inputs). Gradients reach
        ``hidden``, ``weight`` and ``bias``. Double backward is not supported.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a target out of range, beta without
        ``ref_logp``,
            settings out of range.
    """
    settings = LossSettings(
        temperature,
        softcap,
        logit_scale,
        epsilon_low,
        epsilon_high,
        beta,
        entropy,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    )
    _check(hidden, weight, targets, advantages, bias, old_logp, ref_logp, row_weights, settings)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    counted = targets != IGNORED
    if normalizer is None:
        normalizer = counted.sum().clamp(min=1)
    weights = torch.ones_like(advantages, dtype=dtype) if row_weights is None else row_weights.to(dtype)
    rows = Rows(
        targets.long(),
        advantages.to(dtype),
        weights / normalizer,
        None if old_logp is None else old_logp.to(dtype),
        None if ref_logp is None else ref_logp.to(dtype),
    )
    live = counted & ((advantages != 0) | (beta != 0))
    with torch.no_grad():
        picked = torch.nonzero(live).squeeze(1)
        everything = picked.numel() == live.numel()
    chosen = hidden if everything else hidden[picked]
    loss, logp, row_entropy, clipped = _dispatch(
        chosen, weight, bias, rows if everything else rows[picked], settings, path
    )
    scattered = [_spread(x, picked, live, everything) for x in (logp, row_entropy, clipped)]
    return PolicyLoss(loss, scattered[0], scattered[1], live, scattered[2], rows.advantages)  # type: ignore[arg-type]


def _spread(values: Tensor | None, picked: Tensor, live: Tensor, everything: bool) -> Tensor | None:
    if values is None or everything:
        return values
    return torch.zeros(live.shape, dtype=values.dtype, device=values.device).index_copy_(0, picked, values)


def _dispatch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, settings: LossSettings, path: Path | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    chosen = choose_path(hidden, weight, prefer=path)
    if hidden.shape[0] == 0:
        return _no_rows(hidden, weight, bias, settings)
    asked = path or os.environ.get(ENVIRONMENT_VARIABLE, "").lower()
    if chosen == "torch" and asked == "torch":
        return reference_policy_loss(hidden, weight, bias, rows, settings)
    # Tensor cores have no float64, and a GPU without Triton must not get the (R, V) logits either.
    triton = chosen == "triton" and hidden.dtype != torch.float64
    loss, logp, entropy, clipped = _FusedPolicyLoss.apply(hidden, weight, bias, rows, settings, triton)
    return loss, logp, entropy, clipped


def _no_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Loss 0 with a graph: every gradient is exactly 0, so that an optimizer step or a DDP reduction goes ahead."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    loss = (hidden.sum() * 0 + weight[:1].sum() * 0).to(dtype)
    if bias is not None:
        loss = loss + (bias[:1].sum() * 0).to(dtype)
    empty = torch.zeros(0, dtype=dtype, device=hidden.device)
    return loss, empty, empty if settings.entropy else None, empty.bool()


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Rows,
        settings: LossSettings,
        triton: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        needs = Needs(*ctx.needs_input_grad[:3])
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rows, ctx.settings, ctx.needs, ctx.triton, ctx.result = rows, settings, needs, triton, None
        if triton:
            from maxrl.kernels.policy_loss_triton import triton_forward

            forward = triton_forward(hidden, weight, bias, rows, settings)
            ctx.result = forward
            loss, logp, entropy, clipped = forward.loss, forward.logp, forward.entropy, forward.clipped
        else:
            result = chunked_policy_loss(hidden, weight, bias, rows, settings, needs)
            ctx.result = result if needs.any else None
            loss, logp, entropy, clipped = result.loss, result.logp, result.entropy, result.clipped
        ctx.mark_non_differentiable(*(x for x in (logp, entropy, clipped) if x is not None))
        return loss, logp, entropy, clipped

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        if ctx.triton:
            from maxrl.kernels.policy_loss_triton import triton_backward

            grads = triton_backward(hidden, weight, bias, ctx.rows, ctx.settings, ctx.needs, ctx.result)
        else:
            # The gradients are handed over, not kept: autograd can then take the buffers without a copy. A second
            # backward through a retained graph computes them again.
            result: ChunkedResult = ctx.result or chunked_policy_loss(
                hidden, weight, bias, ctx.rows, ctx.settings, ctx.needs
            )
            ctx.result = None
            grads = (result.grad_hidden, result.grad_weight, result.grad_bias)
        scaled = [
            None if grad is None else grad.mul_(grad_loss).to(x.dtype)
            for grad, x in zip(grads, (hidden, weight, bias), strict=True)
        ]
        return (*scaled, None, None, None)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    bias: Tensor | None,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    row_weights: Tensor | None,
    settings: LossSettings,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (R, D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight.shape)}: flatten "
            "batch and time into rows"
        )
    if not hidden.is_floating_point() or weight.dtype != hidden.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: cast both to one floating type")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, one per token of the vocabulary ({weight.shape[0]})")
    count = hidden.shape[0]
    for name, value in (
        ("targets", targets),
        ("advantages", advantages),
        ("old_logp", old_logp),
        ("ref_logp", ref_logp),
        ("row_weights", row_weights),
    ):
        if value is None:
            continue
        if value.shape != (count,):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, one entry per row of hidden ({count}) is needed")
        if value.device != hidden.device:
            raise ValueError(f"{name} is on {value.device} and hidden on {hidden.device}: move them to one device")
    if count and not bool((((targets >= 0) & (targets < weight.shape[0])) | (targets == IGNORED)).all()):
        raise ValueError(f"targets must lie in 0..{weight.shape[0] - 1}, or be {IGNORED} to ignore a row")
    _check_settings(settings, ref_logp)


def _check_settings(settings: LossSettings, ref_logp: Tensor | None) -> None:
    if settings.beta != 0 and ref_logp is None:
        raise ValueError(
            f"beta = {settings.beta} weighs the divergence from a reference model: pass ref_logp, or beta = 0"
        )
    if not settings.temperature > 0:
        raise ValueError(f"temperature = {settings.temperature}: it must be positive")
    if settings.softcap is not None and not settings.softcap > 0:
        raise ValueError(f"softcap = {settings.softcap}: it must be positive, or None")
    if not 0 <= settings.epsilon_low <= 1 or not settings.epsilon_high >= 0:
        raise ValueError(
            f"epsilon_low = {settings.epsilon_low}, epsilon_high = {settings.epsilon_high}: 0 <= epsilon_low <= 1 and "
            "epsilon_high >= 0 are needed"
        )
    if not math.isfinite(settings.logit_scale) or not math.isfinite(settings.beta):
        raise ValueError("logit_scale and beta must be finite")
