"""Causal attention over rows that hold many sequences, with shared prefixes.

    o_i = Σ_j softmax_j(s · q_i·k_j) v_j   over the keys j that query i may see (`PackedLayout`)

Work is Σ over segments of length·(prefix + length/2), not T²: the Triton kernels walk a list of the blocks that meet
the mask, the CPU path runs segments of equal shape as one batch of PyTorch's fused attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dppo.kernels.layout import PackedLayout
from icml26_shared.kernels import KernelSpec, Path, choose_path, interpreting, jit, triton_language

tl: Any = triton_language()

BLOCK_M, BLOCK_N = 64, 32
_LOG2E = 1.4426950408889634


def packed_attention(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    layout: PackedLayout,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    path: Path | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within packed sequences and over their prefixes.

    Args:
        q: (T, Hq, Dh). k, v: (T, Hk, Dh), Hq a multiple of Hk. fp32, fp16 or bf16 (fp64 on the CPU); any strides.
        layout: of the T tokens.
        scale: s, default 1/√Dh.
        return_lse: also return the log-sum-exp of each query's scaled scores, (T, Hq) fp32.
        path: "triton", "cpu" or "torch"; default by device (`icml26_shared.kernels.choose_path`).

    Returns:
        o (T, Hq, Dh) in q's dtype, with lse if asked for; both differentiable. Gradients of prefix tokens add up over
        the segments that see them, in a fixed order.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, k, v, layout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not q.shape[0]:
        out, lse = q * 1, q.new_zeros(q.shape[:2], dtype=torch.float32)
        return (out, lse) if return_lse else out
    chosen = choose_path(q, k, v, prefer=path)
    if chosen == "triton":
        out, lse = _TritonAttention.apply(q, k, v, layout, scale)
        return (out, lse) if return_lse else out
    if chosen == "cpu" and not return_lse:
        return _cpu(q, k, v, layout, scale)
    out, lse = reference(q, k, v, layout, scale)
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: (T, heads, dim) each, k like v")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} need equal T and dim, and heads a multiple of kv_heads"
        )
    if layout.tokens != q.shape[0]:
        raise ValueError(f"the layout has {layout.tokens} tokens, q has {q.shape[0]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v need one floating point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def reference(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Dense T×T mask, in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    repeat = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(repeat, 1)
    values = v.to(dtype).repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", q.to(dtype), keys) * scale
    scores = scores.masked_fill(~layout.dense_mask(q.device), float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("hij,jhd->ihd", (scores - lse[..., None]).exp(), values)
    return out.to(q.dtype), lse.transpose(0, 1).float()


def _cpu(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Segments of equal (length, prefix length) as one batch; `split` keeps the backward pass linear in T."""
    segments = layout.segments()
    sizes = [length for _, length, _, _ in segments]
    repeat = q.shape[1] // k.shape[1]
    queries, keys, values = q.split(sizes), k.split(sizes), v.split(sizes)
    at = {start: i for i, (start, length, _, _) in enumerate(segments) if length}
    same: dict[tuple[int, int], list[int]] = {}
    for i, (_, length, _, prefix_length) in enumerate(segments):
        if length:
            same.setdefault((length, prefix_length), []).append(i)
    pieces: list[Tensor] = [queries[i] for i in range(len(segments))]

    def with_prefix(parts: tuple[Tensor, ...], whole: Tensor, i: int) -> Tensor:
        _, _, start, length = segments[i]
        if not length:
            return parts[i]
        owner = at.get(start)
        head = parts[owner] if owner is not None and sizes[owner] == length else whole[start : start + length]
        return torch.cat([head, parts[i]])

    for (length, prefix_length), members in same.items():
        batch_q = torch.stack([queries[i] for i in members]).transpose(1, 2)
        batch_k = torch.stack([with_prefix(keys, k, i) for i in members]).transpose(1, 2)
        batch_v = torch.stack([with_prefix(values, v, i) for i in members]).transpose(1, 2)
        if repeat > 1:
            batch_k, batch_v = batch_k.repeat_interleave(repeat, 1), batch_v.repeat_interleave(repeat, 1)
        mask = None
        if prefix_length:
            mask = torch.ones(length, prefix_length + length, dtype=torch.bool).tril(prefix_length)
        out = F.scaled_dot_product_attention(
            batch_q, batch_k, batch_v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        for i, piece in zip(members, out.transpose(1, 2).unbind(), strict=True):
            pieces[i] = piece
    return torch.cat(pieces)


@jit
def _dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a·b with fp32 accumulation. UPCAST: Triton's interpreter multiplies the bit patterns of bf16 tiles as
    integers."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def _load_rows(pointer, rows, d, head, tokens, stride_t, stride_h, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of rows of one head. Rows beyond the last token read the last one: `_visible` and causality keep what they
    hold out of every sum, and no mask is needed."""
    at = tl.minimum(rows, tokens - 1)[:, None].to(tl.int64) * stride_t + head * stride_h + d[None, :]
    if DIM == BLOCK_D:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=(d < DIM)[None, :], other=0.0)


@jit
def _scores(
    q_tile, k_tile, cols, own, length, begin, prefix, scale,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Masked scaled scores in units of log2, from `_visible`. A row sees no key beyond itself, so no bounds need
    checking. start <= c < start + n is one unsigned comparison, c − start < n: a GPU whose masks live in scalar
    registers runs out of them otherwise."""
    s = _dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST) * (scale * 1.4426950408889634)
    c = cols[None, :]
    within = (c - own[:, None]).to(tl.uint32, bitcast=True) < length[:, None].to(tl.uint32, bitcast=True)
    before = (c - begin[:, None]).to(tl.uint32, bitcast=True) < prefix[:, None].to(tl.uint32, bitcast=True)
    return tl.where(within | before, s, float("-inf"))


