# mypy: disable-error-code="name-defined"
"""Integer tokens times packed ternary weights in Triton.

Weights are unpacked in registers: byte i of a row holds elements 4 i to 4 i + 3, so four products of int8 tiles, one
for each place in the byte, add into int32. Few tokens (M <= 16) split K over programs, which add their int32 sums; a
second kernel then scales. Otherwise scale, offset, bias and low-rank branch are the epilogue of the one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from icml26_shared.kernels import jit, launching_on, triton_language

tl = triton_language()

DECODE_TOKENS = 16
NUM_STAGES = 2


@jit
def _codes_at(codes_ptr, tokens, k, M, K, stride_m, stride_k, NIBBLES: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8 codes of tokens at elements k; two to a byte with NIBBLES."""
    inside = (tokens < M)[:, None] & (k < K)[None, :]
    if NIBBLES:
        byte = tl.load(codes_ptr + tokens[:, None] * stride_m + (k // 2)[None, :] * stride_k, mask=inside, other=0)
        nibble = (byte.to(tl.int32) >> ((k % 2) * 4)[None, :]) & 15
        codes = tl.where(inside, (nibble ^ 8) - 8, 0).to(tl.int8)
    else:
        codes = tl.load(codes_ptr + tokens[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0)
    return codes


@jit
def _scale_and_store(  # type: ignore[no-untyped-def]
    acc, tokens, cols, d_ptr, z_ptr, alpha_ptr, rowsum_ptr, bias_ptr, inner_ptr, outer_ptr, y_ptr,
    M, N, R, HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``d alpha (acc + z r)``, bias, low-rank branch (BLOCK_R = 0: none)."""
    d = tl.load(d_ptr + tokens, mask=tokens < M, other=0.0)
    z = tl.load(z_ptr + tokens, mask=tokens < M, other=0.0)
    alpha = tl.load(alpha_ptr + cols, mask=cols < N, other=0.0)
    rowsum = tl.load(rowsum_ptr + cols, mask=cols < N, other=0).to(tl.float32)
    y = d[:, None] * alpha[None, :] * (acc.to(tl.float32) + z[:, None] * rowsum[None, :])
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        h = tl.load(
            inner_ptr + tokens[:, None] * R + r[None, :], mask=(tokens < M)[:, None] & (r < R)[None, :], other=0.0
        )
        b = tl.load(outer_ptr + cols[None, :] * R + r[:, None], mask=(cols < N)[None, :] & (r < R)[:, None], other=0.0)
        y = tl.dot(h.to(tl.float32), b.to(tl.float32), y, input_precision="ieee")
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + tokens[:, None] * N + cols[None, :], y, mask=(tokens < M)[:, None] & (cols < N)[None, :])


@jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, packed_ptr, d_ptr, z_ptr, alpha_ptr, rowsum_ptr, bias_ptr, inner_ptr, outer_ptr, y_ptr, partial_ptr,
    M, N, K, R, stride_m, stride_k, stride_n, stride_b,
    NIBBLES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A tile of the output; BLOCK_B bytes, 4 BLOCK_B weights of each row, a step."""
    tokens = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    length = (K + 3) // 4
    for start in range(tl.program_id(2) * BLOCK_B, length, SPLIT * BLOCK_B):
        byte = start + tl.arange(0, BLOCK_B)
        inside = (byte < length)[:, None] & (cols < N)[None, :]
        packed = tl.load(packed_ptr + byte[:, None] * stride_b + cols[None, :] * stride_n, mask=inside, other=0x55)
        for place in tl.static_range(4):
            weights = (((packed >> (2 * place)) & 3).to(tl.int8)) - 1
            codes = _codes_at(codes_ptr, tokens, 4 * byte + place, M, K, stride_m, stride_k, NIBBLES)
            acc = tl.dot(codes, weights, acc, out_dtype=tl.int32)
    if SPLIT > 1:
        where = partial_ptr + tokens[:, None] * N + cols[None, :]
        tl.atomic_add(where, acc, mask=(tokens < M)[:, None] & (cols < N)[None, :])
    else:
        _scale_and_store(
            acc, tokens, cols, d_ptr, z_ptr, alpha_ptr, rowsum_ptr, bias_ptr, inner_ptr, outer_ptr, y_ptr,
            M, N, R, HAS_BIAS, BLOCK_R,
        )  # fmt: skip


@jit
def scale_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, d_ptr, z_ptr, alpha_ptr, rowsum_ptr, bias_ptr, inner_ptr, outer_ptr, y_ptr, M, N, R,
    HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The epilogue of split sums."""
    tokens = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = (tokens < M)[:, None] & (cols < N)[None, :]
    acc = tl.load(partial_ptr + tokens[:, None] * N + cols[None, :], mask=inside, other=0)
    _scale_and_store(
        acc, tokens, cols, d_ptr, z_ptr, alpha_ptr, rowsum_ptr, bias_ptr, inner_ptr, outer_ptr, y_ptr,
        M, N, R, HAS_BIAS, BLOCK_R,
    )  # fmt: skip


def tiles(m: int) -> dict[str, int]:
    """Tile sizes and the split of K for a number of tokens."""
    if m <= DECODE_TOKENS:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_B": 32, "SPLIT": 4}
    return {"BLOCK_M": 32 if m <= 32 else 64, "BLOCK_N": 64 if m <= 256 else 128, "BLOCK_B": 32, "SPLIT": 1}


def warps(m: int) -> int:
    """Warps of one program: with more than a tile's worth of tokens, eight keep the sums in registers."""
    return 4 if m <= DECODE_TOKENS else 8


def branch_block(rank: int) -> int:
    """Rank rounded up for a product; 0 beyond 32, where the branch is added outside."""
    return 0 if rank == 0 or rank > 32 else max(16, 1 << (rank - 1).bit_length())


def ternary_gemm_triton(
    codes: Tensor, d: Tensor, packed: Tensor, alpha: Tensor, rowsum: Tensor, offset: float | Tensor, bias: Tensor |
    None, inner: Tensor | None, outer: Tensor | None, *, nibbles: bool = False, width: int | None = None,
) -> Tensor:  # fmt: skip
    """float32 [m, out], see `robuq.kernels.ternary_gemm`.

    With ``nibbles`` the codes come two to a byte (see :func:`pack_codes`), ``width`` of them a token.
    """
    m, out, k = codes.shape[0], packed.shape[0], codes.shape[1] if width is None else width
    y = torch.empty(m, out, device=codes.device)
    if m == 0 or out == 0:
        return y
    z = offset.float() if isinstance(offset, Tensor) else torch.full((m,), float(offset), device=codes.device)
    rank = 0 if inner is None else inner.shape[1]
    block_r = branch_block(rank)
    nothing = y.new_empty(1)
    fused = block_r > 0 and inner is not None and outer is not None
    h = inner.float().contiguous() if fused and inner is not None else nothing
    b = outer.contiguous() if fused and outer is not None else nothing
    chosen = tiles(m)
    split, block_m, block_n = chosen["SPLIT"], chosen["BLOCK_M"], chosen["BLOCK_N"]
    partial = torch.zeros(m, out, dtype=torch.int32, device=codes.device) if split > 1 else nothing
    scales: tuple[Any, ...] = (d.float().contiguous(), z.contiguous(), alpha.float().contiguous(), rowsum.contiguous())
    rest = (nothing if bias is None else bias.contiguous(), h, b, y)
    flags = {"HAS_BIAS": bias is not None, "BLOCK_R": block_r}
    grid = (-(-m // block_m), -(-out // block_n))
    with launching_on(codes):
        gemm_kernel[(*grid, split)](
            codes, packed, *scales, *rest, partial, m, out, k, rank, codes.stride(0), codes.stride(1), packed.stride(0),
            packed.stride(1), NIBBLES=nibbles, **flags, **chosen, num_warps=warps(m), num_stages=NUM_STAGES,
        )  # fmt: skip
        if split > 1:
            scale_kernel[grid](
                partial, *scales, *rest, m, out, rank, **flags, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps(m)
            )
    if rank and not fused and inner is not None and outer is not None:
        y = y.addmm_(inner.float(), outer.float().T)
    return y


def pack_codes(codes: Tensor) -> Tensor:
    """Codes of at most 4 bits, int8 [m, n], as uint8 [m, ceil(n/2)]: element i in bits 4 (i % 2) of byte i // 2."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8) & 15
    return padded[:, ::2] | padded[:, 1::2] << 4
