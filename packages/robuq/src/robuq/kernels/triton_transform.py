# mypy: disable-error-code="name-defined"
"""The rotation in Triton: rotate, rotate and quantise, and what training needs of both.

One program holds a few tokens whole. A token of ``m_1 ... m_k 2^p`` values lies in a tile ``[P_1, .., P_k, 2^p]``
whose axes are the orders rounded up to powers of two, at least 16; a Paley axis is multiplied by its matrix, padded
with zeros, with ``tl.dot`` in full float32, the last axis is done by butterflies. Beyond 8192 values in a tile two
programs share the work: the last factors first, on rows of a contiguous part, then the first factor across them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from icml26_shared.kernels import jit, triton_language

if TYPE_CHECKING:
    from robuq.hadamard import Rotation

tl = triton_language()

LARGEST_TILE = 8192
_MATRIX = 16  # smallest side of a product


@jit
def _paley(x, matrix_ptr, ROWS: tl.constexpr, LEFT: tl.constexpr, P: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply the axis P of x, seen as [ROWS LEFT, P, RIGHT], by a matrix [P, P]."""
    i, j = tl.arange(0, P), tl.arange(0, P)
    matrix = tl.load(matrix_ptr + i[:, None] * P + j[None, :])
    x = tl.trans(tl.reshape(x, (ROWS * LEFT, P, RIGHT)), (0, 2, 1))
    y = tl.dot(tl.reshape(x, (ROWS * LEFT * RIGHT, P)), matrix, input_precision="ieee")
    y = tl.trans(tl.reshape(y, (ROWS * LEFT, RIGHT, P)), (0, 2, 1))
    return tl.reshape(y, (ROWS, LEFT * P * RIGHT))


