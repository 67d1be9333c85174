"""Ternary products on the CPU: two-bit weights against int8 codes in registers, in numba."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from robuq.kernels.cpu_vector import has_avx2, tile_1x4, tile_4x2
from robuq.kernels.threads import over_rows

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
_TOKENS = 16  # tokens whose codes stay in the first cache while the weights stream by
NO_BRANCH = (np.zeros((0, 0), np.float32), np.zeros((0, 0), np.uint16), np.zeros((0, 0), np.uint16))  # h, A, B
_ROWS = 64  # outputs whose sums wait for their scales, so that these are applied a vector at a time


def available() -> bool:
    """Whether these kernels run on this processor."""
    return has_avx2()


@njit(inline="always")
def _line_up(codes, lined):  # type: ignore[no-untyped-def]
    """``lined[128 v + 32 j + t] = codes[128 v + 4 t + j]``, zeros behind the end; returns the sum of the codes."""
    n, total = codes.shape[0], np.int32(0)
    for i in range(n):
        total += codes[i]
    whole = n // 128
    for v in range(whole):
        for t in range(32):
            for j in range(4):
                lined[128 * v + 32 * j + t] = codes[128 * v + 4 * t + j]
    if whole * 128 < n:
        lined[whole * 128 :] = 0
        for i in range(whole * 128, n):
            inside = i - whole * 128
            lined[whole * 128 + 32 * (inside & 3) + (inside >> 2)] = codes[i]
    return total


@njit(inline="always")
def _add_branch(inner, up, y):  # type: ignore[no-untyped-def]
    """``y += up inner`` for one token and some rows [., r] of B, bits of bfloat16."""
    rank = inner.shape[0]
    bits = np.empty(_ROWS * rank, np.uint32)
    row = bits.view(np.float32)
    for j in range(up.shape[0]):
        for k in range(rank):
            bits[j * rank + k] = np.uint32(up[j, k]) << np.uint32(16)
    for j in range(up.shape[0]):
        total = np.float32(0.0)
        for k in range(rank):
            total += row[j * rank + k] * inner[k]
        y[j] += total


@njit(**_OPTIONS)
def product(codes, d, z, packed, alpha, rowsum, bias, inner, up, y, start, stop, first_row, last_row):  # type: ignore[no-untyped-def]
    """Tokens ``start`` to ``stop`` against rows ``first_row`` to ``last_row``; empty ``bias`` and ``inner`` (see
    :data:`NO_BRANCH`) count as zeros.
    """
    n, length, out = codes.shape[1], packed.shape[1], packed.shape[0]
    vectors = (n + 127) // 128
    stride = vectors * 128
    lined = np.zeros((_TOKENS, stride), np.int8)
    code_sums, sums = np.zeros(_TOKENS, np.int32), np.empty((_TOKENS, _ROWS), np.int32)
    # A vector may reach beyond the end of its row, where codes are zero: fine but for the last rows, which are copied.
    tail = 4 * ((vectors * 32 - length) // max(length, 1) + 2)
    safe = max(0, out - tail) // 4 * 4
    guard = np.zeros((out - safe + 4) * length + 32 * (vectors + 1), np.uint8)
    guard[: (out - safe) * length] = packed[safe:].ravel()
    for base in range(start, stop, _TOKENS):
        count = min(_TOKENS, stop - base)
        for t in range(count):
            code_sums[t] = _line_up(codes[base + t], lined[t])
        tiled = count // 4 * 4
        if count - tiled == 3:
            tiled += 4  # one token of the last tile is left over from before, and its sums are not read
        for block in range(first_row, last_row, _ROWS):
            rows = min(_ROWS, last_row - block)
            for row in range(block, block + rows, 4):
                if row < safe:
                    weights = packed.ctypes.data + row * length
                else:
                    weights = guard.ctypes.data + (row - safe) * length
                target = sums.ctypes.data + 4 * (row - block)
                for t in range(0, tiled, 4):
                    here, there = lined.ctypes.data + t * stride, target + t * 4 * _ROWS
                    tile_4x2(here, stride, weights, length, vectors, there, 4 * _ROWS)
                    tile_4x2(here, stride, weights + 2 * length, length, vectors, there + 8, 4 * _ROWS)
                for t in range(tiled, count):
                    here, there = lined.ctypes.data + t * stride, target + t * 4 * _ROWS
                    tile_1x4(here, stride, weights, length, vectors, there, 4 * _ROWS)
            for t in range(count):
                token, step, whole, offset = base + t, d[base + t], code_sums[t], z[base + t]
                for j in range(rows):
                    r = block + j
                    y[token, r] = step * alpha[r] * (np.float32(sums[t, j] - whole) + offset * rowsum[r])
                if bias.shape[0]:
                    for j in range(rows):
                        y[token, block + j] += bias[block + j]
                if inner.shape[0]:
                    _add_branch(inner[token], up[block : block + rows], y[token, block : block + rows])


def ternary_gemm_cpu(
    codes: Tensor,
    d: Tensor,
    packed: Tensor,
    alpha: Tensor,
    rowsum: Tensor,
    offset: float | Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """float32 [m, out], see `robuq.kernels.ternary_gemm`."""
    m, out = codes.shape[0], packed.shape[0]
    y = torch.empty(m, out)
    z = offset.float() if isinstance(offset, Tensor) else torch.full((m,), float(offset))
    added = torch.empty(0) if bias is None else bias.detach().float()
    tensors = (codes, d.float(), z, packed, alpha.float(), rowsum.int(), added)
    arrays = tuple(t.contiguous().numpy() for t in tensors)
    run = functools.partial(product, *arrays, NO_BRANCH[0], NO_BRANCH[2], y.numpy())
    if m >= 2 * _TOKENS:
        over_rows(lambda start, stop: run(start, stop, 0, out), m, _TOKENS, _TOKENS)
    elif m:
        over_rows(functools.partial(run, 0, m), out, 4, 256)
    return y
