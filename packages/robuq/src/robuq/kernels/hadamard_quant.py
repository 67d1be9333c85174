"""Rotate tokens and quantise them in one pass: ``codes, d = Qa(x D H)``.

Floor of the traffic for M tokens in bfloat16: read 2 n bytes a token, write n bytes of codes (n b / 8 when packed) and
4 bytes of scale; the rotated token is written only where the low-rank branch needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from icml26_shared.kernels import Path, choose_path
from robuq.kernels.grid import Grid, encode, token_step
from robuq.kernels.rotate import rotate_reference

if TYPE_CHECKING:
    from robuq.hadamard import Rotation

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def hadamard_quant(
    x: Float[Tensor, "m n"],
    recipe: Rotation,
    signs: Tensor | None,
    grid: Grid,
    *,
    keep_rotated: bool = False,
    prefer: Path | None = None,
) -> tuple[Int8[Tensor, "m p"], Float[Tensor, " m"], Tensor | None]:
    """Codes and steps of rotated tokens.

    Args:
        x: tokens [m, n], float32, float16, bfloat16 or float64; statistics are float32 or better.
        recipe: rotation of width n.
        signs: +-1 [n], or None.
        grid: the quantiser.
        keep_rotated: also return ``x D H``.
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        Codes int8 [m, n'], steps d float32 [m] (NaN for a token with a value that is not finite), and the rotated
        tokens float32 [m, n'] or None. Not differentiable.

    Raises:
        ValueError: tokens of another width.
    """
    if x.dim() != 2 or x.shape[1] != recipe.width:
        raise ValueError(f"hadamard_quant takes tokens [m, {recipe.width}], got shape {tuple(x.shape)}")
    path = choose_path(x, prefer=prefer)
    if path == "cpu" and x.dtype in FLOATS:
        from robuq.kernels.cpu_transform import hadamard_quant_cpu

        return hadamard_quant_cpu(x, recipe, signs, grid, keep_rotated)
    if path == "triton" and x.dtype in FLOATS:
        from robuq.kernels.triton_rotate import hadamard_quant_triton

        return hadamard_quant_triton(x, recipe, signs, grid, keep_rotated)
    return hadamard_quant_reference(x, recipe, signs, grid, keep_rotated)


def hadamard_quant_reference(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep_rotated: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Plain torch."""
    y = rotate_reference(x if x.dtype == torch.float64 else x.float(), recipe, signs)
    d = token_step(y, grid)
    return encode(y, d, grid), d, y if keep_rotated else None
