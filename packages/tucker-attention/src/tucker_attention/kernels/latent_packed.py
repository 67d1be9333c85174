"""Latent attention over packed sequences: the tokens of all stand one after the other, without padding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from icml26_shared.kernels import Path, choose_path
from tucker_attention.kernels.latent_attention import check_shapes, fits_triton, latent_attention
from tucker_attention.kernels.rotary import Tables


def latent_attention_packed(
    q2: Float[Tensor, "n r2"],
    t: Float[Tensor, "h r2 r3"],
    k: Float[Tensor, "m r3"],
    v: Float[Tensor, "m s3"],
    tt: Float[Tensor, "h s2 s3"],
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    rotary: Tables | None = None,
    prefer: Path | None = None,
) -> Float[Tensor, "n s2"]:
    """`latent_attention` of each sequence with itself.

    Args:
        q2, k, v: tokens of all sequences, one after the other.
        t, tt: see `latent_attention`.
        cu_seqlens: whole numbers [S + 1], where the sequences begin and the last one ends: 0, l_1, l_1 + l_2, ..., n.
        cu_seqlens_k: the same of the keys; default those of the queries.
        causal: within a sequence, query i sees keys up to i + (its keys) - (its queries).
        rotary: angles [1, n, pairs] and, where keys are to be turned, [1, m, pairs].
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        [n, s2] in q2's dtype; 0 for queries of a sequence without keys.

    Raises:
        ValueError: shapes or boundaries that do not fit.
    """
    check_shapes(*(x[None] if x.dim() == 2 else x for x in (q2, t, k, v, tt)))
    cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    starts_q, starts_k = _boundaries("cu_seqlens", cu_seqlens, len(q2)), _boundaries("cu_seqlens_k", cu_k, len(k))
    if len(starts_q) != len(starts_k):
        raise ValueError(f"{len(starts_q) - 1} sequences of queries, but {len(starts_k) - 1} of keys")
    if len(q2) == 0 or len(k) == 0:
        return q2.new_zeros(len(q2), tt.shape[1])
    if choose_path(q2, k, v, prefer=prefer) == "triton" and fits_triton(q2, t, v):
        from tucker_attention.kernels.triton_attention import Rows, attend_rows

        rows = Rows.of_packed(cu_seqlens.to(q2.device), cu_k.to(q2.device))
        return attend_rows(q2, t, k, v, tt, rows, None, causal, rotary)
    parts = []
    for i in range(len(starts_q) - 1):
        a, b, c, d = starts_q[i], starts_q[i + 1], starts_k[i], starts_k[i + 1]
        turned = None if rotary is None else _of_sequence(rotary, slice(a, b), slice(c, d))
        one = q2[None, a:b], t, k[None, c:d], v[None, c:d], tt
        if a == b or c == d:
            parts.append(q2.new_zeros(b - a, tt.shape[1]))
        else:
            parts.append(latent_attention(*one, causal=causal, rotary=turned, prefer=prefer)[0])
    return torch.cat(parts)


def _boundaries(name: str, cuts: Tensor, tokens: int) -> list[int]:
    whole = cuts.dim() == 1 and len(cuts) >= 2 and not cuts.is_floating_point() and cuts.dtype != torch.bool
    places = cuts.tolist() if whole else []
    if not whole or places[0] != 0 or places[-1] != tokens or sorted(places) != places:
        raise ValueError(
            f"{name} must be whole numbers from 0 to {tokens} that do not decrease, got {cuts.dtype} "
            f"{cuts.tolist() if cuts.numel() <= 16 else tuple(cuts.shape)}"
        )
    return places


def _of_sequence(rotary: Tables, queries: slice, keys: slice) -> Tables:
    cos_k, sin_k = (None if x is None else x[:, keys] for x in (rotary.cos_k, rotary.sin_k))
    return Tables(rotary.cos_q[:, queries], rotary.sin_q[:, queries], cos_k, sin_k, rotary.interleaved)
