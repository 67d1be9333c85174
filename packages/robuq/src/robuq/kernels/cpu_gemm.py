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

_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True}
_BLOCK = 128  # weights of one vector of packed bytes
_TOKENS = 16  # tokens whose codes stay in the first cache while the weights stream by


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


@njit(**_OPTIONS)
def _product(codes, d, z, packed, alpha, rowsum, y, start, stop, first_row, last_row):  # type: ignore[no-untyped-def]
    """Tokens ``start`` to ``stop`` against rows ``first_row`` to ``last_row``."""
    n, length, out = codes.shape[1], packed.shape[1], packed.shape[0]
    vectors = (n + 127) // 128
    lined = np.zeros((_TOKENS, vectors * 128), np.int8)
    sums, found = np.zeros(_TOKENS, np.int32), np.empty(8, np.int32)
    # A vector may reach beyond the end of its row, where codes are zero: fine but for the last rows, which are copied.
    spare = vectors * 32 - length
    tail = 4 * ((spare // max(length, 1)) + 2)
    safe = max(0, out - tail) // 4 * 4
    end = np.zeros((out - safe + 4, length), np.uint8)
    end[: out - safe] = packed[safe:]
    guard = np.zeros(end.size + 32 * (vectors + 1), np.uint8)
    guard[: end.size] = end.ravel()
    stride = vectors * 128
    for base in range(start, stop, _TOKENS):
        count = min(_TOKENS, stop - base)
        for t in range(count):
            sums[t] = _line_up(codes[base + t], lined[t])
        quads = count // 4 * 4 if count >= 3 else 0
        if count - quads == 3:
            quads += 4  # one token of the tile is left over from before, and not read
        for row in range(first_row, last_row, 4):
            if row < safe:
                weights = packed.ctypes.data + row * length
            else:
                weights = guard.ctypes.data + (row - safe) * length
            for half in range(2):
                for t in range(0, quads, 4):
                    tile_4x2(
                        lined.ctypes.data + t * stride,
                        stride,
                        weights + 2 * half * length,
                        length,
                        vectors,
                        found.ctypes.data,
                    )
                    for i in range(min(4, count - t)):
                        token = base + t + i
                        for j in range(2):
                            r = row + 2 * half + j
                            if r < last_row:
                                whole = found[2 * i + j] - sums[t + i]
                                y[token, r] = d[token] * alpha[r] * (whole + z[token] * rowsum[r])
            for t in range(min(quads, count), count):
                tile_1x4(lined.ctypes.data + t * stride, stride, weights, length, vectors, found.ctypes.data)
                for j in range(min(4, last_row - row)):
                    whole, r = found[j] - sums[t], row + j
                    y[base + t, r] = d[base + t] * alpha[r] * (whole + z[base + t] * rowsum[r])


def ternary_gemm_cpu(
    codes: Tensor, d: Tensor, packed: Tensor, alpha: Tensor, rowsum: Tensor, offset: float | Tensor
) -> Tensor:
    """float32 [m, out], see `robuq.kernels.ternary_gemm`."""
    m, out = codes.shape[0], packed.shape[0]
    y = torch.empty(m, out)
    z = offset.float() if isinstance(offset, Tensor) else torch.full((m,), float(offset))
    tensors = (codes, d.float(), z, packed, alpha.float(), rowsum.int())
    arrays = tuple(t.detach().contiguous().numpy() for t in tensors)
    run = functools.partial(_product, *arrays, y.numpy())
    if m >= 2 * _TOKENS:
        over_rows(lambda start, stop: run(start, stop, 0, out), m, _TOKENS, _TOKENS)
    elif m:
        over_rows(lambda first, last: run(0, m, first, last), out, 4, 256)
    return y
