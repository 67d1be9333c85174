"""What training needs of the activation quantiser: rotated tokens, their quantised values, and the gradient of both.

Forward ``y = x D H``, ``v = Q(y)``; backward ``dL/dx = (dL/dy + mask * dL/dv) H^T D`` with the straight-through mask
``|y| <= reach d`` kept as a bitmap; d is a constant of the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icml26_shared.kernels import Path, choose_path
from robuq.kernels.grid import Grid, encode, token_step, within
from robuq.kernels.hadamard_quant import FLOATS
from robuq.kernels.rotate import rotate_reference

if TYPE_CHECKING:
    from robuq.hadamard import Rotation


def fake_quant(
    x: Tensor,
    recipe: Rotation,
    signs: Tensor | None,
    grid: Grid,
    *,
    keep_rotated: bool = True,
    prefer: Path | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Rotate and quantise tokens, differentiably.

    Args:
        x: tokens [m, n], any float dtype.
        recipe, signs, grid: as for `robuq.kernels.hadamard_quant`.
        keep_rotated: whether the rotated tokens are wanted (the low-rank branch reads them).
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        ``y`` (or None) and ``v``, float32 [m, n'] (float64 for float64). A token with a value that is not finite has
        ``v`` = NaN; other tokens are not touched by it.
    """
    if x.dim() != 2 or x.shape[1] != recipe.width:
        raise ValueError(f"fake_quant takes tokens [m, {recipe.width}], got shape {tuple(x.shape)}")
    rotated, values = _FakeQuant.apply(x, recipe, signs, grid, keep_rotated, prefer)  # type: ignore[no-untyped-call]
    return (rotated if keep_rotated else None), values


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool, prefer: Path | None
    ):
        path = choose_path(x, prefer=prefer)
        if path not in ("cpu", "triton") or x.dtype not in FLOATS:
            path, run = "torch", fake_quant_reference
        elif path == "cpu":
            from robuq.kernels.cpu_transform import fake_quant_cpu as run
        else:
            from robuq.kernels.triton_rotate import fake_quant_triton as run
        rotated, values, mask = run(x, recipe, signs, grid, keep)
        ctx.save_for_backward(mask)
        ctx.signs, ctx.settings = signs, (path, recipe, keep, x.dtype)
        ctx.set_materialize_grads(False)
        return values.new_empty(0) if rotated is None else rotated, values

    @staticmethod
    def backward(ctx: Any, grad_rotated: Tensor | None, grad_values: Tensor | None):  # type: ignore[no-untyped-def, override]
        path, recipe, keep, dtype = ctx.settings
        (mask,) = ctx.saved_tensors
        grad_rotated = grad_rotated if keep else None
        if grad_values is None:
            if grad_rotated is None:
                return None, None, None, None, None, None
            grad_values = torch.zeros_like(grad_rotated)
        run: Any = fake_quant_gradient_reference
        if path == "cpu":
            from robuq.kernels import cpu_transform

            run = cpu_transform.fake_quant_gradient_cpu
        elif path == "triton":
            from robuq.kernels import triton_rotate

            run = triton_rotate.fake_quant_gradient_triton
        grad = run(grad_rotated, grad_values, mask, recipe, ctx.signs)
        return grad.to(dtype), None, None, None, None, None


def fake_quant_reference(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Plain torch: rotated tokens, values, and the mask as bool [m, n']."""
    y = rotate_reference(x if x.dtype == torch.float64 else x.float(), recipe, signs)
    d = token_step(y, grid)
    values = (encode(y, d, grid).to(d.dtype) + grid.offset) * (d * grid.gain)[:, None]
    return (y if keep else None), values, within(y, d, grid)


def fake_quant_gradient_reference(
    grad_rotated: Tensor | None, grad_values: Tensor, mask: Tensor, recipe: Rotation, signs: Tensor | None
) -> Tensor:
    """Plain torch."""
    grad = torch.where(mask, grad_values, 0.0)
    if grad_rotated is not None:
        grad = grad + grad_rotated
    return rotate_reference(grad, recipe, signs, inverse=True)