@jit
def _visible(arrays_ptr, rows, tokens):
    """What each row sees: `length` keys from `own` on and `prefix` keys from `begin` on; none for rows beyond the last
    token."""
    at = tl.minimum(rows, tokens - 1)
    own, begin = tl.load(arrays_ptr + at), tl.load(arrays_ptr + tokens + at)
    prefix = tl.load(arrays_ptr + 2 * tokens + at) - begin
    return own, tl.where(rows < tokens, rows - own + 1, 0), begin, tl.where(rows < tokens, prefix, 0)


@jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, arrays_ptr, row_ptr, blocks_ptr, tokens, scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_ot, stride_oh,
    REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    rows, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row_ok = rows < tokens
    q_tile = _load_rows(q_ptr, rows, d, head, tokens, stride_qt, stride_qh, DIM, BLOCK_D)
    own, length, begin, prefix = _visible(arrays_ptr, rows, tokens)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for entry in range(tl.load(row_ptr + block), tl.load(row_ptr + block + 1)):
        cols = tl.load(blocks_ptr + entry) * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = _load_rows(k_ptr, cols, d, head // REPEAT, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
        s = _scores(q_tile, k_tile, cols, own, length, begin, prefix, scale, PRECISION, UPCAST)
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _load_rows(v_ptr, cols, d, head // REPEAT, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
        acc = acc * shrink[:, None] + _dot(p.to(v_tile.dtype), v_tile, PRECISION, UPCAST)
        top = new_top
    total = tl.where(row_ok, total, 1.0)
    top = tl.where(row_ok, top, 0.0)
    o_at = rows[:, None].to(tl.int64) * stride_ot + head * stride_oh + d[None, :]
    out = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + o_at, out, mask=row_ok[:, None] & (d < DIM)[None, :])
    tl.store(lse_ptr + head.to(tl.int64) * tokens + rows, (top + tl.log2(total)) / 1.4426950408889634, mask=row_ok)


@jit
def _backward_q_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, arrays_ptr, row_ptr, blocks_ptr, tokens, scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_ot, stride_oh,
    REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    rows, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row_ok = rows < tokens
    q_tile = _load_rows(q_ptr, rows, d, head, tokens, stride_qt, stride_qh, DIM, BLOCK_D)
    do_tile = _load_rows(do_ptr, rows, d, head, tokens, stride_ot, stride_oh, DIM, BLOCK_D)
    own, length, begin, prefix = _visible(arrays_ptr, rows, tokens)
    saved_at = head.to(tl.int64) * tokens + tl.minimum(rows, tokens - 1)
    lse, delta = tl.load(lse_ptr + saved_at) * 1.4426950408889634, tl.load(delta_ptr + saved_at)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for entry in range(tl.load(row_ptr + block), tl.load(row_ptr + block + 1)):
        cols = tl.load(blocks_ptr + entry) * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = _load_rows(k_ptr, cols, d, head // REPEAT, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
        v_tile = _load_rows(v_ptr, cols, d, head // REPEAT, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
        p = tl.exp2(_scores(q_tile, k_tile, cols, own, length, begin, prefix, scale, PRECISION, UPCAST) - lse[:, None])
        dp = _dot(do_tile, tl.trans(v_tile), PRECISION, UPCAST)
        ds = p * (dp - delta[:, None]) * scale
        acc += _dot(ds.to(k_tile.dtype), k_tile, PRECISION, UPCAST)
    o_at = rows[:, None].to(tl.int64) * stride_ot + head * stride_oh + d[None, :]
    tl.store(dq_ptr + o_at, acc.to(dq_ptr.dtype.element_ty), mask=row_ok[:, None] & (d < DIM)[None, :])


@jit
def _backward_kv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, arrays_ptr, column_ptr, blocks_ptr, tokens, scale,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_ot, stride_oh, stride_gt, stride_gh,
    REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    cols, d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_tile = _load_rows(k_ptr, cols, d, kv_head, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
    v_tile = _load_rows(v_ptr, cols, d, kv_head, tokens, stride_kt, stride_kh, DIM, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first, last = tl.load(column_ptr + block), tl.load(column_ptr + block + 1)
    for step in range(REPEAT * (last - first)):  # heads of the group one after the other: a fixed order of addition
        head = kv_head * REPEAT + step // (last - first)
        rows = tl.load(blocks_ptr + first + step % (last - first)) * BLOCK_M + tl.arange(0, BLOCK_M)
        q_tile = _load_rows(q_ptr, rows, d, head, tokens, stride_qt, stride_qh, DIM, BLOCK_D)
        do_tile = _load_rows(do_ptr, rows, d, head, tokens, stride_ot, stride_oh, DIM, BLOCK_D)
        own, length, begin, prefix = _visible(arrays_ptr, rows, tokens)
        saved_at = head.to(tl.int64) * tokens + tl.minimum(rows, tokens - 1)
        lse, delta = tl.load(lse_ptr + saved_at) * 1.4426950408889634, tl.load(delta_ptr + saved_at)
        p = tl.exp2(_scores(q_tile, k_tile, cols, own, length, begin, prefix, scale, PRECISION, UPCAST) - lse[:, None])
        dv += _dot(tl.trans(p.to(do_tile.dtype)), do_tile, PRECISION, UPCAST)
        dp = _dot(do_tile, tl.trans(v_tile), PRECISION, UPCAST)
        ds = p * (dp - delta[:, None]) * scale
        dk += _dot(tl.trans(ds.to(q_tile.dtype)), q_tile, PRECISION, UPCAST)
    g_at = cols[:, None].to(tl.int64) * stride_gt + kv_head * stride_gh + d[None, :]
    tile_ok = (cols < tokens)[:, None] & (d < DIM)[None, :]
    tl.store(dk_ptr + g_at, dk.to(dk_ptr.dtype.element_ty), mask=tile_ok)
    tl.store(dv_ptr + g_at, dv.to(dv_ptr.dtype.element_ty), mask=tile_ok)


def _constants(q: Tensor, k: Tensor, *, of_keys: bool = False) -> dict[str, Any]:
    """Of the kernels that own a block of queries, or of the one that owns a block of keys. The blocks are the largest
    that keep all scalars of gfx942 in registers, which hold the masks of a tile there."""
    dim = q.shape[2]
    return {
        "REPEAT": q.shape[1] // k.shape[1],
        "DIM": dim,
        "BLOCK_D": max(16, 1 << (dim - 1).bit_length()),
        "BLOCK_M": BLOCK_M if dim <= 128 and not of_keys else BLOCK_M // 2,
        "BLOCK_N": BLOCK_N,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "UPCAST": interpreting(),
        "num_warps": 4 if dim <= 64 else 8,
        "num_stages": 1 if of_keys and dim <= 64 else 2,
    }


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> tuple[Tensor, Tensor]:
        if q.dtype == torch.float64:
            raise ValueError("the Triton path takes fp32, fp16 and bf16; fp64 runs with path='torch'")
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        if k.stride() != v.stride():
            k, v = k.contiguous(), v.contiguous()
        out, constants = torch.empty_like(q, memory_format=torch.contiguous_format), _constants(q, k)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        row_ptr, row_blocks, _, _ = layout.block_lists(constants["BLOCK_M"], constants["BLOCK_N"], q.device)
        _forward_kernel[(len(row_ptr) - 1, q.shape[1])](
            q, k, v, out, lse, layout.token_arrays(q.device), row_ptr, row_blocks, q.shape[0], scale,
            *q.stride()[:2], *k.stride()[:2], *out.stride()[:2], **constants,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out, lse.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        d_out, constants = d_out.contiguous(), _constants(q, k)
        delta = ((d_out.float() * out.float()).sum(-1) - d_lse).transpose(0, 1).contiguous()
        dq = torch.empty_like(out)
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        arrays = ctx.layout.token_arrays(q.device)
        rows = ctx.layout.block_lists(constants["BLOCK_M"], constants["BLOCK_N"], q.device)[:2]
        strides = (*q.stride()[:2], *k.stride()[:2], *out.stride()[:2])
        _backward_q_kernel[(len(rows[0]) - 1, q.shape[1])](
            q, k, v, d_out, lse, delta, dq, arrays, *rows, q.shape[0], ctx.scale, *strides, **constants
        )
        constants = _constants(q, k, of_keys=True)
        columns = ctx.layout.block_lists(constants["BLOCK_M"], constants["BLOCK_N"], q.device)[2:]
        _backward_kv_kernel[(len(columns[0]) - 1, k.shape[1])](
            q, k, v, d_out, lse, delta, dk, dv, arrays, *columns, q.shape[0], ctx.scale,
            *strides, *dk.stride()[:2], **constants,
        )  # fmt: skip
        return dq, dk, dv, None, None


def aot_specs() -> list[KernelSpec]:
    """The three kernels at head dimensions 64 and 128, bf16, four queries heads a key head."""
    specs = []
    for dim in (64, 128):
        element = torch.empty(0, 4, dim, dtype=torch.bfloat16)
        of_queries, of_keys = (_constants(element, element[:, :1], of_keys=keys) for keys in (False, True))
        inputs = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16"}
        lists = {"arrays_ptr": "*i32", "row_ptr": "*i32", "blocks_ptr": "*i32", "tokens": "i32", "scale": "fp32"}
        strides = dict.fromkeys(("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_ot", "stride_oh"), "i32")
        saved = {"do_ptr": "*bf16", "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
        columns = {("column_ptr" if name == "row_ptr" else name): kind for name, kind in lists.items()}
        aligned = ("q_ptr", "k_ptr", "v_ptr", *strides)
        more = {"stride_gt": "i32", "stride_gh": "i32"}
        kernels = (
            ("forward", _forward_kernel, of_queries, inputs | {"o_ptr": "*bf16", "lse_ptr": "*fp32"} | lists | strides),
            ("backward dq", _backward_q_kernel, of_queries, inputs | saved | {"dq_ptr": "*bf16"} | lists | strides),
            (
                "backward dk, dv",
                _backward_kv_kernel,
                of_keys,
                inputs | saved | {"dk_ptr": "*bf16", "dv_ptr": "*bf16"} | columns | strides | more,
            ),
        )
        for name, fn, constants, signature in kernels:
            constexprs = {key: value for key, value in constants.items() if not key.startswith("num_")}
            launch = constants["num_warps"], constants["num_stages"]
            label = f"packed attention {name} bf16 D={dim}"
            specs.append(KernelSpec(label, fn, signature, constexprs, *launch, aligned))
    return specs
