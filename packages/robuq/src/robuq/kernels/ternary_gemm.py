"""Integer tokens times packed ternary weights: ``Y_tj = d_t alpha_j (sum_i k_ti T_ji + z_t r_j) + c_j + (h B^T)_tj``.

``r_j = sum_i T_ji``; ``z_t`` is the offset of the codes (1/2 for the mid-rise quantiser); ``h`` are the low-rank
branch's inner activations. The sums are exact in int32. Floor of the traffic for one token: n out / 4 bytes of weights.

CPU: two-bit weights go through byte products in registers, never unpacked to memory (`robuq.kernels.cpu_gemm`), where
the processor has AVX2. With VNNI, and many tokens, blocks of rows are unpacked through a table and multiplied by
torch's int8 product; without either, so are they in float32, where sums below 2^24 are exact too.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from icml26_shared.kernels import Path, choose_path
from robuq.kernels.packed import unpack_ternary

_CACHE_BYTES = 512 * 1024  # a block of unpacked rows stays in a core's second cache
_VNNI_TOKENS = 64


def ternary_gemm(
    codes: Int8[Tensor, "m p"],
    d: Float[Tensor, " m"],
    packed: UInt8[Tensor, "out bytes"],
    alpha: Float[Tensor, " out"],
    rowsum: Tensor,
    *,
    offset: float | Tensor = 0.5,
    bias: Tensor | None = None,
    inner: Tensor | None = None,
    outer: Tensor | None = None,
    unpacked: Tensor | None = None,
    prefer: Path | None = None,
) -> Float[Tensor, "m out"]:
    """Multiply.

    Args:
        codes: int8 [m, n'], any m >= 0.
        d: steps, float32 [m].
        packed: weights, uint8 [out, ceil(n'/4)], see `robuq.kernels.packed`.
        alpha: scales of the rows, float32 [out].
        rowsum: ``sum_i T_ji``, int32 [out].
        offset: z, a number or float32 [m].
        bias: [out] or None.
        inner, outer: ``h`` [m, r] and ``B`` [out, r] of the low-rank branch, or None.
        unpacked: the same weights as int8 [out, n'], where the caller keeps them (``cache="int8"``).
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        float32 [m, out].

    Raises:
        ValueError: shapes that do not fit.
    """
    out, n = packed.shape[0], codes.shape[1]
    if packed.shape[1] != (n + 3) // 4 or len(alpha) != out or len(rowsum) != out or len(d) != len(codes):
        raise ValueError(
            f"shapes do not fit: codes {tuple(codes.shape)}, steps {tuple(d.shape)}, packed {tuple(packed.shape)}, "
            f"alpha {tuple(alpha.shape)}, rowsum {tuple(rowsum.shape)}"
        )
    path = choose_path(codes, prefer=prefer)
    if path == "triton":
        from robuq.kernels.triton_gemm import ternary_gemm_triton

        return ternary_gemm_triton(codes, d, packed, alpha, rowsum, offset, bias, inner, outer)
    if path == "cpu":
        y = _cpu(codes, d, packed, alpha, rowsum, offset, bias, unpacked)
    else:
        y = ternary_gemm_reference(codes, d, packed, alpha, rowsum, offset)
        y = y if bias is None else y.add_(bias.to(y.dtype))
    if inner is not None and outer is not None:
        y = y.addmm_(inner.to(y.dtype), outer.to(y.dtype).T)
    return y


def ternary_gemm_reference(
    codes: Tensor, d: Tensor, packed: Tensor, alpha: Tensor, rowsum: Tensor, offset: float | Tensor
) -> Tensor:
    """Plain torch, the integer sums taken in float64."""
    weights = unpack_ternary(packed, codes.shape[1])
    sums = codes.double() @ weights.double().T
    return _epilogue(sums, d, alpha, rowsum, offset)


def _epilogue(sums: Tensor, d: Tensor, alpha: Tensor, rowsum: Tensor, offset: float | Tensor) -> Tensor:
    z = offset[:, None] if isinstance(offset, Tensor) else offset
    return (d[:, None] * alpha * (sums + z * rowsum)).float()


def _cpu(
    codes: Tensor,
    d: Tensor,
    packed: Tensor,
    alpha: Tensor,
    rowsum: Tensor,
    offset: float | Tensor,
    bias: Tensor | None,
    unpacked: Tensor | None,
) -> Tensor:
    integer = _has_vnni() and (unpacked is not None or len(codes) >= _VNNI_TOKENS)
    if not integer and vector_products():
        from robuq.kernels import cpu_gemm

        return cpu_gemm.ternary_gemm_cpu(codes, d, packed, alpha, rowsum, offset, bias)
    y = _by_rows(codes, d, packed, alpha, rowsum, offset, unpacked, integer=integer)
    return y if bias is None else y.add_(bias.to(y.dtype))


def _by_rows(
    codes: Tensor,
    d: Tensor,
    packed: Tensor,
    alpha: Tensor,
    rowsum: Tensor,
    offset: float | Tensor,
    unpacked: Tensor | None,
    *,
    integer: bool,
) -> Tensor:
    """Row blocks of the weight, unpacked through a table, times all tokens."""
    m, n = codes.shape
    out = packed.shape[0]
    y = torch.empty(m, out)
    rows = max(16, _CACHE_BYTES // max(1, n * (1 if integer else 4)) // 8 * 8)
    tokens = codes if integer else codes.float()
    for start in range(0, out, rows):
        part = slice(start, start + rows)
        weights = unpack_ternary(packed[part], n) if unpacked is None else unpacked[part]
        sums = torch._int_mm(tokens, weights.T) if integer else tokens @ weights.float().T
        y[:, part] = _epilogue(sums.float(), d, alpha[part], rowsum[part], offset)
    return y


@functools.lru_cache(maxsize=1)
def vector_products() -> bool:
    """Whether the CPU's kernels on two-bit weights run on this processor (AVX2)."""
    from robuq.kernels import cpu_gemm

    return cpu_gemm.available()


@functools.lru_cache(maxsize=1)
def _has_vnni() -> bool:
    """Whether torch's int8 product is quick here: AVX512-VNNI or AMX. On AVX2 alone it takes 25 times float32's
    time.
    """
    probe = getattr(torch.cpu, "_is_vnni_supported", None) or getattr(torch.cpu, "_is_avx512_vnni_supported", None)
    return bool(probe and probe())
