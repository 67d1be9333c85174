"""What launches the transform's kernel: rotate, rotate and quantise, fake quantisation and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icml26_shared.kernels import launching_on
from robuq.kernels.grid import Grid, encode, token_step, within
from robuq.kernels.rotate import rotate_reference
from robuq.kernels.triton_transform import FLAGS, NUMBERS, Part, matrices, parts, rows_of, transform_kernel

if TYPE_CHECKING:
    from robuq.hadamard import Rotation


def _launch(
    recipe: Rotation,
    part: Part,
    transposed: bool,
    tensors: dict[str, Any],
    numbers: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    x = tensors["x_ptr"]
    nothing = x.new_empty(1)
    m1, m2 = matrices(recipe, part, transposed, x.device)
    pointers = ("g_ptr", "bits_ptr", "signs_ptr", "given_ptr", "y_ptr", "codes_ptr", "values_ptr", "d_ptr", "mask_ptr")
    arguments = {name: tensors.get(name) if tensors.get(name) is not None else nothing for name in pointers}
    count = rows_of(part.tile)
    constants = {**FLAGS, **flags, **part.constants(), "ROWS": count}
    with launching_on(x):
        transform_kernel[(-(-numbers["rows"] // count),)](
            x_ptr=x, m1_ptr=m1, m2_ptr=m2, **arguments, **{**NUMBERS, **numbers}, **constants, num_warps=4
        )


def _grid_numbers(grid: Grid, padded: int) -> dict[str, float]:
    return {
        "statistic_count": float(padded),
        "step": grid.step,
        "low": float(grid.low),
        "high": float(grid.high),
        "offset": grid.offset,
        "reach": min(grid.reach, 3e38),
        "gain": grid.gain,
    }


def _run(
    x: Tensor,
    recipe: Rotation,
    signs: Tensor | None,
    *,
    inverse: bool,
    tensors: dict[str, Any],
    flags: dict[str, Any],
    numbers: dict[str, float],
    width_out: int,
) -> bool:
    """Launch on tokens x [m, n]; False where the recipe fits no tile. ``blocks`` of a rotation are parts of a token."""
    plan = parts(recipe)
    if plan is None or (recipe.blocks > 1 and (len(plan) > 1 or flags.get("QUANTISE"))):
        return False
    m = x.shape[0]
    if m == 0:
        return True
    signed = signs is not None
    shared = {"SIGNS_IN": signed and not inverse, "SIGNS_OUT": signed and inverse}
    length = recipe.padded // recipe.blocks
    if len(plan) == 1:
        base = {
            "rows": m * recipe.blocks,
            "inner": recipe.blocks,
            "width_in": min(x.shape[1], length),
            "width_out": min(width_out, length),
            "stride_xt": x.stride(0),
            "stride_xi": length * x.stride(1),
            "stride_x": x.stride(1),
            "stride_yt": width_out,
            "stride_yi": length,
            "stride_y": 1,
            "sign_stride": length,
            "scale": recipe.scale,
        }
        given = {**tensors, "x_ptr": x, "signs_ptr": signs}
        _launch(recipe, plan[0], inverse, given, {**base, **numbers}, {**flags, **shared})
        return True
    return False


def _two_passes(x: Tensor, recipe: Rotation, signs: Tensor | None, inverse: bool) -> Tensor | None:
    """float32 [m, n'] in two launches, the last factors first; signs are multiplied outside."""
    plan = parts(recipe)
    if plan is None or len(plan) != 2 or recipe.blocks > 1:
        return None
    last, first = plan
    m, padded = x.shape[0], recipe.padded
    y = x.float() if signs is None or inverse else x.float() * signs
    if y.shape[1] < padded:
        y = torch.nn.functional.pad(y, (0, padded - y.shape[1]))
    y = y.contiguous()
    middle, out = torch.empty_like(y), torch.empty_like(y)
    if m == 0:
        return out
    count = padded // last.length
    _launch(
        recipe,
        last,
        inverse,
        {"x_ptr": y, "y_ptr": middle},
        {
            "rows": m * count,
            "width_in": last.length,
            "width_out": last.length,
            "stride_xt": last.length,
            "stride_x": 1,
            "stride_yt": last.length,
            "stride_y": 1,
            "scale": recipe.scale,
        },
        {"KEEP": True},
    )
    _launch(
        recipe,
        first,
        inverse,
        {"x_ptr": middle, "y_ptr": out},
        {
            "rows": m * last.length,
            "inner": last.length,
            "width_in": count,
            "width_out": count,
            "stride_xt": padded,
            "stride_xi": 1,
            "stride_x": last.length,
            "stride_yt": padded,
            "stride_yi": 1,
            "stride_y": last.length,
        },
        {"KEEP": True},
    )
    if inverse:
        out = out[:, : recipe.width]
        out = out if signs is None else out * signs
    return out


def rotate_triton(x: Tensor, recipe: Rotation, signs: Tensor | None, inverse: bool) -> Tensor:
    """Rotated rows of x's dtype."""
    width = recipe.width if inverse else recipe.padded
    y = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if _run(x, recipe, signs, inverse=inverse, tensors={"y_ptr": y}, flags={"KEEP": True}, numbers={}, width_out=width):
        return y
    found = _two_passes(x, recipe, signs, inverse)
    return rotate_reference(x, recipe, signs, inverse) if found is None else found.to(x.dtype)


def hadamard_quant_triton(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8 [m, n'], steps float32 [m], rotated tokens float32 [m, n'] if ``keep``."""
    m, padded = x.shape[0], recipe.padded
    codes = torch.empty(m, padded, dtype=torch.int8, device=x.device)
    d = torch.empty(m, device=x.device)
    rotated = torch.empty(m if keep else 1, padded, device=x.device)
    tensors = {"codes_ptr": codes, "d_ptr": d, "y_ptr": rotated}
    flags = {"QUANTISE": True, "CODES": True, "KEEP": keep, "ROUNDS": grid.rounds, "LARGEST": grid.statistic == "max"}
    numbers = _grid_numbers(grid, padded)
    if _run(x, recipe, signs, inverse=False, tensors=tensors, flags=flags, numbers=numbers, width_out=padded):
        return codes, d, rotated if keep else None
    y, codes, d = _quantise_rotated(x, recipe, signs, grid)
    return codes, d, y if keep else None


def _quantise_rotated(x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """For rotations of more than one launch: rotate, then quantise in torch."""
    y = rotate_triton(x.float(), recipe, signs, False)
    d = token_step(y, grid)
    return y, encode(y, d, grid), d


def fake_quant_triton(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Rotated tokens (if ``keep``), values float32 [m, n'], and the mask: a bitmap in the tile's order, or bool
    [m, n'].
    """
    m, padded, plan = x.shape[0], recipe.padded, parts(recipe)
    values = torch.empty(m, padded, device=x.device)
    rotated = torch.empty(m if keep else 1, padded, device=x.device)
    tile = plan[0].tile if plan is not None and len(plan) == 1 else 0
    if tile >= 8:
        mask = torch.empty(m, tile // 8, dtype=torch.uint8, device=x.device)
        d = torch.empty(m, device=x.device)
        tensors = {"values_ptr": values, "y_ptr": rotated, "mask_ptr": mask, "d_ptr": d}
        flags = {
            "QUANTISE": True,
            "VALUES": True,
            "KEEP": keep,
            "MASK_OUT": True,
            "ROUNDS": grid.rounds,
            "LARGEST": grid.statistic == "max",
        }
        numbers = _grid_numbers(grid, padded)
        if _run(x, recipe, signs, inverse=False, tensors=tensors, flags=flags, numbers=numbers, width_out=padded):
            return (rotated if keep else None), values, mask
    y, codes, d = _quantise_rotated(x, recipe, signs, grid)
    values = (codes.float() + grid.offset) * (d * grid.gain)[:, None]
    return (y if keep else None), values, within(y, d, grid)


def fake_quant_gradient_triton(
    grad_rotated: Tensor | None, grad_values: Tensor, mask: Tensor, recipe: Rotation, signs: Tensor | None
) -> Tensor:
    """Gradient by the tokens, float32 [m, n]."""
    grad_values = grad_values.contiguous()
    if mask.dtype == torch.uint8:
        out = torch.empty(grad_values.shape[0], recipe.width, device=grad_values.device)
        tensors = {"bits_ptr": mask, "y_ptr": out}
        if grad_rotated is not None:
            tensors["g_ptr"] = grad_rotated.contiguous()
        flags = {"KEEP": True, "MASKED_IN": True, "ADD": grad_rotated is not None}
        _run(grad_values, recipe, signs, inverse=True, tensors=tensors, flags=flags, numbers={}, width_out=recipe.width)
        return out
    grad = torch.where(mask, grad_values, 0.0)
    return rotate_triton(grad if grad_rotated is None else grad + grad_rotated, recipe, signs, True)
