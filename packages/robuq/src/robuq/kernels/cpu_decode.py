"""A packed layer on one or a few tokens, as in decoding, in one call of numba: rotate, quantise, multiply, add.

With one token the arithmetic takes some ten microseconds, less than as many calls of torch; so all of it happens behind
one call. The transform works along the token instead of over eight tokens, and the low-rank branch reads its bfloat16
numbers as bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from robuq.kernels.cpu_gemm import NO_BRANCH, product
from robuq.kernels.cpu_transform import (
    OPTIONS,
    encode_token,
    grid_numbers,
    recipe_arrays,
    step_of_token,
    transform,
)
from robuq.kernels.grid import Grid
from robuq.kernels.threads import over_rows

if TYPE_CHECKING:
    from robuq.hadamard import Rotation

_WEIGHTS_A_THREAD = 1 << 21  # fewer are done before another thread has woken up
_NOTHING = np.zeros(0, np.float32)


class LayerArrays(NamedTuple):
    """A layer's tensors as arrays that share their memory; empty where there is none.

    Attributes:
        signs: float32 +-1 [n].
        packed, alpha, rowsum, bias: see `robuq.kernels.ternary_gemm`.
        down, up: A [r, n'] and B [out, r] of the low-rank branch, the bits of bfloat16.
    """

    signs: np.ndarray
    packed: np.ndarray
    alpha: np.ndarray
    rowsum: np.ndarray
    bias: np.ndarray
    down: np.ndarray
    up: np.ndarray


def layer_arrays(
    signs: Tensor | None, packed: Tensor, alpha: Tensor, rowsum: Tensor, bias: Tensor | None, branch: tuple[Tensor, ...]
) -> LayerArrays:
    """Collect them; ``branch`` is ``(A, B)`` in bfloat16, or empty."""
    down, up = (x.contiguous().view(torch.int16).numpy().view(np.uint16) for x in branch) if branch else NO_BRANCH[1:]
    return LayerArrays(
        signs=_NOTHING if signs is None else signs.numpy(),
        packed=packed.contiguous().numpy(),
        alpha=alpha.contiguous().numpy(),
        rowsum=rowsum.contiguous().numpy(),
        bias=_NOTHING if bias is None else bias.float().contiguous().numpy(),
        down=down,
        up=up,
    )


@njit(**OPTIONS)
def _prepare(x, signs, recipe, grid, gain, down, codes, d_out, inner):  # type: ignore[no-untyped-def]
    """Codes, steps times ``gain``, and ``x' A^T`` of a few tokens."""
    padded, scale = recipe[4], recipe[5]
    largest, step, rounds, low, high = grid
    a, b = np.empty(padded, np.float32), np.empty(padded, np.float32)
    bits = np.empty(padded, np.uint32)
    row = bits.view(np.float32)
    width = x.shape[1]
    for t in range(x.shape[0]):
        if signs.shape[0]:
            for i in range(width):
                a[i] = x[t, i] * (signs[i] * scale)
        else:
            for i in range(width):
                a[i] = x[t, i] * scale
        for i in range(width, padded):
            a[i] = 0.0
        y = b if transform(a, b, recipe, 1) else a
        d = step_of_token(y, largest, step)
        encode_token(y, d, rounds, low, high, codes[t])
        d_out[t] = d * gain
        for k in range(down.shape[0]):
            for i in range(padded):
                bits[i] = np.uint32(down[k, i]) << np.uint32(16)
            total = np.float32(0.0)
            for i in range(padded):
                total += row[i] * y[i]
            inner[t, k] = total


@njit(**OPTIONS)
def _layer(x, signs, recipe, grid, gain, z, packed, alpha, rowsum, bias, down, up, codes, d, inner, y):  # type: ignore[no-untyped-def]
    """All of a layer, in this thread."""
    _prepare(x, signs, recipe, grid, gain, down, codes, d, inner)
    product(codes, d, z, packed, alpha, rowsum, bias, inner, up, y, 0, x.shape[0], 0, packed.shape[0])


def packed_linear_cpu(x: Tensor, recipe: Rotation, grid: Grid, layer: LayerArrays) -> Tensor:
    """``d_t alpha_j (sum_i k_ti T_ji + z r_j) + (x' A^T) B^T + c`` for few tokens.

    Args:
        x: float32, float16 or bfloat16 [m, n].
        recipe: rotation of width n.
        grid: the quantiser.
        layer: see :func:`layer_arrays`.

    Returns:
        float32 [m, out].
    """
    m, out = x.shape[0], layer.packed.shape[0]
    tokens = x.detach().float().contiguous().numpy()
    codes, d = np.empty((m, recipe.padded), np.int8), np.empty(m, np.float32)
    z = np.full(m, grid.offset, np.float32)
    inner = np.empty((m, layer.down.shape[0]), np.float32) if layer.down.shape[0] else NO_BRANCH[0]
    y = np.empty((m, out), np.float32)
    first = (tokens, layer.signs, recipe_arrays(recipe, False), grid_numbers(grid), np.float32(grid.gain))
    weights = (layer.packed, layer.alpha, layer.rowsum, layer.bias)
    smallest = max(256, _WEIGHTS_A_THREAD // (recipe.padded * m))
    if torch.get_num_threads() == 1 or out < 2 * smallest:
        _layer(*first, z, *weights, layer.down, layer.up, codes, d, inner, y)
    else:
        _prepare(*first, layer.down, codes, d, inner)
        rest = functools.partial(product, codes, d, z, *weights, inner, layer.up, y, 0, m)
        over_rows(rest, out, 4, smallest)
    return torch.from_numpy(y)
