"""The weighted clipped loss on packed tokens: one number a segment, straight from flat log-probabilities.

    L_s = c_s Σ_{t in s} [ −min(ρ_t A_s, clip(ρ_t, 1−ε_low, 1+ε_high) A_s) + β (e^{g_t} − g_t − 1) ]

with ρ_t = exp(logp_t − old_t), g_t = ref_t − logp_t, and c_s = w_s/Z (for "grpo" w_s/(Z·length)): the weight multiplies
the finished loss and never enters the clip. The backward pass needs ∂L_s/∂logp_t only, which the forward pass
stores, so nothing else is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from icml26_shared.kernels import KernelSpec, Path, choose_path, jit, triton_language

tl: Any = triton_language()

BLOCK = 1024


@dataclass(frozen=True)
class Clip:
    """Constants of the loss.

    Args:
        epsilon_low, epsilon_high: clip range. delta: upper bound of the unclipped ratio, or None. beta: KL weight.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0


def packed_policy_loss(
    logps: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " segments"],
    coefficients: Float[Tensor, " segments"],
    cu_seqlens: Int64[Tensor, " segments+1"],
    *,
    old_logps: Float[Tensor, " tokens"] | None = None,
    ref_logps: Float[Tensor, " tokens"] | None = None,
    clip: Clip | None = None,
    path: Path | None = None,
) -> Float[Tensor, " segments"]:
    """Loss of each segment; their sum is the batch's loss.

    Args:
        logps: (T,) of the completion tokens of all segments, with a graph.
        advantages: (S,) A of the full groups. coefficients: (S,) c.
        cu_seqlens: (S+1,) boundaries of the segments; empty segments have loss 0.
        old_logps: (T,) under the behaviour policy; None means ρ = 1.
        ref_logps: (T,) under the reference policy, needed with beta > 0.
        clip: constants; default `Clip()`.
        path: "triton", "cpu" or "torch"; default by device.

    Returns:
        (S,) fp32 (fp64 for fp64 input on the CPU), differentiable in logps.

    Raises:
        ValueError: sizes that do not fit, beta without ref_logps.
    """
    clip = clip or Clip()
    segments = len(cu_seqlens) - 1
    if logps.dim() != 1 or advantages.shape != (segments,) or coefficients.shape != (segments,):
        raise ValueError(
            f"logps {tuple(logps.shape)}, advantages {tuple(advantages.shape)}, coefficients "
            f"{tuple(coefficients.shape)}: one dimension each, and one entry for each of the {segments} segments"
        )
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != len(logps):
        raise ValueError(f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, logps has {len(logps)}")
    if clip.beta and ref_logps is None:
        raise ValueError(f"beta={clip.beta} needs ref_logps")
    old_logps = logps.detach() if old_logps is None else old_logps
    cu_seqlens = cu_seqlens.to(logps.device)
    ref_logps = ref_logps if clip.beta else None
    chosen = choose_path(logps, advantages, coefficients, prefer=path)
    if chosen == "torch":
        return reference(logps, advantages, coefficients, cu_seqlens, old_logps, ref_logps, clip)
    run = _launch if chosen == "triton" else _cpu
    return _FusedLoss.apply(logps, advantages, coefficients, cu_seqlens, old_logps, ref_logps, clip, run)


def _segment_of(cu_seqlens: Tensor) -> Tensor:
    return torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device).repeat_interleave(cu_seqlens.diff())


def reference(
    logps: Tensor, advantages: Tensor, coefficients: Tensor, cu_seqlens: Tensor, old_logps: Tensor,
    ref_logps: Tensor | None, clip: Clip,
) -> Tensor:  # fmt: skip
    """Plain autograd, in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    logps, segment = logps.to(dtype), _segment_of(cu_seqlens)
    signal = advantages.to(dtype)[segment]
    ratio = (logps - old_logps.to(dtype)).exp()
    bounded = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    loss = -torch.minimum(bounded * signal, ratio.clamp(1 - clip.epsilon_low, 1 + clip.epsilon_high) * signal)
    if ref_logps is not None:
        gap = ref_logps.to(dtype) - logps
        loss = loss + clip.beta * (gap.exp() - gap - 1)
    summed = torch.zeros(len(advantages), dtype=dtype, device=logps.device).index_add(0, segment, loss)
    return summed * coefficients.to(dtype)


def _cpu(
    logps: Tensor, advantages: Tensor, coefficients: Tensor, cu_seqlens: Tensor, old_logps: Tensor,
    ref_logps: Tensor | None, clip: Clip,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss of each segment, ∂L/∂logp of each token) in one vectorised pass."""
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    segment = _segment_of(cu_seqlens)
    signal, scale = advantages.to(dtype)[segment], coefficients.to(dtype)[segment]
    values = logps.to(dtype)
    ratio = (values - old_logps.to(dtype)).exp()
    bounded = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    clipped = ratio.clamp(1 - clip.epsilon_low, 1 + clip.epsilon_high)
    first, second = bounded * signal, clipped * signal
    moves = torch.where(first <= second, bounded == ratio, clipped == ratio)
    loss, slope = -torch.minimum(first, second), torch.where(moves, -ratio * signal, 0.0)
    if ref_logps is not None:
        gap = ref_logps.to(dtype) - values
        loss = loss + clip.beta * (gap.exp() - gap - 1)
        slope = slope + clip.beta * (1 - gap.exp())
    summed = torch.zeros(len(advantages), dtype=dtype, device=logps.device).index_add_(0, segment, loss * scale)
    return summed, slope * scale


