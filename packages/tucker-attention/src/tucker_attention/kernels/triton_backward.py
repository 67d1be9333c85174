# mypy: disable-error-code="name-defined"
"""Gradients of the latent attention in Triton: one kernel for queries, one for keys and values, both deterministic.

With P the attention weights, dP = dO V^T and D = rowsum(dO O): dS = P (dP - D), dQ = dS K, dK = sum_h dS^T Q,
dV = sum_h P^T dO. P is formed again from Q, K and the saved log-sum-exp.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from icml26_shared.kernels import jit, launching_on, triton_language
from tucker_attention.kernels.layout import gradient_launch, launch_for, power_of_two
from tucker_attention.kernels.masks_triton import key_places, last_seen, with_columns

tl = triton_language()


@jit
def _weights(q, k, lse, place, limit):  # type: ignore[no-untyped-def]
    """P of a tile of queries [BLOCK_M, r] and keys [BLOCK_N, r], 0 where a query may not look."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(place[None, :] <= limit[:, None], tl.exp(logits - lse[:, None]), 0.0)


@jit
def query_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, d_ptr, dq_ptr, mask_ptr, q_start_ptr, q_len_ptr, k_start_ptr, k_len_ptr,
    TOTAL_Q, stride_k, stride_v, stride_mask, R3: tl.constexpr, S3: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R3_P: tl.constexpr, S3_P: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head over all keys."""
    batch, head = tl.program_id(1), tl.program_id(2)
    q_len, k_len = tl.load(q_len_ptr + batch), tl.load(k_len_ptr + batch)
    q_start, k_start = tl.load(q_start_ptr + batch).to(tl.int64), tl.load(k_start_ptr + batch).to(tl.int64)
    block = tl.program_id(0)
    if block * BLOCK_M < q_len:
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        wide, value = tl.arange(0, R3_P), tl.arange(0, S3_P)
        place = head.to(tl.int64) * TOTAL_Q + q_start + row
        inside = row < q_len
        q_in = with_columns(inside[:, None], wide[None, :], R3, R3_P)
        do_in = with_columns(inside[:, None], value[None, :], S3, S3_P)
        q = tl.load(q_ptr + place[:, None] * R3 + wide[None, :], mask=q_in, other=0.0)
        do = tl.load(do_ptr + place[:, None] * S3 + value[None, :], mask=do_in, other=0.0)
        lse, d = tl.load(lse_ptr + place, mask=inside, other=0.0), tl.load(d_ptr + place, mask=inside, other=0.0)
        limit = last_seen(row, q_len, k_len, CAUSAL)
        dq = tl.zeros((BLOCK_M, R3_P), dtype=tl.float32)
        last = tl.minimum(k_len, (block + 1) * BLOCK_M + k_len - q_len) if CAUSAL else k_len
        for start in range(0, last, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k_in = (key < k_len)[:, None]
            k = tl.load(
                k_ptr + (k_start + key)[:, None] * stride_k + wide[None, :],
                mask=with_columns(k_in, wide[None, :], R3, R3_P), other=0.0,
            )  # fmt: skip
            v = tl.load(
                v_ptr + (k_start + key)[:, None] * stride_v + value[None, :],
                mask=with_columns(k_in, value[None, :], S3, S3_P), other=0.0,
            )  # fmt: skip
            p = _weights(q, k, lse, key_places(key, k_len, mask_ptr + batch * stride_mask, MASKED), limit)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - d[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        tl.store(
            dq_ptr + place[:, None] * R3 + wide[None, :],
            dq,
            mask=with_columns(inside[:, None], wide[None, :], R3, R3_P),
        )


@jit
def key_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, d_ptr, dk_ptr, dv_ptr, mask_ptr, q_start_ptr, q_len_ptr, k_start_ptr,
    k_len_ptr, H, TOTAL_Q, stride_k, stride_v, stride_mask, R3: tl.constexpr, S3: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, R3_P: tl.constexpr, S3_P: tl.constexpr,
):  # fmt: skip
    """A tile of keys and values over all heads and queries."""
    batch = tl.program_id(1)
    q_len, k_len = tl.load(q_len_ptr + batch), tl.load(k_len_ptr + batch)
    q_start, k_start = tl.load(q_start_ptr + batch).to(tl.int64), tl.load(k_start_ptr + batch).to(tl.int64)
    block = tl.program_id(0)
    if block * BLOCK_N < k_len:
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        wide, value = tl.arange(0, R3_P), tl.arange(0, S3_P)
        k_in = with_columns((key < k_len)[:, None], wide[None, :], R3, R3_P)
        v_in = with_columns((key < k_len)[:, None], value[None, :], S3, S3_P)
        k = tl.load(k_ptr + (k_start + key)[:, None] * stride_k + wide[None, :], mask=k_in, other=0.0)
        v = tl.load(v_ptr + (k_start + key)[:, None] * stride_v + value[None, :], mask=v_in, other=0.0)
        dk, dv = tl.zeros((BLOCK_N, R3_P), dtype=tl.float32), tl.zeros((BLOCK_N, S3_P), dtype=tl.float32)
        first = tl.maximum(0, (block * BLOCK_N - k_len + q_len) // BLOCK_M * BLOCK_M) if CAUSAL else 0
        seen_at = key_places(key, k_len, mask_ptr + batch * stride_mask, MASKED)
        total_q = q_start * 0 + TOTAL_Q  # 64 bits
        for head in range(0, H):
            for start in range(first, q_len, BLOCK_M):
                row = start + tl.arange(0, BLOCK_M)
                inside = row < q_len
                place = q_start + row + head * total_q
                q_in = with_columns(inside[:, None], wide[None, :], R3, R3_P)
                do_in = with_columns(inside[:, None], value[None, :], S3, S3_P)
                q = tl.load(q_ptr + place[:, None] * R3 + wide[None, :], mask=q_in, other=0.0)
                do = tl.load(do_ptr + place[:, None] * S3 + value[None, :], mask=do_in, other=0.0)
                lse, d = (
                    tl.load(lse_ptr + place, mask=inside, other=0.0),
                    tl.load(d_ptr + place, mask=inside, other=0.0),
                )
                p = _weights(q, k, lse, seen_at, last_seen(row, q_len, k_len, CAUSAL))
                dv = tl.dot(tl.trans(p).to(do.dtype), do, dv, input_precision="ieee")
                ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - d[:, None])
                dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk, input_precision="ieee")
        tl.store(dk_ptr + (k_start + key)[:, None] * R3 + wide[None, :], dk, mask=k_in)
        tl.store(dv_ptr + (k_start + key)[:, None] * S3 + value[None, :], dv, mask=v_in)


KERNELS: dict[Literal["queries", "keys"], Any] = {"queries": query_gradient_kernel, "keys": key_gradient_kernel}


class LatentHeads(torch.autograd.Function):
    """``A_h v`` of every head [H, rows, s3] from flat q2 [rows, r2], t [H, r2, r3], k [keys, r3] and v [keys, s3]."""

    @staticmethod
    def forward(
        ctx: Any, q2: Tensor, t: Tensor, k: Tensor, v: Tensor, rows: Any, key_mask: Any, causal: bool, tables: Any
    ) -> Tensor:
        """Saves the inputs, the output and the log-sum-exp."""
        from tucker_attention.kernels.triton_attention import keys_turn, run_forward

        chosen = launch_for(t.shape[2], v.shape[1], 0, keys_turn(tables))
        out, lse = run_forward(q2, t, k, v, None, rows, key_mask, causal, tables, chosen)
        ctx.save_for_backward(q2, t, k, v, out, lse)
        ctx.options = rows, key_mask, causal, tables
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """Gradients of the four tensors."""
        from tucker_attention.kernels.triton_attention import rotate_heads, rotate_rows

        q2, t, k, v, out, lse = ctx.saved_tensors
        rows, key_mask, causal, tables = ctx.options
        q = rotate_heads(torch.matmul(q2.unsqueeze(0), t), tables).contiguous()
        turned = rotate_rows(k, tables).contiguous()
        d_out = d_out.contiguous()
        dq, dk, dv = run_backward(q, turned, v.contiguous(), out, d_out, lse, rows, key_mask, causal)
        dq = rotate_heads(dq, tables, inverse=True).to(q2.dtype)
        dk = rotate_rows(dk, tables, inverse=True).to(k.dtype)
        dq2 = torch.einsum("hnk,hrk->nr", dq, t)
        dt = torch.einsum("nr,hnk->hrk", q2, dq)
        return dq2, dt, dk, dv.to(v.dtype), None, None, None, None


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, rows: Any,
    key_mask: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq [H, rows, r3], dk [keys, r3], dv [keys, s3], float32; q and k are rotated already."""
    heads, total, r3 = q.shape
    s3 = v.shape[1]
    d = (d_out.float() * out.float()).sum(-1)
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    mask = lse if key_mask is None else key_mask.to(torch.uint8).contiguous()

    def flags(of: Literal["queries", "keys"]) -> dict[str, Any]:
        chosen = gradient_launch(r3, s3, of)
        return {
            "R3": r3, "S3": s3, "CAUSAL": causal, "MASKED": key_mask is not None, "R3_P": power_of_two(r3),
            "S3_P": power_of_two(s3), **chosen.blocks, "num_warps": chosen.warps, "num_stages": chosen.stages,
        }  # fmt: skip

    by_query, by_key = flags("queries"), flags("keys")
    with launching_on(q):
        query_gradient_kernel[(-(-rows.longest_q // by_query["BLOCK_M"]), rows.count, heads)](
            q, k, v, d_out, lse, d, dq, mask, *rows.tensors, total, k.stride(0), v.stride(0), mask.shape[-1],
            **by_query,
        )  # fmt: skip
        key_gradient_kernel[(-(-rows.longest_k // by_key["BLOCK_N"]), rows.count)](
            q, k, v, d_out, lse, d, dk, dv, mask, *rows.tensors, heads, total, k.stride(0), v.stride(0),
            mask.shape[-1], **by_key,
        )  # fmt: skip
    return dq, dk, dv
