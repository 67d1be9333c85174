"""The CPU's kernels around the rotation, in numba: rotate, rotate and quantise, and what training needs.

Eight tokens are rotated at a time, turned into [n', 8] so that every addition is one vector operation over tokens
whatever the factor's order; a block of them stays in the processor's caches from load to store. Threads share tokens.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from robuq.kernels.cpu_vector import factor_axis, transpose_8x8
from robuq.kernels.grid import Grid
from robuq.kernels.threads import over_rows

if TYPE_CHECKING:
    from robuq.hadamard import Rotation

LANES = 8
OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
_EMPTY = np.zeros(0, dtype=np.float32)


class _Recipe(NamedTuple):
    """A rotation as arrays: Paley matrices one after the other, their orders, and the numbers."""

    matrices: np.ndarray
    orders: np.ndarray
    power: int
    blocks: int
    padded: int
    scale: np.float32


@functools.lru_cache(maxsize=512)
def recipe_arrays(rotation: Rotation, transposed: bool) -> _Recipe:
    parts = [m.T if transposed else m for m in rotation.matrices()]
    flat = np.concatenate([np.ascontiguousarray(m).ravel() for m in parts]) if parts else _EMPTY
    orders = np.array(rotation.orders, dtype=np.int64)
    return _Recipe(flat, orders, rotation.power, rotation.blocks, rotation.padded, np.float32(rotation.scale))


@njit(inline="always")
def _butterflies(buffer, total, power, lanes):  # type: ignore[no-untyped-def]
    """Sylvester's transform along the innermost ``2^power`` elements of ``lanes`` each, in place, two stages a pass."""
    stage = 0
    while stage < power:
        h = lanes << stage
        if stage + 1 < power:
            for base in range(0, total, 4 * h):
                for r in range(base, base + h):
                    a, b, c, d = buffer[r], buffer[r + h], buffer[r + 2 * h], buffer[r + 3 * h]
                    u, v, w, z = a + b, a - b, c + d, c - d
                    buffer[r], buffer[r + h], buffer[r + 2 * h], buffer[r + 3 * h] = u + w, v + z, u - w, v - z
            stage += 2
        else:
            for base in range(0, total, 2 * h):
                for r in range(base, base + h):
                    a, b = buffer[r], buffer[r + h]
                    buffer[r], buffer[r + h] = a + b, a - b
            stage += 1


@njit(**OPTIONS)
def _factor_narrow(source, target, base, matrices, start, order, right):  # type: ignore[no-untyped-def]
    """What ``factor_axis`` does, where ``right`` is no multiple of 8."""
    for j in range(order):
        for r in range(right):
            total = np.float32(0.0)
            for i in range(order):
                total += source[base + i * right + r] * matrices[start + i * order + j]
            target[base + j * right + r] = total


