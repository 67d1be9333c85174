"""Attention of all heads over one shared latent: queries are formed, compared, and contracted to the output's rank.

    Q_h = q2 T_h,   A_h = softmax(Q_h k^T, masked),   out2 = sum_h A_h v Tt_h^T

It is MQA with key width r3 and value width s3. Floor of the traffic of a block of queries: r2 numbers a query in, s2
out, and r3 + s3 numbers a key once for all heads; with the contraction fused, no A_h v of H s3 numbers a query is
written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from icml26_shared.kernels import Path, choose_path
from tucker_attention.kernels.masks import combine_masks
from tucker_attention.kernels.rotary import Tables

# Below this many numbers, queries and values of all heads are formed at once; above, this many columns at a time.
_ALL_HEADS, _COLUMNS = 2**18, 256


def latent_attention(
    q2: Float[Tensor, "b n r2"],
    t: Float[Tensor, "h r2 r3"],
    k: Float[Tensor, "b m r3"],
    v: Float[Tensor, "b m s3"],
    tt: Float[Tensor, "h s2 s3"],
    *,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    rotary: Tables | None = None,
    dropout: float = 0.0,
    prefer: Path | None = None,
) -> Float[Tensor, "b n s2"]:
    """Tucker attention between the factors U2 and V2.

    Args:
        q2: queries in their latent, [B, N, r2].
        t: the cores of the logits, scale included, [H, r2, r3].
        k: key latents [B, M, r3].
        v: value latents [B, M, s3].
        tt: the cores of the output [H, s2, s3].
        mask: [1 or B, 1 or H, N, M], bool (True: may look) or additive.
        key_mask: bool [B, M], True for real keys.
        causal: query i sees keys up to i + M - N.
        rotary: angles; queries (after t) and keys are rotated by them.
        dropout: share of the attention weights to drop.
        prefer: path, see `icml26_shared.kernels.choose_path`. Masks that are not causal or key masks, and dropout, take
            the path of `scaled_dot_product_attention` on every device.

    Returns:
        out2 [B, N, s2] in q2's dtype. A query that may look at nothing gets 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shapes(q2, t, k, v, tt)
    if torch.compiler.is_compiling():
        return _sdpa(q2, t, k, v, tt, mask, key_mask, causal, rotary, dropout)
    path = choose_path(q2, k, v, prefer=prefer)
    if path == "triton" and mask is None and dropout == 0.0 and fits_triton(q2, t, v):
        from tucker_attention.kernels.triton_attention import latent_attention_triton

        return latent_attention_triton(q2, t, k, v, tt, key_mask, causal, rotary)
    if path == "torch" and dropout == 0.0 and q2.device.type == "cpu":
        return latent_attention_reference(q2, t, k, v, tt, mask, key_mask, causal, rotary)
    return _sdpa(q2, t, k, v, tt, mask, key_mask, causal, rotary, dropout)


def latent_attention_reference(
    q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor, mask: Tensor | None = None, key_mask: Tensor | None = None,
    causal: bool = False, rotary: Tables | None = None,
) -> Tensor:  # fmt: skip
    """Plain torch, in float32 or wider, with all logits in memory."""
    wide = torch.promote_types(q2.dtype, torch.float32)
    q = torch.einsum("bnr,hrk->bhnk", q2.to(wide), t.to(wide))
    key = k.to(wide)
    if rotary is not None:
        q, key = rotary.rotate_queries(q), rotary.rotate_keys(key)
    logits = torch.einsum("bhnk,bmk->bhnm", q, key)
    combined = combine_masks(mask, key_mask, causal, q2.shape[1], k.shape[1], k.device)
    if combined is not None:
        logits = (
            logits.masked_fill(~combined, float("-inf"))
            if combined.dtype == torch.bool
            else logits + combined.to(logits.dtype)
        )
    dead = (logits == float("-inf")).all(-1, keepdim=True)
    weights = logits.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    heads = torch.einsum("bhnm,bms->bhns", weights, v.to(wide))
    return torch.einsum("bhns,hts->bnt", heads, tt.to(wide)).to(q2.dtype)


