# mypy: disable-error-code="name-defined"
"""Masks of tiles in Triton, with few of them alive at a time.

On AMD a comparison of a whole tile takes a pair of scalar registers for every number a thread holds, and those are few:
columns are compared only where a width is padded, rows behind the last are read from the last, and who may look at whom
is one comparison of two vectors.
"""

from __future__ import annotations

from icml26_shared.kernels import jit, triton_language

tl = triton_language()

NEVER = tl.constexpr(2**31 - 1)  # the place of a key that nobody sees


@jit
def with_columns(rows, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``rows`` (a mask that broadcasts) and the columns below WIDTH, which are all of them when it is PADDED."""
    kept = rows
    if WIDTH != PADDED:
        kept = rows & (column < WIDTH)
    return kept


@jit
def load_columns(place, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers at ``place``, 0 in the columns from WIDTH on; the rows must all be there (clamp their indices)."""
    if WIDTH == PADDED:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=column < WIDTH, other=0.0)
    return found


@jit
def key_places(key, k_len, mask_ptr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of keys, NEVER for those outside the sequence and those masked out."""
    real = key < k_len
    if MASKED:
        real = real & (tl.load(mask_ptr + key, mask=real, other=0) != 0)
    return tl.where(real, key, NEVER)


@jit
def last_seen(row, q_len, k_len, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last key that each query may see: -1 (none) for rows outside the sequence."""
    if CAUSAL:
        last = row + k_len - q_len
    else:
        last = row * 0 + k_len
    return tl.where(row < q_len, last, -1)