@jit
def _butterfly(x, TOTAL: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One stage: pairs at distance H become their sum and difference."""
    x = tl.trans(tl.reshape(x, (TOTAL // (2 * H), 2, H)), (0, 2, 1))
    a, b = tl.split(x)
    x = tl.trans(tl.join(a + b, a - b), (0, 2, 1))
    return tl.reshape(x, (ROWS, TILE))


@jit
def _transform(  # type: ignore[no-untyped-def]
    x, m1_ptr, m2_ptr, ROWS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, POWER: tl.constexpr
):
    """All factors of the tile x [ROWS, P1 P2 2^POWER]; P = 1 stands for no factor."""
    TILE: tl.constexpr = P1 * P2 * (2**POWER)
    if P1 > 1:
        x = _paley(x, m1_ptr, ROWS, 1, P1, P2 * (2**POWER))
    if P2 > 1:
        x = _paley(x, m2_ptr, ROWS, P1, P2, 2**POWER)
    for stage in tl.static_range(POWER):
        x = _butterfly(x, ROWS * TILE, 2**stage, ROWS, TILE)
    return x


@jit
def _places(P1: tl.constexpr, P2: tl.constexpr, POWER: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position in the token of each place of the tile, and whether it is one (not padding of an axis)."""
    LAST: tl.constexpr = 2**POWER
    place = tl.arange(0, P1 * P2 * LAST)
    third, second, first = place % LAST, (place // LAST) % P2, place // (LAST * P2)
    return (first * M2 + second) * LAST + third, (first < M1) & (second < M2)


@jit
def _rounded(x, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Floor, or the nearest whole number with halves to even."""
    if ROUNDS:
        low = tl.floor(x)
        part = x - low
        odd = low - 2.0 * tl.floor(low * 0.5)
        return tl.where((part > 0.5) | ((part == 0.5) & (odd == 1.0)), low + 1.0, low)
    return tl.floor(x)


@jit
def transform_kernel(  # type: ignore[no-untyped-def]
    x_ptr, g_ptr, bits_ptr, signs_ptr, m1_ptr, m2_ptr, given_ptr, y_ptr, codes_ptr, values_ptr, d_ptr, mask_ptr,
    rows, inner, width_in, width_out, stride_xt, stride_xi, stride_x, stride_yt, stride_yi, stride_y, sign_stride,
    scale, statistic_count, step, low, high, offset, reach, gain,
    ROWS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, POWER: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr,
    SIGNS_IN: tl.constexpr, SIGNS_OUT: tl.constexpr, MASKED_IN: tl.constexpr, ADD: tl.constexpr, QUANTISE: tl.constexpr,
    LARGEST: tl.constexpr, ROUNDS: tl.constexpr, GIVEN: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr,
    KEEP: tl.constexpr, MASK_OUT: tl.constexpr,
):  # fmt: skip
    """Row r of the launch is token ``r // inner``, part ``r % inner`` of it.

    Element i lies at ``token stride_xt + part stride_xi + i stride_x``; outputs alike with the y strides. Signs are
    read at ``part * sign_stride + i`` on the way in or out.
    """
    TILE: tl.constexpr = P1 * P2 * (2**POWER)
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, part = r // inner, r % inner
    index, real = _places(P1, P2, POWER, M1, M2)
    inside = (r < rows)[:, None] & (real & (index < width_in))[None, :]
    source = (token * stride_xt + part * stride_xi)[:, None] + index[None, :] * stride_x
    x = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if MASKED_IN:
        word = tl.arange(0, TILE // 8)
        packed = tl.load(bits_ptr + r[:, None] * (TILE // 8) + word[None, :], mask=(r < rows)[:, None], other=0)
        flags = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        x = tl.where(tl.reshape(flags, (ROWS, TILE)) != 0, x, 0.0)
    if ADD:
        x += tl.load(g_ptr + source, mask=inside, other=0.0).to(tl.float32)
    if SIGNS_IN:
        at = (part * sign_stride)[:, None] + index[None, :]
        x *= tl.load(signs_ptr + at, mask=inside, other=1.0)
    y = _transform(x * scale, m1_ptr, m2_ptr, ROWS, P1, P2, POWER)
    there = (r < rows)[:, None] & (real & (index < width_out))[None, :]
    target = (token * stride_yt + part * stride_yi)[:, None] + index[None, :] * stride_y
    if SIGNS_OUT:
        at = (part * sign_stride)[:, None] + index[None, :]
        y *= tl.load(signs_ptr + at, mask=there, other=1.0)
    if KEEP:
        tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=there)
    if QUANTISE:
        if GIVEN:
            d = tl.load(given_ptr + token, mask=r < rows, other=0.0)
        else:
            size = tl.abs(y)
            bad = tl.sum(((size == float("inf")) | (y != y)).to(tl.int32), axis=1) > 0
            top = tl.max(tl.where(y == y, size, 0.0), axis=1)
            if LARGEST:
                found = top
            else:
                # Squares are taken of y / max|y|: neither huge nor tiny values leave the range of float32.
                safe = tl.where(top > 0, top, 1.0)
                unit = y / safe[:, None]
                found = top * tl.sqrt(tl.sum(unit * unit, axis=1) / statistic_count)
            d = tl.where(bad, float("nan"), found * step)
            tl.store(d_ptr + r, d, mask=r < rows)
        valid = d > 0
        ratio = y / tl.where(valid, d, 1.0)[:, None]
        k = tl.minimum(tl.maximum(_rounded(ratio, ROUNDS), low), high)
        k = tl.where(valid[:, None], k, 0.0)
        if CODES:
            tl.store(codes_ptr + target, k.to(tl.int8), mask=there)
        if VALUES:
            tl.store(values_ptr + target, (k + offset) * (d * gain)[:, None], mask=there)
        if MASK_OUT:
            flags = (tl.abs(y) <= (d * reach)[:, None]).to(tl.int32)
            eight = tl.reshape(flags, (ROWS, TILE // 8, 8)) << tl.arange(0, 8)[None, None, :]
            word = tl.arange(0, TILE // 8)
            place = r[:, None] * (TILE // 8) + word[None, :]
            tl.store(mask_ptr + place, tl.sum(eight, axis=2).to(tl.uint8), mask=(r < rows)[:, None])


class Part(NamedTuple):
    """Consecutive factors of a rotation that one launch does: orders of at most two Paley factors, and the power."""

    orders: tuple[int, ...]
    power: int

    @property
    def length(self) -> int:
        """Values along this part."""
        return math.prod(self.orders) << self.power

    @property
    def padded_orders(self) -> tuple[int, int]:
        """Orders rounded up for the tile, the missing ones as 1."""
        rounded = [max(_MATRIX, 1 << (order - 1).bit_length()) for order in self.orders]
        return tuple([1, 1, *rounded][-2:])  # type: ignore[return-value]

    @property
    def tile(self) -> int:
        """Values in the tile."""
        return math.prod(self.padded_orders) << self.power

    def constants(self) -> dict[str, int]:
        """The tile's constants for the kernel."""
        p1, p2 = self.padded_orders
        m1, m2 = ([1, 1, *self.orders])[-2:]
        return {"P1": p1, "P2": p2, "POWER": self.power, "M1": m1, "M2": m2}


def parts(recipe: Rotation) -> tuple[Part, ...] | None:
    """One part, or two from the last factors to the first; None where no two fit a tile."""
    orders, power = recipe.orders, recipe.power
    whole = Part(orders, power)
    if len(orders) <= 2 and whole.tile <= LARGEST_TILE:
        return (whole,)
    options = [(Part(orders[i:], power), Part(orders[:i], 0)) for i in range(1, len(orders) + 1)]
    options += [(Part((), p), Part(orders, power - p)) for p in range(1, power)]
    fits = [
        (last, first)
        for last, first in options
        if all(len(part.orders) <= 2 and part.tile <= LARGEST_TILE for part in (last, first))
    ]
    return min(fits, key=lambda pair: max(pair[0].tile, pair[1].tile)) if fits else None


@functools.lru_cache(maxsize=256)
def matrices(recipe: Rotation, part: Part, transposed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The padded matrices of a part's Paley factors."""
    by_order = {m.shape[0]: m for m in recipe.matrices()}
    found = [torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device)]
    for order in part.orders:
        size = max(_MATRIX, 1 << (order - 1).bit_length())
        padded = torch.zeros(size, size)
        matrix = torch.from_numpy(by_order[order].copy())
        padded[:order, :order] = matrix.T if transposed else matrix
        found.append(padded.to(device))
    return found[-2], found[-1]


def rows_of(tile: int) -> int:
    """Tokens of one program: enough for the smallest product, few enough for the registers."""
    return max(1, min(16, 2048 // tile))


FLAGS: dict[str, Any] = dict.fromkeys(
    (
        "SIGNS_IN",
        "SIGNS_OUT",
        "MASKED_IN",
        "ADD",
        "QUANTISE",
        "LARGEST",
        "ROUNDS",
        "GIVEN",
        "CODES",
        "VALUES",
        "KEEP",
        "MASK_OUT",
    ),
    False,
)
NUMBERS: dict[str, Any] = {
    "inner": 1,
    "stride_xi": 0,
    "stride_yi": 0,
    "sign_stride": 0,
    "scale": 1.0,
    "statistic_count": 1.0,
    "step": 0.0,
    "low": 0.0,
    "high": 0.0,
    "offset": 0.0,
    "reach": 0.0,
    "gain": 1.0,
}