def _sdpa(
    q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor, mask: Tensor | None, key_mask: Tensor | None,
    causal: bool, rotary: Tables | None, dropout: float,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` with one key head, expanded without a copy; some heads at a time."""
    b, n, _ = q2.shape
    heads, m = t.shape[0], k.shape[1]
    if rotary is not None:
        k = rotary.rotate_keys(k)
    key_width, value_width = k.shape[-1], v.shape[-1]
    wide = max(key_width, value_width)  # the fused kernels want keys and values of one width
    plain_causal = causal and n == m and mask is None and key_mask is None
    combined = None if plain_causal else combine_masks(mask, key_mask, causal, n, m, k.device)
    if combined is not None and combined.dtype != torch.bool:
        combined = combined.to(q2.dtype)
    dead = None if combined is None else _looks_at_nothing(combined)
    key = F.pad(k, (0, wide - key_width)).unsqueeze(1)
    value = F.pad(v, (0, wide - value_width)).unsqueeze(1)
    chunk = heads_at_once(b, n, heads, key_width + value_width)
    out: Tensor | None = None
    for start in range(0, heads, chunk):
        stop = min(heads, start + chunk)
        q = torch.matmul(q2.unsqueeze(1), t[start:stop])
        if rotary is not None:
            q = rotary.rotate_queries(q)
        few = stop - start
        looked = F.scaled_dot_product_attention(
            F.pad(q, (0, wide - key_width)),
            key.expand(b, few, m, wide),
            value.expand(b, few, m, wide),
            attn_mask=_heads_of(combined, start, stop),
            dropout_p=dropout,
            is_causal=plain_causal,
            scale=1.0,
        )[..., :value_width]
        if dead is not None:
            looked = looked.masked_fill(dead if dead.shape[1] == 1 else dead[:, start:stop], 0.0)
        # sum over heads and values in one product: [B, N, h s3] x [h s3, s2]
        rows = looked.transpose(1, 2).reshape(b * n, few * value_width)
        columns = tt[start:stop].transpose(1, 2).reshape(few * value_width, tt.shape[1])
        out = rows @ columns if out is None else torch.addmm(out, rows, columns)
    if out is None:
        raise ValueError("latent_attention needs at least one head")
    return out.view(b, n, tt.shape[1])


def heads_at_once(b: int, n: int, heads: int, columns: int) -> int:
    """Heads whose queries and values, ``columns`` numbers a token, are in memory at a time."""
    if b * n * heads * columns <= _ALL_HEADS:
        return heads
    return min(heads, max(1, _COLUMNS // columns))


def _heads_of(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
    return mask if mask is None or mask.shape[1] == 1 else mask[:, start:stop]


def _looks_at_nothing(mask: Tensor) -> Tensor:
    """bool [.., N, 1]: queries without a single key."""
    blocked = ~mask if mask.dtype == torch.bool else mask == float("-inf")
    return blocked.all(-1, keepdim=True)


def check_shapes(q2: Tensor, t: Tensor, k: Tensor, v: Tensor, tt: Tensor) -> None:
    """ValueError for shapes that do not fit."""
    given = f"q2 {tuple(q2.shape)}, t {tuple(t.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, tt {tuple(tt.shape)}"
    if [x.dim() for x in (q2, t, k, v, tt)] != [3] * 5:
        raise ValueError(f"latent_attention takes five tensors of three dimensions, got {given}")
    fits = (
        q2.shape[0] == k.shape[0] == v.shape[0]
        and q2.shape[2] == t.shape[1]
        and t.shape[2] == k.shape[2]
        and k.shape[1] == v.shape[1]
        and tt.shape[2] == v.shape[2]
        and t.shape[0] == tt.shape[0]
    )
    if not fits:
        raise ValueError(
            "shapes do not fit: latent_attention takes q2 [B, N, r2], t [H, r2, r3], k [B, M, r3], v [B, M, s3], "
            f"tt [H, s2, s3]; got {given}"
        )


def fits_triton(q2: Tensor, t: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these dtypes and widths."""
    from tucker_attention.kernels.layout import WIDEST

    return q2.dtype in (torch.float32, torch.float16, torch.bfloat16) and max(t.shape[2], v.shape[-1]) <= WIDEST
