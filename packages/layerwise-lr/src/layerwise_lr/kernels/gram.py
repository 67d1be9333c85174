# mypy: disable-error-code="name-defined"
"""Gram matrix ``G = W W^T`` of the smaller side, of one matrix or a batch of equal shapes.

The Triton kernel computes tiles of the lower triangle only and stores each one twice, so it does m^2 n / 2 products
instead of m^2 n; inputs are bfloat16, float16 or float32, sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from icml26_shared.kernels import Path, choose_path, interpreting, jit, launching_on, triton_language

tl = triton_language()

BLOCK, BLOCK_K, WARPS, STAGES = 64, 32, 4, 3
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gram(w: Tensor, *, dtype: torch.dtype | None = None, tf32: bool = False, prefer: Path | None = None) -> Tensor:
    """``W W^T``.

    Args:
        w: [m, n] or [batch, m, n], floating point, any strides.
        dtype: of the sums and the result: float32 (default) or float64 (default for float64 input).
        tf32: let tensor cores round float32 factors to 10 bits; off, since small eigenvalues drown in it.
        prefer: path, see `icml26_shared.kernels.choose_path`. float64 always takes the torch path.

    Returns:
        [m, m] or [batch, m, m], symmetric up to rounding.

    Raises:
        ValueError: not 2 or 3 dimensions, not floating point, or a dtype that sums cannot have.
    """
    if w.dim() not in (2, 3) or not w.is_floating_point():
        raise ValueError(
            f"gram takes a floating point matrix [m, n] or [batch, m, n], got {w.dtype} of shape {tuple(w.shape)}"
        )
    wide = dtype or (torch.float64 if w.dtype == torch.float64 else torch.float32)
    if wide not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of a Gram matrix is float32 or float64, got {wide}")
    path = choose_path(w, prefer=prefer)
    if path == "triton" and wide == torch.float32 and w.dtype in _KERNEL_DTYPES:
        return _gram_triton(w, tf32)
    return gram_reference(w, wide)


def gram_reference(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Plain torch; on a CPU also the fast path, as its matrix product is the library's."""
    wide = w.to(dtype)
    return wide @ wide.mT


def _gram_triton(w: Tensor, tf32: bool) -> Tensor:
    batch = w if w.dim() == 3 else w[None]
    count, m, n = batch.shape
    out = torch.zeros(count, m, m, dtype=torch.float32, device=w.device)
    if out.numel() and n:
        tiles = (m + BLOCK - 1) // BLOCK
        with launching_on(w):
            gram_kernel[(tiles * (tiles + 1) // 2, count)](
                batch, out, m, n, *batch.stride(), BLOCK=BLOCK, BLOCK_K=BLOCK_K,
                PRECISION="tf32" if tf32 else "ieee",
                # Triton's interpreter multiplies the bit patterns of bfloat16
                WIDEN=interpreting(), num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
    return out if w.dim() == 3 else out[0]


@jit
def gram_kernel(
    w_ptr, out_ptr, m, n, stride_b, stride_m, stride_n,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Tile (i, j), j <= i, of a lower triangle numbered row by row, written at (i, j) and (j, i)."""
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # the root of a large number may be off by one
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    rows = (i * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    cols = (j * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    base = w_ptr + batch * stride_b
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, n, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < n
        a = tl.load(
            base + rows[:, None] * stride_m + k[None, :] * stride_n,
            mask=(rows < m)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            base + cols[None, :] * stride_m + k[:, None] * stride_n,
            mask=(cols < m)[None, :] & inside[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    both = (rows < m)[:, None] & (cols < m)[None, :]
    out = out_ptr + batch * m * m
    tl.store(out + rows[:, None] * m + cols[None, :], acc, mask=both)
    if i != j:
        tl.store(out + cols[None, :] * m + rows[:, None], acc, mask=both)