@jit
def _loss_kernel(
    logp_ptr, old_ptr, ref_ptr, advantage_ptr, coefficient_ptr, bounds_ptr, loss_ptr, slope_ptr,
    epsilon_low, epsilon_high, delta, beta, HAS_REF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    begin, end = tl.load(bounds_ptr + segment), tl.load(bounds_ptr + segment + 1)
    signal = tl.load(advantage_ptr + segment).to(tl.float32)
    scale = tl.load(coefficient_ptr + segment).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ok = at < end
        value = tl.load(logp_ptr + at, mask=ok, other=0.0).to(tl.float32)
        ratio = tl.exp(value - tl.load(old_ptr + at, mask=ok, other=0.0).to(tl.float32))
        bounded = tl.minimum(ratio, delta)
        clipped = tl.minimum(tl.maximum(ratio, 1 - epsilon_low), 1 + epsilon_high)
        first, second = bounded * signal, clipped * signal
        moves = tl.where(first <= second, bounded == ratio, clipped == ratio)
        loss = -tl.minimum(first, second)
        slope = tl.where(moves, -ratio * signal, 0.0)
        if HAS_REF:
            gap = tl.load(ref_ptr + at, mask=ok, other=0.0).to(tl.float32) - value
            grown = tl.exp(gap)
            loss += beta * (grown - gap - 1)
            slope += beta * (1 - grown)
        total += tl.where(ok, loss, 0.0)
        tl.store(slope_ptr + at, slope * scale, mask=ok)
    tl.store(loss_ptr + segment, tl.sum(total, 0) * scale)


def _launch(
    logps: Tensor, advantages: Tensor, coefficients: Tensor, cu_seqlens: Tensor, old_logps: Tensor,
    ref_logps: Tensor | None, clip: Clip,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = torch.zeros(len(advantages), dtype=torch.float32, device=logps.device)
    slope = torch.zeros(len(logps), dtype=torch.float32, device=logps.device)
    if len(advantages):
        values, old = logps.contiguous(), old_logps.contiguous()
        _loss_kernel[(len(advantages),)](
            values, old, old if ref_logps is None else ref_logps.contiguous(), advantages.contiguous(),
            coefficients.contiguous(), cu_seqlens.contiguous(), loss, slope, clip.epsilon_low, clip.epsilon_high,
            float("inf") if clip.delta is None else clip.delta, clip.beta,
            HAS_REF=ref_logps is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return loss, slope


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logps: Tensor, advantages: Tensor, coefficients: Tensor, cu_seqlens: Tensor,
                old_logps: Tensor, ref_logps: Tensor | None, clip: Clip, run: Any) -> Tensor:  # fmt: skip
        loss, slope = run(logps, advantages, coefficients, cu_seqlens, old_logps, ref_logps, clip)
        ctx.save_for_backward(slope, cu_seqlens)
        ctx.dtype = logps.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        slope, cu_seqlens = ctx.saved_tensors
        return ((slope * grad[_segment_of(cu_seqlens)]).to(ctx.dtype), *([None] * 7))


def aot_specs() -> list[KernelSpec]:
    """The loss kernel with and without a KL term."""
    pointers = {
        "logp_ptr": "*fp32", "old_ptr": "*fp32", "ref_ptr": "*fp32", "advantage_ptr": "*fp32",
        "coefficient_ptr": "*fp32", "bounds_ptr": "*i64", "loss_ptr": "*fp32", "slope_ptr": "*fp32",
    }  # fmt: skip
    numbers = dict.fromkeys(("epsilon_low", "epsilon_high", "delta", "beta"), "fp32")
    return [
        KernelSpec(
            f"packed policy loss{' with KL' if has_ref else ''}", _loss_kernel, pointers | numbers,
            {"HAS_REF": has_ref, "BLOCK": BLOCK}, 4, 2, ("logp_ptr", "old_ptr", "ref_ptr"),
        )
        for has_ref in (False, True)
    ]  # fmt: skip
