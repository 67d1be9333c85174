"""Compaction of a key-value cache: the kept tokens move to the front, in their order.

``out[b, h, j] = in[b, h, index[b, h, j]]`` for keys and values. With ascending indices ``index_j >= j``, so compaction
works in place: when position ``j`` is written, whatever it held is either evicted or already moved.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from icml26_shared.kernels import Path, choose_path, jit, launching_on, triton_language
from manifoldkv.kernels import layout

tl = triton_language()

_MOVE_BYTES = 2 << 20  # moved at a time on the CPU
_BLOCK_ELEMENTS = 4096  # of a GPU program's tile
_BLOCK_COLUMNS = 64  # of it: several programs share a head's width, since in place a program walks through all tokens


@torch.no_grad()
def gather_kv(
    keys: Float[Tensor, "batch heads tokens dim"],
    values: Float[Tensor, "batch heads tokens value_dim"],
    indices: Int64[Tensor, "batch heads kept"],
    *,
    in_place: bool = False,
    check: bool = True,
    prefer: Path | None = None,
) -> tuple[Float[Tensor, "batch heads kept dim"], Float[Tensor, "batch heads kept value_dim"]]:
    """Keep the tokens ``indices`` of keys and values; moves ``n (D + D_v)`` numbers per head. No gradient is recorded.

    Args:
        keys, values: ``[B, H, T, D]`` and ``[B, H, T, D_v]``, any dtype, any strides.
        indices: int64 ``[B, H, n]``, ascending in each head, each in ``[0, T)``.
        in_place: write to the front of ``keys`` and ``values`` and return views of them: no new memory, but the old
            memory stays taken. What lies behind the first ``n`` tokens is then unspecified. Default: new tensors.
        check: look at the indices first; on a GPU this waits for it. Unchecked wrong indices corrupt memory.
        prefer: ``"triton"``, ``"cpu"`` or ``"torch"``; default by device (`icml26_shared.kernels.choose_path`).

    Returns:
        keys ``[B, H, n, D]`` and values ``[B, H, n, D_v]``.

    Raises:
        ValueError: shapes that do not fit together, indices out of range or not ascending, or ``in_place`` on an
            expanded tensor, whose entries share memory.
    """
    path = choose_path(keys, values, indices, prefer=prefer)
    _check(keys, values, indices, check)
    if in_place:
        for name, tensor in (("keys", keys), ("values", values)):
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError(
                    f"{name} are an expanded view whose entries share memory; use in_place=False or .clone()"
                )
    move = {"triton": _move_triton, "cpu": _move_cpu, "torch": _move_torch}[path]
    kept = indices.shape[2]
    made = []
    for tensor in (keys, values):
        target = tensor[:, :, :kept] if in_place else tensor.new_empty((*indices.shape, tensor.shape[3]))
        if target.numel():
            with launching_on(tensor):
                move(tensor, target, indices, in_place)
        made.append(target)
    return made[0], made[1]


def _check(keys: Tensor, values: Tensor, indices: Tensor, check: bool) -> None:
    for name, tensor, rank in (("keys", keys, 4), ("values", values, 4), ("indices", indices, 3)):
        if tensor.ndim != rank:
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}; they must have {rank} dimensions")
    if keys.shape[:3] != values.shape[:3] or keys.shape[:2] != indices.shape[:2]:
        shapes = f"keys {tuple(keys.shape)}, values {tuple(values.shape)}, indices {tuple(indices.shape)}"
        raise ValueError(f"{shapes} must agree in batch and heads, and keys and values in tokens")
    if indices.dtype != torch.int64:
        raise ValueError(f"indices must be int64, not {indices.dtype}")
    if indices.shape[2] > keys.shape[2]:
        raise ValueError(f"{indices.shape[2]} indices for {keys.shape[2]} tokens; ascending indices cannot be more")
    if check and indices.numel():
        _check_ascending(indices, keys.shape[2])


def _check_ascending(indices: Tensor, length: int) -> None:
    steady = (indices[..., 1:] > indices[..., :-1]).all()
    if not bool(steady & (indices[..., 0] >= 0).all() & (indices[..., -1] < length).all()):
        raise ValueError(f"indices must ascend in each head, from at least 0 to at most {length - 1}; sort them")


def _move_torch(source: Tensor, target: Tensor, indices: Tensor, in_place: bool) -> None:
    """The formula in plain torch. All is read before anything is written."""
    target.copy_(source.gather(2, indices[..., None].expand(-1, -1, -1, source.shape[3])))


def _move_cpu(source: Tensor, target: Tensor, indices: Tensor, in_place: bool) -> None:
    """Whole rows are copied, a stretch of tokens at a time.

    In place this is safe: a stretch ``[j0, j1)`` reads positions from ``j0`` on and is read in full before it is
    written, and later stretches read from ``j1`` on.
    """
    batch, heads, _, dim = source.shape
    kept = indices.shape[2]
    step = max(_MOVE_BYTES // max(dim * source.element_size(), 1), 1)
    for row in range(batch):
        for head in range(heads):
            tokens, own = source[row, head], indices[row, head]
            for start in range(0, kept, step):
                part = slice(start, min(start + step, kept))
                if in_place or not target.is_contiguous():
                    target[row, head, part] = tokens.index_select(0, own[part])
                else:
                    torch.index_select(tokens, 0, own[part], out=target[row, head, part])


def gather_kv_paged(
    key_cache: Float[Tensor, "blocks block_size heads dim"],
    value_cache: Float[Tensor, "blocks block_size heads value_dim"],
    block_table: Int[Tensor, "rows row_blocks"],
    indices: Int64[Tensor, "rows heads kept"],
    lengths: Int[Tensor, " rows"] | None = None,
    *,
    start: int = 0,
    check: bool = True,
    prefer: Path | None = None,
) -> None:
    """Compact rows of a paged cache in place: token ``indices[r, h, j]`` of row ``r`` moves to its token ``start + j``.

    Token ``t`` of row ``r`` lies in block ``block_table[r, t // block_size]`` at ``t % block_size``. Only blocks of
    one row alone may be compacted: two rows that share a block would overwrite each other. No gradient is recorded.

    Args:
        key_cache, value_cache: ``[blocks, block_size, H, D]``, any dtype, any strides (another order of
            dimensions is given as a permuted view).
        block_table: int32 or int64 ``[R, M]``.
        indices: int64 ``[R, H, n]``, ascending in each head; ``index_j >= start + j``.
        lengths: int32 or int64 ``[R]``: how many of a row's ``n`` indices count; default all. Others are not read.
        start: first token that is written, such as the number of sinks kept in place.
        check: look at indices and lengths first; on a GPU this waits for it. Unchecked wrong ones corrupt memory.
        prefer: ``"triton"``, ``"cpu"`` or ``"torch"``; default by device.

    Raises:
        ValueError: shapes that do not fit together; indices out of range, not ascending, or below ``start + j``.
    """
    path = choose_path(key_cache, value_cache, block_table, indices, prefer=prefer)
    _check_paged(key_cache, value_cache, block_table, indices, lengths)
    rows, _, kept = indices.shape
    if lengths is None:
        lengths = torch.full((rows,), kept, dtype=torch.int32, device=indices.device)
    capacity = block_table.shape[1] * key_cache.shape[1]
    if check and indices.numel():
        _check_paged_indices(indices, lengths, start, capacity)
    with torch.no_grad(), launching_on(indices):
        for cache in (key_cache, value_cache):
            if indices.numel() and cache.numel():
                (_move_paged_triton if path == "triton" else _move_paged)(cache, block_table, indices, lengths, start)


def _check_paged(keys: Tensor, values: Tensor, table: Tensor, indices: Tensor, lengths: Tensor | None) -> None:
    shapes = (
        f"key_cache {tuple(keys.shape)}, value_cache {tuple(values.shape)}, block_table {tuple(table.shape)}, "
        f"indices {tuple(indices.shape)}, lengths {None if lengths is None else tuple(lengths.shape)}"
    )
    if (keys.ndim, values.ndim, table.ndim, indices.ndim) != (4, 4, 2, 3):
        raise ValueError(f"{shapes}: caches must have 4 dimensions, block_table 2, indices 3")
    fits = keys.shape[:3] == values.shape[:3] and table.shape[0] == indices.shape[0]
    fits = fits and indices.shape[1] == keys.shape[2] and (lengths is None or lengths.shape == indices.shape[:1])
    if not fits:
        raise ValueError(f"{shapes} must agree in blocks, block size, heads and rows")
    if indices.dtype != torch.int64:
        raise ValueError(f"indices must be int64, not {indices.dtype}")


def _check_paged_indices(indices: Tensor, lengths: Tensor, start: int, capacity: int) -> None:
    kept = indices.shape[2]
    order = torch.arange(kept, device=indices.device)
    used = (order < lengths[:, None])[:, None].expand_as(indices)
    fits = (indices >= start + order) & (indices < capacity)
    fits[..., 1:] &= indices[..., 1:] > indices[..., :-1]
    if not bool((fits | ~used).all() & ((lengths >= 0) & (lengths <= kept)).all()):
        raise ValueError(
            f"indices must ascend in each head from at least start={start} and stay below the {capacity} tokens of the "
            f"block table, and lengths must lie in [0, {kept}]"
        )


def _move_paged(cache: Tensor, table: Tensor, indices: Tensor, lengths: Tensor, start: int) -> None:
    """Torch and CPU path: stretches of tokens, each read in full before it is written (safe as in `_move_cpu`)."""
    rows, heads, _ = indices.shape
    size = cache.shape[1]
    head = torch.arange(heads, device=cache.device)[:, None]
    step = max(_MOVE_BYTES // max(heads * cache.shape[3] * cache.element_size(), 1), 1)
    for row in range(rows):
        blocks, count = table[row].long(), int(lengths[row])
        for first in range(0, count, step):
            tokens = indices[row, :, first : min(first + step, count)]
            moved = cache[blocks[tokens // size], tokens % size, head]
            target = torch.arange(start + first, start + first + tokens.shape[1], device=cache.device)
            cache[blocks[target // size], target % size, head] = moved


@jit
@no_type_check
def gather_kernel(
    source_ptr,
    target_ptr,
    index_ptr,
    table_ptr,
    lengths_ptr,
    heads,
    kept,
    start,
    source_stride_b,
    source_stride_h,
    source_stride_t,
    source_stride_d,
    target_stride_b,
    target_stride_h,
    target_stride_t,
    target_stride_d,
    index_stride_b,
    index_stride_h,
    index_stride_j,
    table_stride,
    block_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_J: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rows ``index[j]`` of the source go to rows ``start + j`` of the target.

    Out of place each program moves BLOCK_J rows. In place one program moves all rows of its columns, tile by tile;
    nobody else touches these columns. A tile [j0, j1) reads rows >= j0 and writes rows < j1, so what it writes is read
    by no later tile, and reading a later tile early is harmless too. Within a tile every write waits for every read,
    because its mask depends on a sum over the whole tile. (A barrier alone would not do: on AMD's GPUs loads may be
    under way across it.)
    """
    row_head = tl.program_id(0).to(tl.int64)
    batch, head = row_head // heads, row_head % heads
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_width = (columns < DIM)[None, :]
    if PAGED:
        kept = tl.load(lengths_ptr + batch)
        source = source_ptr + head * source_stride_h + columns[None, :] * source_stride_d
        target = source
    else:
        source = source_ptr + batch * source_stride_b + head * source_stride_h + columns[None, :] * source_stride_d
        target = target_ptr + batch * target_stride_b + head * target_stride_h + columns[None, :] * target_stride_d
    index = index_ptr + batch * index_stride_b + head * index_stride_h
    begin = 0 if IN_PLACE else tl.program_id(2) * BLOCK_J
    end = kept if IN_PLACE else tl.minimum(begin + BLOCK_J, kept)
    for first in range(begin, end, BLOCK_J):
        order = (first + tl.arange(0, BLOCK_J)).to(tl.int64)
        used = order < end
        rows = tl.load(index + order * index_stride_j, mask=used, other=0)
        to = start + order
        inside = used[:, None] & in_width
        if PAGED:
            table = table_ptr + batch * table_stride
            from_block = tl.load(table + rows // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
            to_block = tl.load(table + to // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
            from_offset = from_block * block_stride + (rows % BLOCK_SIZE) * source_stride_t
            to_offset = to_block * block_stride + (to % BLOCK_SIZE) * source_stride_t
        else:
            from_offset = rows * source_stride_t
            to_offset = to * target_stride_t
        moved = tl.load(source + from_offset[:, None], mask=inside, other=0)
        if IN_PLACE:
            nonzero = tl.sum(tl.sum((moved != 0).to(tl.int32), axis=1), axis=0)
            inside = inside & (nonzero <= BLOCK_J * BLOCK_D)  # always true, but only known once all has been read
        tl.store(target + to_offset[:, None], moved, mask=inside)


def gather_constants(dim: int, *, in_place: bool, block_size: int | None = None) -> dict[str, int | bool]:
    """The constants `gather_kernel` is compiled with; ``block_size`` for the paged form."""
    width = min(layout.next_power_of_2(dim), _BLOCK_COLUMNS)
    return {
        "DIM": dim,
        "BLOCK_D": width,
        "BLOCK_J": min(_BLOCK_ELEMENTS // width, 256),
        "IN_PLACE": in_place,
        "PAGED": block_size is not None,
        "BLOCK_SIZE": block_size or 1,
    }


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: entries are moved bit by bit, whatever their dtype."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _move_triton(source: Tensor, target: Tensor, indices: Tensor, in_place: bool) -> None:
    batch, heads, kept = indices.shape
    source, target = _bits(source), _bits(target)
    constants = gather_constants(source.shape[3], in_place=in_place)
    tiles = 1 if in_place else -(-kept // constants["BLOCK_J"])
    gather_kernel[(batch * heads, -(-source.shape[3] // constants["BLOCK_D"]), tiles)](
        source,
        target,
        indices,
        indices,
        indices,
        heads,
        kept,
        0,
        *source.stride(),
        *target.stride(),
        *indices.stride(),
        0,
        0,
        **constants,
        num_warps=layout.NUM_WARPS,
    )


def _move_paged_triton(cache: Tensor, table: Tensor, indices: Tensor, lengths: Tensor, start: int) -> None:
    rows, heads, kept = indices.shape
    cache = _bits(cache)
    constants = gather_constants(cache.shape[3], in_place=True, block_size=cache.shape[1])
    block_stride, token_stride, head_stride, dim_stride = cache.stride()
    strides = (0, head_stride, token_stride, dim_stride)
    gather_kernel[(rows * heads, -(-cache.shape[3] // constants["BLOCK_D"]), 1)](
        cache,
        cache,
        indices,
        table.contiguous(),
        lengths.to(torch.int32),
        heads,
        kept,
        start,
        *strides,
        *strides,
        *indices.stride(),
        table.shape[1],
        block_stride,
        **constants,
        num_warps=layout.NUM_WARPS,
    )
