# mypy: disable-error-code="name-defined"
"""Latent attention in Triton: the forward kernel forms queries on chip, rotates, attends, and contracts to the output.

A program takes BLOCK_Q queries and loops over groups of BLOCK_H heads, whose (query, head) pairs are the rows of one
tile: each tile of keys and values is loaded once for the whole group. Every latent of keys is handled as two
halves, so that the pairs of RoPE stand in two registers: at distance r/2, or at even and odd places when interleaved.
Rows of a batch are addressed by their first row and length, so packed sequences (cu_seqlens) take the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from icml26_shared.kernels import jit, launching_on, triton_language
from tucker_attention.kernels.layout import Launch, launch_for, power_of_two
from tucker_attention.kernels.masks_triton import key_places, last_seen, load_columns, with_columns
from tucker_attention.kernels.rotary import Tables, rotate

tl = triton_language()


@jit
def _turn(a, b, cos_ptr, sin_ptr, where, column, HALF: tl.constexpr, HALF_P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pair (a, b) rotated by the angles at ``where``."""
    cos = load_columns(cos_ptr + where, column, HALF, HALF_P).to(tl.float32)
    sin = load_columns(sin_ptr + where, column, HALF, HALF_P).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@jit
def _queries(  # type: ignore[no-untyped-def]
    q2_ptr, t_ptr, query, q_start, q_len, head0, H, R2, stride_q, R3: tl.constexpr, FIRST: tl.constexpr,
    STEP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr,
):  # fmt: skip
    """Both halves [BLOCK_Q BLOCK_H, HALF_P] of ``q2 T_h`` for a group of heads, float32."""
    column = tl.arange(0, BLOCK_H * HALF_P)
    head, half = tl.minimum(head0 + column // HALF_P, H - 1), column % HALF_P
    held = tl.minimum(query, q_len - 1)
    first = tl.zeros((BLOCK_Q, BLOCK_H * HALF_P), dtype=tl.float32)
    second = tl.zeros((BLOCK_Q, BLOCK_H * HALF_P), dtype=tl.float32)
    for start in range(0, R2, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        q2 = tl.load(q2_ptr + (q_start + held)[:, None] * stride_q + r[None, :], mask=(r < R2)[None, :], other=0.0)
        core = t_ptr + (head[None, :] * R2 + r[:, None]) * R3 + half[None, :] * STEP
        there = (r < R2)[:, None]
        a = tl.load(core, mask=with_columns(there, half[None, :], HALF, HALF_P), other=0.0)
        b = tl.load(core + FIRST, mask=with_columns(there, half[None, :], R3 - HALF, HALF_P), other=0.0)
        first = tl.dot(q2, a, first, input_precision="ieee")
        second = tl.dot(q2, b, second, input_precision="ieee")
    rows: tl.constexpr = BLOCK_Q * BLOCK_H
    return tl.reshape(first, (rows, HALF_P)), tl.reshape(second, (rows, HALF_P))


@jit
def _key_halves(  # type: ignore[no-untyped-def]
    k_ptr, cos_k_ptr, sin_k_ptr, key, k_start, k_len, stride_k, stride_tables, R3: tl.constexpr,
    FIRST: tl.constexpr, STEP: tl.constexpr, ROPE_K: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
):  # fmt: skip
    """Both halves [HALF_P, BLOCK_N] of a tile of keys, rotated on load with ROPE_K."""
    half, held = tl.arange(0, HALF_P)[:, None], (k_start + tl.minimum(key, k_len - 1))[None, :]
    place = k_ptr + held * stride_k + half * STEP
    first = load_columns(place, half, HALF, HALF_P)
    second = load_columns(place + FIRST, half, R3 - HALF, HALF_P)
    if ROPE_K:
        where = held * stride_tables + half
        a, b = _turn(first.to(tl.float32), second.to(tl.float32), cos_k_ptr, sin_k_ptr, where, half, HALF, HALF_P)
        first, second = a.to(k_ptr.dtype.element_ty), b.to(k_ptr.dtype.element_ty)
    return first, second


@jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q2_ptr, t_ptr, k_ptr, v_ptr, tt_ptr, out_ptr, lse_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr, mask_ptr,
    q_start_ptr, q_len_ptr, k_start_ptr, k_len_ptr, H, R2, stride_q, stride_k, stride_v, stride_tables, stride_mask,
    TOTAL_Q, R3: tl.constexpr, S3: tl.constexpr, S2: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    CAUSAL: tl.constexpr, ROPE_Q: tl.constexpr, ROPE_K: tl.constexpr, MASKED: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, S3_P: tl.constexpr, S2_P: tl.constexpr,
):  # fmt: skip
    """Out: [rows, S2] with FUSED, else [H, rows, S3]; lse [H, rows]. FIRST: place of the second half's first column."""
    batch, block = tl.program_id(1), tl.program_id(0)
    q_len, k_len = tl.load(q_len_ptr + batch), tl.load(k_len_ptr + batch)
    q_start, k_start = tl.load(q_start_ptr + batch).to(tl.int64), tl.load(k_start_ptr + batch).to(tl.int64)
    if block * BLOCK_Q < q_len:
        query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        half, value, outer = tl.arange(0, HALF_P), tl.arange(0, S3_P), tl.arange(0, S2_P)
        rows: tl.constexpr = BLOCK_Q * BLOCK_H
        row = tl.arange(0, rows)
        row_query, row_head = block * BLOCK_Q + row // BLOCK_H, row % BLOCK_H
        limit = last_seen(row_query, q_len, k_len, CAUSAL)
        total = tl.zeros((BLOCK_Q, S2_P), dtype=tl.float32)
        last = tl.minimum(k_len, (block + 1) * BLOCK_Q + k_len - q_len) if CAUSAL else k_len
        for group in range(0, tl.cdiv(H, BLOCK_H)):
            head0 = group * BLOCK_H
            a, b = _queries(
                q2_ptr, t_ptr, query, q_start, q_len, head0, H, R2, stride_q, R3, FIRST, STEP, BLOCK_H, BLOCK_Q,
                BLOCK_R, HALF, HALF_P,
            )  # fmt: skip
            if ROPE_Q:
                where = (q_start + tl.minimum(row_query, q_len - 1))[:, None] * stride_tables + half[None, :]
                a, b = _turn(a, b, cos_q_ptr, sin_q_ptr, where, half[None, :], HALF, HALF_P)
            q_first, q_second = a.to(k_ptr.dtype.element_ty), b.to(k_ptr.dtype.element_ty)
            most = tl.full((rows,), float("-inf"), dtype=tl.float32)
            sums = tl.zeros((rows,), dtype=tl.float32)
            acc = tl.zeros((rows, S3_P), dtype=tl.float32)
            for start in range(0, last, BLOCK_N):
                key = start + tl.arange(0, BLOCK_N)
                k_first, k_second = _key_halves(
                    k_ptr, cos_k_ptr, sin_k_ptr, key, k_start, k_len, stride_k, stride_tables, R3, FIRST, STEP, ROPE_K,
                    HALF, HALF_P,
                )  # fmt: skip
                logits = tl.dot(q_first, k_first, input_precision="ieee")
                logits = tl.dot(q_second, k_second, logits, input_precision="ieee")
                seen_at = key_places(key, k_len, mask_ptr + batch * stride_mask, MASKED)
                logits = tl.where(seen_at[None, :] <= limit[:, None], logits, float("-inf"))
                higher = tl.maximum(most, tl.max(logits, 1))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                scale = tl.exp(most - safe)
                weights = tl.exp(logits - safe[:, None])
                sums = sums * scale + tl.sum(weights, 1)
                held = (k_start + tl.minimum(key, k_len - 1))[:, None]
                v = load_columns(v_ptr + held * stride_v + value[None, :], value[None, :], S3, S3_P)
                acc = tl.dot(weights.to(v.dtype), v, acc * scale[:, None], input_precision="ieee")
                most = higher
            found = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
            if FUSED:
                inner = tl.arange(0, BLOCK_H * S3_P)
                head, column = head0 + inner // S3_P, inner % S3_P
                there = with_columns(with_columns(head < H, column, S3, S3_P)[:, None], outer[None, :], S2, S2_P)
                core = tl.load(
                    tt_ptr + (head[:, None] * S2 + outer[None, :]) * S3 + column[:, None], mask=there, other=0.0
                )
                wide = tl.reshape(found.to(tt_ptr.dtype.element_ty), (BLOCK_Q, BLOCK_H * S3_P))
                total = tl.dot(wide, core, total, input_precision="ieee")
            else:
                there = (row_query < q_len) & (head0 + row_head < H)
                target = (head0 + row_head) * TOTAL_Q + q_start + row_query
                kept = with_columns(there[:, None], value[None, :], S3, S3_P)
                tl.store(out_ptr + target[:, None] * S3 + value[None, :], found.to(out_ptr.dtype.element_ty), mask=kept)
                lse = tl.where(sums == 0.0, float("inf"), most + tl.log(tl.where(sums == 0.0, 1.0, sums)))
                tl.store(lse_ptr + target, lse, mask=there)
        if FUSED:
            kept = with_columns((query < q_len)[:, None], outer[None, :], S2, S2_P)
            place = out_ptr + (q_start + query)[:, None] * S2 + outer[None, :]
            tl.store(place, total.to(out_ptr.dtype.element_ty), mask=kept)


class Rows:
    """First rows and lengths of the queries and keys of each sequence, int32 on the device."""

    def __init__(
        self, q_start: Tensor, q_len: Tensor, k_start: Tensor, k_len: Tensor, longest_q: int, longest_k: int
    ) -> None:
        self.tensors = q_start, q_len, k_start, k_len
        self.count, self.longest_q, self.longest_k = len(q_len), longest_q, longest_k

    @classmethod
    def of_batch(cls, b: int, n: int, m: int, device: torch.device) -> Rows:
        """Sequences of one length, one after the other."""
        index = torch.arange(b, dtype=torch.int32, device=device)
        return cls(index * n, torch.full_like(index, n), index * m, torch.full_like(index, m), n, m)

    @classmethod
    def of_packed(cls, cu_q: Tensor, cu_k: Tensor) -> Rows:
        """Packed sequences, by the running sums of their lengths (int32 [B + 1])."""
        q_len, k_len = cu_q.diff().int(), cu_k.diff().int()
        return cls(cu_q[:-1].int(), q_len, cu_k[:-1].int(), k_len, int(q_len.max()), int(k_len.max()))


def latent_attention_triton(
    q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor, key_mask: Tensor | None, causal: bool,
    rotary: Tables | None,
) -> Tensor:  # fmt: skip
    """See `tucker_attention.kernels.latent_attention`; fused unless gradients are wanted or the output is wide."""
    b, n, _ = q2.shape
    m, s2 = k.shape[1], tt.shape[1]
    if b * n == 0 or m == 0:
        return q2.new_zeros(b, n, s2)
    rows = Rows.of_batch(b, n, m, q2.device)
    flat = [x.reshape(-1, x.shape[-1]) for x in (q2, k, v)]
    turning = None if rotary is None else _flat_tables(rotary, b)
    return attend_rows(flat[0], t, flat[1], flat[2], tt, rows, key_mask, causal, turning).view(b, n, s2)


def attend_rows(
    q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor, rows: Rows, key_mask: Tensor | None, causal: bool,
    rotary: Tables | None,
) -> Tensor:  # fmt: skip
    """out2 [rows, s2] of flat rows; angles [1, rows, pairs] or flat."""
    tables = None if rotary is None else _flat_tables(rotary, 1)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q2, t, k, v, tt))
    chosen = launch_for(t.shape[2], v.shape[1], tt.shape[1], keys_turn(tables))
    if not wanted and chosen.fused:
        return run_forward(q2, t, k, v, tt, rows, key_mask, causal, tables, chosen)[0]
    from tucker_attention.kernels.triton_backward import LatentHeads

    heads = LatentHeads.apply(q2, t, k, v, rows, key_mask, causal, tables)
    return torch.einsum("hts,hrs->rt", tt, heads)


