# mypy: disable-error-code="name-defined"
"""The policy loss as Triton kernels: logits exist only as tiles in registers.

Forward: one program per block of rows walks over the vocabulary with a running maximum and sum, and keeps the
log-normaliser and the target's log-probability (8 bytes a row). Backward: tiles are computed again. Deterministic: one
kernel owns blocks of rows and sums grad_hidden, another owns tiles of the vocabulary and sums grad_weight. Otherwise
one kernel computes each tile once and adds to both with float32 atomics.

Floors for R rows, V tokens, width D: the forward reads the head once per block of rows, (R/BLOCK_R) V D bytes times the
size of an element, and takes 2 R V D operations; the backward takes 6 R V D with atomics and 8 R V D without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml26_shared.kernels import KernelSpec, interpreting, jit, triton_language
from maxrl.kernels.policy_loss_chunked import Needs
from maxrl.kernels.policy_loss_rows import LossSettings, Rows, row_loss

tl = triton_language()

# No spills on sm_80, sm_90 and gfx942, plain and with every option on (`python -m icml26_shared.aot maxrl`).
BLOCK_R, BLOCK_V, BLOCK_D, NUM_WARPS, NUM_STAGES = 64, 128, 32, 8, 2
# With a bias, the kernels that sum its gradient have too few registers on gfx942 for tiles as deep as the others'.
BLOCK_D_BIAS_GRADIENT = 16


@jit
def _logits_tile(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(BLOCK_R, BLOCK_V) of y in ``logits = outer * y``: ``y = inner (H W^T + bias)``, and its tanh with a soft-cap.
    Accumulated in float32. Two factors take the place of scale, cap and temperature, and no division by them is left:
    on gfx942 divisions by numbers of the call cost scalar registers."""
    acc = tl.zeros((BLOCK_R, BLOCK_V), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        h = tl.load(
            h_ptr + rows[:, None] * stride_hr + d[None, :] * stride_hd,
            mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0,
        )  # fmt: skip
        w = tl.load(
            w_ptr + cols[None, :] * stride_wv + d[:, None] * stride_wd,
            mask=(cols[None, :] < V) & (d[:, None] < D), other=0.0,
        )  # fmt: skip
        if WIDEN:
            h, w = h.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(h, w, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    acc = acc * inner
    if HAS_CAP:
        # tanh(x) = 1 - 2/(e^{2x} + 1): finite for every x in float32
        acc = 1.0 - 2.0 / (tl.exp(2.0 * acc) + 1.0)
    return acc


@jit
def _narrow_dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a @ b`` with the float32 a rounded to the type of b, accumulated in float32."""
    a = a.to(b.dtype)
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, logp_ptr, entropy_ptr,
    R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, PRECISION: tl.constexpr, WIDEN:
    tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    inside = rows < R
    target = tl.load(target_ptr + rows, mask=inside, other=0)
    top = tl.full((BLOCK_R,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    moment = tl.zeros((BLOCK_R,), tl.float32)
    picked = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        z = outer * _logits_tile(
            h_ptr, w_ptr, b_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner,
            HAS_BIAS, HAS_CAP, PRECISION, WIDEN, BLOCK_R, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        picked += tl.sum(tl.where(cols[None, :] == target[:, None], z, 0.0), axis=1)
        masked = tl.where(cols[None, :] < V, z, -float("inf"))
        new_top = tl.maximum(top, tl.max(masked, axis=1))
        e = tl.exp(masked - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(e, axis=1)
        if HAS_ENTROPY:
            moment = moment * shrink + tl.sum(tl.where(cols[None, :] < V, e * z, 0.0), axis=1)
        top = new_top
    lse = top + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=inside)
    tl.store(logp_ptr + rows, picked - lse, mask=inside)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + rows, lse - moment / total, mask=inside)


@jit
def _gradient_tile(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, rows, cols,
    R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient by ``H W^T``: ``slope (1[v = target] - softmax)`` times the derivative of soft-cap, scale,
    temperature."""
    y = _logits_tile(
        h_ptr, w_ptr, b_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner,
        HAS_BIAS, HAS_CAP, PRECISION, WIDEN, BLOCK_R, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    inside = rows < R
    target = tl.load(target_ptr + rows, mask=inside, other=0)
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    slope = tl.load(slope_ptr + rows, mask=inside, other=0.0)
    p = tl.exp(y * outer - lse[:, None])
    g = slope[:, None] * (tl.where(cols[None, :] == target[:, None], 1.0, 0.0) - p)
    if HAS_CAP:
        g = g * (1.0 - y * y)
    return tl.where((cols[None, :] < V) & inside[:, None], g * (inner * outer), 0.0)


@jit
def _grad_hidden_kernel(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, grad_h_ptr,
    R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad_hidden (R, D) float32 contiguous, zero at the start; a program owns BLOCK_R rows of it."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    for start in range(0, V, BLOCK_V):
        cols = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        g = _gradient_tile(
            h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv,
            stride_wd, inner, outer, HAS_BIAS, HAS_CAP, PRECISION, WIDEN, BLOCK_R, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        for start_d in range(0, D, BLOCK_D):
            d = start_d + tl.arange(0, BLOCK_D)
            w = tl.load(
                w_ptr + cols[:, None] * stride_wv + d[None, :] * stride_wd,
                mask=(cols[:, None] < V) & (d[None, :] < D), other=0.0,
            )  # fmt: skip
            part = _narrow_dot(g, w, PRECISION, WIDEN)
            where = grad_h_ptr + rows[:, None] * D + d[None, :]
            mask = (rows[:, None] < R) & (d[None, :] < D)
            tl.store(where, tl.load(where, mask=mask, other=0.0) + part, mask=mask)
        # Every thread must see the sums before the next tile adds to them.
        tl.debug_barrier()


@jit
def _grad_weight_kernel(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, grad_w_ptr, grad_b_ptr,
    R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad_weight (V, D) and grad_bias (V,) float32 contiguous, zero at the start; a program owns BLOCK_V tokens."""
    cols = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    bias_sum = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, R, BLOCK_R):
        rows = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        g = _gradient_tile(
            h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv,
            stride_wd, inner, outer, HAS_BIAS, HAS_CAP, PRECISION, WIDEN, BLOCK_R, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        if HAS_BIAS:
            bias_sum += tl.sum(g, axis=0)
        for start_d in range(0, D, BLOCK_D):
            d = start_d + tl.arange(0, BLOCK_D)
            h = tl.load(
                h_ptr + rows[:, None] * stride_hr + d[None, :] * stride_hd,
                mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0,
            )  # fmt: skip
            part = _narrow_dot(tl.trans(g), h, PRECISION, WIDEN)
            where = grad_w_ptr + cols[:, None] * D + d[None, :]
            mask = (cols[:, None] < V) & (d[None, :] < D)
            tl.store(where, tl.load(where, mask=mask, other=0.0) + part, mask=mask)
        tl.debug_barrier()
    if HAS_BIAS:
        tl.store(grad_b_ptr + cols, bias_sum, mask=cols < V)


@jit
def _grad_atomic_kernel(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, grad_h_ptr, grad_w_ptr, grad_b_ptr,
    R, V, D, stride_hr, stride_hd, stride_wv, stride_wd, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    WANT_H: tl.constexpr, WANT_W: tl.constexpr, WANT_B: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the logits, added to all gradients (float32 contiguous, zero at the start)."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    g = _gradient_tile(
        h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, slope_ptr, rows, cols, R, V, D, stride_hr, stride_hd, stride_wv,
        stride_wd, inner, outer, HAS_BIAS, HAS_CAP, PRECISION, WIDEN, BLOCK_R, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    if WANT_B:
        tl.atomic_add(grad_b_ptr + cols, tl.sum(g, axis=0), mask=cols < V)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        if WANT_H:
            w = tl.load(
                w_ptr + cols[:, None] * stride_wv + d[None, :] * stride_wd,
                mask=(cols[:, None] < V) & (d[None, :] < D), other=0.0,
            )  # fmt: skip
            part = _narrow_dot(g, w, PRECISION, WIDEN)
            mask = (rows[:, None] < R) & (d[None, :] < D)
            tl.atomic_add(grad_h_ptr + rows[:, None] * D + d[None, :], part, mask=mask)
        if WANT_W:
            h = tl.load(
                h_ptr + rows[:, None] * stride_hr + d[None, :] * stride_hd,
                mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0,
            )  # fmt: skip
            part_w = _narrow_dot(tl.trans(g), h, PRECISION, WIDEN)
            mask_w = (cols[:, None] < V) & (d[None, :] < D)
            tl.atomic_add(grad_w_ptr + cols[:, None] * D + d[None, :], part_w, mask=mask_w)


@dataclass(frozen=True)
class TritonForward:
    """What the backward needs, 8 bytes a row and the slopes, next to the results."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor | None
    clipped: Tensor
    lse: Tensor
    slope: Tensor


def _shared(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: LossSettings) -> tuple[list, dict]:
    cap = settings.softcap
    inner = settings.logit_scale / (settings.temperature if cap is None else cap)
    outer = 1.0 if cap is None else cap / settings.temperature
    shape = [hidden.shape[0], weight.shape[0], hidden.shape[1]]
    numbers = [*shape, *hidden.stride(), *weight.stride(), float(inner), float(outer)]
    tf32 = hidden.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32
    constants = {
        "HAS_BIAS": bias is not None,
        "HAS_CAP": settings.softcap is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
        # Triton's interpreter multiplies the bit patterns of bfloat16 in tl.dot: there the operands become float32
        # first.
        "WIDEN": interpreting(),
        "BLOCK_R": BLOCK_R,
        "BLOCK_V": BLOCK_V,
        "BLOCK_D": BLOCK_D,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }
    return numbers, constants


def triton_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, settings: LossSettings
) -> TritonForward:
    """Forward of :func:`maxrl.fused_policy_loss` for R >= 1 live rows on a GPU (or in Triton's interpreter)."""
    count = hidden.shape[0]
    lse, logp, entropy = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3))
    numbers, constants = _shared(hidden, weight, bias, settings)
    _forward_kernel[(-(-count // BLOCK_R),)](
        hidden, weight, weight if bias is None else bias, rows.targets, lse, logp, entropy, *numbers,
        HAS_ENTROPY=settings.entropy, **constants,
    )  # fmt: skip
    loss = row_loss(logp, rows, settings)
    return TritonForward(
        (loss.loss * rows.weights).sum(),
        logp,
        entropy if settings.entropy else None,
        loss.clipped,
        lse,
        loss.slope * rows.weights,
    )


def triton_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    settings: LossSettings,
    needs: Needs,
    forward: TritonForward,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by hidden, weight and bias in float32 for an incoming gradient of 1. Clipped rows are left out."""

    def zeros(like: Tensor, wanted: bool) -> Tensor | None:
        return torch.zeros(like.shape, dtype=torch.float32, device=like.device) if wanted else None

    grad_h, grad_w = zeros(hidden, needs.hidden), zeros(weight, needs.weight)
    grad_b = zeros(bias, needs.bias) if bias is not None else None
    active = torch.nonzero(forward.slope).squeeze(1)
    if active.numel() == 0 or not needs.any:
        return grad_h, grad_w, grad_b
    whole = active.numel() == hidden.shape[0]
    h = hidden if whole else hidden[active]
    part = grad_h if whole or grad_h is None else torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    targets, lse, slope = (x if whole else x[active] for x in (rows.targets, forward.lse, forward.slope))
    _launch_backward(h, weight, bias, targets, lse, slope, part, grad_w, grad_b, settings)
    if not whole and grad_h is not None and part is not None:
        grad_h.index_copy_(0, active, part)
    return grad_h, grad_w, grad_b


def _launch_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    slope: Tensor,
    grad_h: Tensor | None,
    grad_w: Tensor | None,
    grad_b: Tensor | None,
    settings: LossSettings,
) -> None:
    numbers, constants = _shared(hidden, weight, bias, settings)
    shallow = constants | {"BLOCK_D": BLOCK_D if bias is None else BLOCK_D_BIAS_GRADIENT}
    inputs = (hidden, weight, weight if bias is None else bias, targets, lse, slope)
    row_blocks, tiles = -(-hidden.shape[0] // BLOCK_R), -(-weight.shape[0] // BLOCK_V)
    spare = lse  # stands for a gradient that is not wanted; never written
    if not settings.deterministic:
        _grad_atomic_kernel[(row_blocks, tiles)](
            *inputs, spare if grad_h is None else grad_h, spare if grad_w is None else grad_w,
            spare if grad_b is None else grad_b, *numbers,
            WANT_H=grad_h is not None, WANT_W=grad_w is not None, WANT_B=grad_b is not None, **shallow,
        )  # fmt: skip
        return
    if grad_h is not None:
        _grad_hidden_kernel[(row_blocks,)](*inputs, grad_h, *numbers, **constants)
    if grad_w is not None or grad_b is not None:
        w_sum = torch.zeros_like(weight, dtype=torch.float32) if grad_w is None else grad_w
        b_sum = torch.zeros_like(weight[:, 0], dtype=torch.float32) if grad_b is None else grad_b
        _grad_weight_kernel[(tiles,)](*inputs, w_sum, b_sum, *numbers, **shallow)


def specs() -> list[KernelSpec]:
    """Default configurations in bfloat16, plain and with everything on."""
    strides = dict.fromkeys(("stride_hr", "stride_hd", "stride_wv", "stride_wd"), "i32")
    numbers = {"R": "i32", "V": "i32", "D": "i32", **strides, "inner": "fp32", "outer": "fp32"}
    base = {"h_ptr": "*bf16", "w_ptr": "*bf16", "b_ptr": "*bf16", "target_ptr": "*i64", "lse_ptr": "*fp32"}
    slope = {"slope_ptr": "*fp32"}
    blocks = {"PRECISION": "tf32", "WIDEN": False, "BLOCK_R": BLOCK_R, "BLOCK_V": BLOCK_V}
    out = []
    for label, everything in (("plain", False), ("bias and soft-cap", True)):
        flags: dict[str, Any] = {"HAS_BIAS": everything, "HAS_CAP": everything, **blocks, "BLOCK_D": BLOCK_D}
        shallow = {"BLOCK_D": BLOCK_D_BIAS_GRADIENT} if everything else {}
        wants = {"WANT_H": True, "WANT_W": True, "WANT_B": everything}
        grads = {"grad_h_ptr": "*fp32", "grad_w_ptr": "*fp32", "grad_b_ptr": "*fp32"}
        for name, fn, pointers, extra in (
            ("forward", _forward_kernel, {"logp_ptr": "*fp32", "entropy_ptr": "*fp32"}, {"HAS_ENTROPY": everything}),
            ("grad_hidden", _grad_hidden_kernel, {**slope, "grad_h_ptr": "*fp32"}, {}),
            ("grad_weight", _grad_weight_kernel, {**slope, "grad_w_ptr": "*fp32", "grad_b_ptr": "*fp32"}, shallow),
            ("grad_atomic", _grad_atomic_kernel, {**slope, **grads}, wants | shallow),
        ):
            out.append(
                KernelSpec(
                    f"policy_loss {name} bf16 {label}",
                    fn,
                    {**base, **pointers, **numbers},
                    {**flags, **extra},
                    num_warps=NUM_WARPS,
                    num_stages=NUM_STAGES,
                    divisible_by_16=(
                        *base,
                        *pointers,
                        *(slope if name != "forward" else ()),
                        "D",
                        "stride_hr",
                        "stride_wv",
                    ),
                )
            )
    return out