@njit(inline="always")
def transform(a, b, recipe, lanes):  # type: ignore[no-untyped-def]
    """Rotate what is in ``a`` [n', lanes]; the result is in ``a`` or in ``b``: 0 or 1 is returned."""
    matrices, orders, power, blocks, padded, _ = recipe
    left, right, start = blocks, (padded // blocks) * lanes, 0
    here, there, swapped = a, b, 0
    for f in range(orders.shape[0]):
        order = orders[f]
        size = right
        right //= order
        for block in range(left):
            if right % 8:
                _factor_narrow(here, there, block * size, matrices, start, order, right)
            else:
                source, target = here.ctypes.data + 4 * block * size, there.ctypes.data + 4 * block * size
                factor_axis(source, target, matrices.ctypes.data + 4 * start, order, right)
        left *= order
        start += order * order
        here, there = there, here
        swapped = 1 - swapped
    _butterflies(here, padded * lanes, power, lanes)
    return swapped


@njit(inline="always")
def _to_lanes(rows, a):  # type: ignore[no-untyped-def]
    """``a[i, lane] = rows[lane, i]``."""
    length = rows.shape[1]
    whole = length // 8 * 8
    for i in range(0, whole, 8):
        transpose_8x8(rows.ctypes.data + 4 * i, length * 4, a.ctypes.data + 4 * LANES * i, 4 * LANES)
    for i in range(whole, length):
        for lane in range(LANES):
            a[i * LANES + lane] = rows[lane, i]


@njit(inline="always")
def _from_lanes(a, rows):  # type: ignore[no-untyped-def]
    """``rows[lane, i] = a[i, lane]``."""
    length = rows.shape[1]
    whole = length // 8 * 8
    for i in range(0, whole, 8):
        transpose_8x8(a.ctypes.data + 4 * LANES * i, 4 * LANES, rows.ctypes.data + 4 * i, length * 4)
    for i in range(whole, length):
        for lane in range(LANES):
            rows[lane, i] = a[i * LANES + lane]


@njit(inline="always")
def _rotate_block(rows, a, b, recipe):  # type: ignore[no-untyped-def]
    """Rotate eight rows [8, n'] in place, without the scale."""
    _to_lanes(rows, a)
    if transform(a, b, recipe, LANES):
        _from_lanes(b, rows)
    else:
        _from_lanes(a, rows)


@njit(inline="always")
def _load(x, signs, first, count, factor, rows):  # type: ignore[no-untyped-def]
    """``rows[lane] = x[first + lane] signs factor``, then zeros: for the padding and for missing tokens."""
    width = x.shape[1]
    for lane in range(LANES):
        if lane < count:
            if signs.shape[0]:
                for i in range(width):
                    rows[lane, i] = x[first + lane, i] * (signs[i] * factor)
            else:
                for i in range(width):
                    rows[lane, i] = x[first + lane, i] * factor
            for i in range(width, rows.shape[1]):
                rows[lane, i] = 0.0
        else:
            for i in range(rows.shape[1]):
                rows[lane, i] = 0.0


@njit(**OPTIONS)
def _rotate_rows(x, signs, recipe, inverse, out, start, stop):  # type: ignore[no-untyped-def]
    padded, scale = recipe[4], recipe[5]
    a, b = np.empty(padded * LANES, np.float32), np.empty(padded * LANES, np.float32)
    rows = np.empty((LANES, padded), np.float32)
    width = out.shape[1]
    for first in range(start, stop, LANES):
        count = min(LANES, stop - first)
        _load(x, signs[:0] if inverse else signs, first, count, scale, rows)
        _rotate_block(rows, a, b, recipe)
        for lane in range(count):
            if inverse and signs.shape[0]:
                for i in range(width):
                    out[first + lane, i] = rows[lane, i] * signs[i]
            else:
                for i in range(width):
                    out[first + lane, i] = rows[lane, i]


@njit(inline="always")
def step_of_token(row, largest, step):  # type: ignore[no-untyped-def]
    """``d = step * statistic`` of a token; NaN where a value is not finite."""
    total = np.float64(0.0)
    if largest:
        for i in range(row.shape[0]):
            total = max(total, np.float64(abs(row[i])))
        for i in range(row.shape[0]):
            if not math.isfinite(row[i]):
                total = np.float64(np.nan)
    else:
        for i in range(row.shape[0]):
            value = np.float64(row[i])
            total += value * value
        total = math.sqrt(total / row.shape[0])
    return np.float32(total * step) if math.isfinite(total) else np.float32(np.nan)


@njit(inline="always")
def encode_token(row, d, rounds, low, high, codes):  # type: ignore[no-untyped-def]
    """Codes of a token; 0 where d is 0 or NaN."""
    if not d > 0:
        codes[:] = 0
    elif rounds:
        for i in range(row.shape[0]):
            codes[i] = np.int8(min(max(np.rint(row[i] / d), low), high))
    else:
        for i in range(row.shape[0]):
            codes[i] = np.int8(min(max(np.floor(row[i] / d), low), high))


@njit(**OPTIONS)
def _quantise_rows(x, signs, recipe, grid, codes, d_out, rotated, start, stop):  # type: ignore[no-untyped-def]
    """Codes int8, steps, and (unless ``rotated`` is empty) the rotated tokens."""
    padded, scale = recipe[4], recipe[5]
    largest, step, rounds, low, high = grid
    a, b = np.empty(padded * LANES, np.float32), np.empty(padded * LANES, np.float32)
    rows = np.empty((LANES, padded), np.float32)
    for first in range(start, stop, LANES):
        count = min(LANES, stop - first)
        _load(x, signs, first, count, scale, rows)
        _rotate_block(rows, a, b, recipe)
        for lane in range(count):
            d = step_of_token(rows[lane], largest, step)
            d_out[first + lane] = d
            encode_token(rows[lane], d, rounds, low, high, codes[first + lane])
            if rotated.shape[0]:
                rotated[first + lane] = rows[lane]


@njit(**OPTIONS)
def _fake_quant_rows(x, signs, recipe, grid, offset, reach, gain, rotated, values, bits, start, stop):  # type: ignore[no-untyped-def]
    """Rotated tokens, their quantised values, and the bitmap of where the gradient passes."""
    padded, scale = recipe[4], recipe[5]
    largest, step, rounds, low, high = grid
    a, b = np.empty(padded * LANES, np.float32), np.empty(padded * LANES, np.float32)
    rows, codes = np.empty((LANES, padded), np.float32), np.empty(padded, np.int8)
    for first in range(start, stop, LANES):
        count = min(LANES, stop - first)
        _load(x, signs, first, count, scale, rows)
        _rotate_block(rows, a, b, recipe)
        for lane in range(count):
            row, d = first + lane, step_of_token(rows[lane], largest, step)
            encode_token(rows[lane], d, rounds, low, high, codes)
            factor, limit = d * gain, d * reach if math.isfinite(reach) else np.float32(np.inf)
            for i in range(padded):
                values[row, i] = (codes[i] + offset) * factor
            if rotated.shape[0]:
                rotated[row] = rows[lane]
            for byte in range(bits.shape[1]):
                word = 0
                for k in range(min(8, padded - byte * 8)):
                    word |= (abs(rows[lane, byte * 8 + k]) <= limit) << k
                bits[row, byte] = word


@njit(**OPTIONS)
def _fake_quant_gradient_rows(grad_rotated, grad_values, bits, signs, recipe, out, start, stop):  # type: ignore[no-untyped-def]
    """``(grad_rotated + mask * grad_values) H^T D``; an empty ``grad_rotated`` counts as zeros."""
    padded, scale = recipe[4], recipe[5]
    a, b = np.empty(padded * LANES, np.float32), np.empty(padded * LANES, np.float32)
    rows = np.zeros((LANES, padded), np.float32)
    width = out.shape[1]
    for first in range(start, stop, LANES):
        count = min(LANES, stop - first)
        for lane in range(count):
            row = first + lane
            for i in range(padded):
                passes = np.float32((bits[row, i >> 3] >> (i & 7)) & 1)
                rows[lane, i] = (grad_values[row, i] if passes else np.float32(0.0)) * scale
            if grad_rotated.shape[0]:
                for i in range(padded):
                    rows[lane, i] += grad_rotated[row, i] * scale
        _rotate_block(rows, a, b, recipe)
        for lane in range(count):
            for i in range(width):
                sign = signs[i] if signs.shape[0] else np.float32(1.0)
                out[first + lane, i] = rows[lane, i] * sign


def _array(x: Tensor | None) -> np.ndarray:
    return _EMPTY if x is None else x.detach().to(torch.float32).contiguous().numpy()


def grid_numbers(grid: Grid) -> tuple[bool, float, bool, np.float32, np.float32]:
    return (grid.statistic == "max", grid.step, grid.rounds, np.float32(grid.low), np.float32(grid.high))


def rotate_cpu(x: Tensor, recipe: Rotation, signs: Tensor | None, inverse: bool) -> Tensor:
    """Rotated rows [m, n'] ([m, n] with ``inverse``) of x's dtype."""
    out = torch.empty(x.shape[0], recipe.width if inverse else recipe.padded)
    arguments = (_array(x), _array(signs), recipe_arrays(recipe, inverse), inverse, out.numpy())
    over_rows(functools.partial(_rotate_rows, *arguments), x.shape[0], LANES, 64)
    return out.to(x.dtype)


def hadamard_quant_cpu(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8 [m, n'], steps float32 [m], rotated tokens float32 [m, n'] if ``keep``."""
    m, padded = x.shape[0], recipe.padded
    codes, d = torch.empty(m, padded, dtype=torch.int8), torch.empty(m)
    rotated = torch.empty(m if keep else 0, padded)
    arguments = (_array(x), _array(signs), recipe_arrays(recipe, False), grid_numbers(grid))
    arrays = (codes.numpy(), d.numpy(), rotated.numpy())
    over_rows(functools.partial(_quantise_rows, *arguments, *arrays), m, LANES, 64)
    return codes, d, rotated if keep else None


def fake_quant_cpu(
    x: Tensor, recipe: Rotation, signs: Tensor | None, grid: Grid, keep: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Rotated tokens (if ``keep``), values float32 [m, n'], bitmap uint8 [m, ceil(n'/8)]."""
    m, padded = x.shape[0], recipe.padded
    values, bits = torch.empty(m, padded), torch.empty(m, (padded + 7) // 8, dtype=torch.uint8)
    rotated = torch.empty(m if keep else 0, padded)
    arguments = (_array(x), _array(signs), recipe_arrays(recipe, False), grid_numbers(grid))
    numbers = (np.float32(grid.offset), np.float32(grid.reach), np.float32(grid.gain))
    arrays = (rotated.numpy(), values.numpy(), bits.numpy())
    over_rows(functools.partial(_fake_quant_rows, *arguments, *numbers, *arrays), m, LANES, 64)
    return (rotated if keep else None), values, bits


def fake_quant_gradient_cpu(
    grad_rotated: Tensor | None, grad_values: Tensor, bits: Tensor, recipe: Rotation, signs: Tensor | None
) -> Tensor:
    """Gradient by the tokens, float32 [m, n]."""
    m = grad_values.shape[0]
    out = torch.empty(m, recipe.width)
    rotated = np.zeros((0, recipe.padded), np.float32) if grad_rotated is None else _array(grad_rotated)
    arguments = (rotated, _array(grad_values), bits.numpy(), _array(signs), recipe_arrays(recipe, True), out.numpy())
    over_rows(functools.partial(_fake_quant_gradient_rows, *arguments), m, LANES, 64)
    return out