def _flat_tables(rotary: Tables, b: int) -> Tables:
    def flat(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return (x if x.dim() == 2 else x.expand(b, -1, -1).reshape(-1, x.shape[-1])).float().contiguous()

    cos, sin = flat(rotary.cos_q), flat(rotary.sin_q)
    if cos is None or sin is None:
        raise ValueError("rotary tables need angles of the queries")
    return Tables(cos, sin, flat(rotary.cos_k), flat(rotary.sin_k), rotary.interleaved)


def run_forward(
    q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor | None, rows: Rows, key_mask: Tensor | None, causal: bool,
    tables: Tables | None, chosen: Launch,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch over flat rows: out [rows, s2] with ``tt``, else heads [H, rows, s3]; and lse [H, rows]."""
    heads, r2, r3 = t.shape
    s3, s2 = v.shape[1], 0 if tt is None else tt.shape[1]
    half = (r3 + 1) // 2
    interleaved = tables is not None and tables.interleaved
    q2, k, v = (x if x.stride(1) == 1 else x.contiguous() for x in (q2, k, v))
    fused = tt is not None
    out = q2.new_empty((len(q2), s2) if fused else (heads, len(q2), s3))
    lse = torch.empty(1 if fused else (heads, len(q2)), dtype=torch.float32, device=q2.device)
    nothing = lse
    turning = keys_turn(tables)
    cos_q, sin_q = (nothing, nothing) if tables is None else (tables.cos_q, tables.sin_q)
    cos_k, sin_k = (tables.cos_k, tables.sin_k) if tables is not None and turning else (nothing, nothing)
    mask = nothing if key_mask is None else key_mask.to(torch.uint8).contiguous()
    flags: dict[str, Any] = {
        "R3": r3, "S3": s3, "S2": s2, "FIRST": 1 if interleaved else half, "STEP": 2 if interleaved else 1,
        "CAUSAL": causal, "ROPE_Q": tables is not None, "ROPE_K": turning, "MASKED": key_mask is not None,
        "FUSED": fused, "HALF": half, "HALF_P": power_of_two(half), "S3_P": power_of_two(s3),
        "S2_P": power_of_two(max(1, s2)), **chosen.blocks,
    }  # fmt: skip
    grid = (-(-rows.longest_q // chosen.blocks["BLOCK_Q"]), rows.count)
    with launching_on(q2):
        forward_kernel[grid](
            q2, t.contiguous(), k, v, nothing if tt is None else tt.contiguous(), out, lse, cos_q, sin_q, cos_k, sin_k,
            mask, *rows.tensors, heads, r2, q2.stride(0), k.stride(0), v.stride(0), cos_q.shape[-1],
            mask.shape[-1], len(q2), **flags, num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return out, lse


def keys_turn(tables: Tables | None) -> bool:
    """Whether there are angles for keys, which are then rotated on load."""
    return tables is not None and tables.cos_k is not None


def rotate_heads(heads: Tensor, tables: Tables | None, inverse: bool = False) -> Tensor:
    """Queries of all heads [H, rows, r3] rotated by the flat tables, or back."""
    if tables is None:
        return heads
    return rotate(heads, tables.cos_q, -tables.sin_q if inverse else tables.sin_q, tables.interleaved)


def rotate_rows(k: Tensor, tables: Tables | None, inverse: bool = False) -> Tensor:
    """Keys [rows, r3] rotated by the flat tables, or back; as they are without angles for keys."""
    if tables is None or tables.cos_k is None or tables.sin_k is None:
        return k
    return rotate(k, tables.cos_k, -tables.sin_k if inverse else tables.sin_k, tables.interleaved)
