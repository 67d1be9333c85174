# mypy: disable-error-code="name-defined"
"""Decoding in Triton: the heads are rows of one tile, the cached tokens are split among programs."""

from __future__ import annotations

import torch
from torch import Tensor

from icml26_shared.kernels import jit, launching_on, triton_language
from tucker_attention.kernels.layout import power_of_two

tl = triton_language()

SPLIT_TOKENS = 512  # cached tokens a program


@jit
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, H, M, R3, S3, stride_kb, stride_k, stride_vb, stride_v, SPLITS,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, R3_P: tl.constexpr,
    S3_P: tl.constexpr,
):  # fmt: skip
    """Partial values [B, SPLITS, H, S3] and log-sum-exps [B, SPLITS, H] of one share of the tokens."""
    split, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    wide, value = tl.arange(0, R3_P), tl.arange(0, S3_P)
    q = tl.load(
        q_ptr + (batch * H + head)[:, None] * R3 + wide[None, :],
        mask=(head < H)[:, None] & (wide < R3)[None, :],
        other=0.0,
    )
    most = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_H, S3_P), dtype=tl.float32)
    for start in range(split * TOKENS, tl.minimum(M, (split + 1) * TOKENS), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        real = key < M
        k = tl.load(
            k_ptr + batch * stride_kb + key[None, :].to(tl.int64) * stride_k + wide[:, None],
            mask=real[None, :] & (wide < R3)[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_ptr + batch * stride_vb + key[:, None].to(tl.int64) * stride_v + value[None, :],
            mask=real[:, None] & (value < S3)[None, :], other=0.0,
        )  # fmt: skip
        if MASKED:
            real = real & (tl.load(mask_ptr + batch * M + key, mask=real, other=0) != 0)
        logits = tl.where(real[None, :], tl.dot(q, k, input_precision="ieee"), float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        scale = tl.exp(most - safe)
        weights = tl.exp(logits - safe[:, None])
        sums = sums * scale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * scale[:, None], input_precision="ieee")
        most = higher
    place = (batch * SPLITS + split) * H + head
    found = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
    tl.store(out_ptr + place[:, None] * S3 + value[None, :], found, mask=(head < H)[:, None] & (value < S3)[None, :])
    lse = tl.where(sums == 0.0, float("-inf"), most + tl.log(tl.where(sums == 0.0, 1.0, sums)))
    tl.store(lse_ptr + place, lse, mask=head < H)


def blocks(r3: int, s3: int) -> dict[str, int]:
    """Tiles of the decode kernel."""
    wide = max(power_of_two(r3), power_of_two(s3))
    return {
        "TOKENS": SPLIT_TOKENS, "BLOCK_H": 16, "BLOCK_N": 64 if wide <= 128 else 32, "R3_P": power_of_two(r3),
        "S3_P": power_of_two(s3),
    }  # fmt: skip


def latent_decode_triton(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """See `tucker_attention.kernels.latent_decode`."""
    b, heads, r3 = q.shape
    m, s3 = k.shape[1], v.shape[2]
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    chosen = blocks(r3, s3)
    splits = -(-m // SPLIT_TOKENS)
    out = torch.empty(b, splits, heads, s3, dtype=torch.float32, device=q.device)
    lse = torch.empty(b, splits, heads, dtype=torch.float32, device=q.device)
    mask = lse if key_mask is None else key_mask.to(torch.uint8).contiguous()
    with launching_on(q):
        decode_kernel[(splits, b, -(-heads // chosen["BLOCK_H"]))](
            q.contiguous(), k, v, out, lse, mask, heads, m, r3, s3, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            splits, MASKED=key_mask is not None, **chosen, num_warps=4, num_stages=1,
        )  # fmt: skip
    most = lse.amax(1, keepdim=True)
    weights = (lse - torch.where(most == float("-inf"), 0.0, most)).exp()
    total = weights.sum(1, keepdim=True)
    return (out * (weights / torch.where(total == 0, 1.0, total))[..., None]).sum(1).to(q.dtype)
