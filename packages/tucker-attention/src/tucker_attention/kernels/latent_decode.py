"""One new token against the latent cache: all heads are rows of one small product, so each key is read once for all.

Floor of the traffic: (r3 + s3) numbers a cached token, whatever the number of heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from icml26_shared.kernels import Path, choose_path


def latent_decode(
    q: Float[Tensor, "b h r3"],
    k: Float[Tensor, "b m r3"],
    v: Float[Tensor, "b m s3"],
    *,
    key_mask: Tensor | None = None,
    prefer: Path | None = None,
) -> Float[Tensor, "b h s3"]:
    """``softmax(q k^T) v`` for every head of one query a row.

    Args:
        q: queries [B, H, r3], scale and rotation included.
        k: cached key latents [B, M, r3].
        v: cached value latents [B, M, s3].
        key_mask: bool [B, M], True for real keys.
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        [B, H, s3] in q's dtype; 0 where no key is real.

    Raises:
        ValueError: shapes that do not fit.
    """
    fits = q.dim() == k.dim() == v.dim() == 3 and q.shape[0] == k.shape[0] == v.shape[0]
    if not fits or q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1]:
        raise ValueError(
            "shapes do not fit: latent_decode takes q [B, H, r3], k [B, M, r3], v [B, M, s3]; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if torch.compiler.is_compiling():
        return _sdpa(q, k, v, key_mask)
    path = choose_path(q, k, v, prefer=prefer)
    if path == "triton" and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        from tucker_attention.kernels.layout import WIDEST
        from tucker_attention.kernels.triton_decode import latent_decode_triton

        if max(q.shape[2], v.shape[2]) <= WIDEST and q.dtype != torch.float64:
            return latent_decode_triton(q, k, v, key_mask)
    if path == "torch" and q.device.type == "cpu":
        return latent_decode_reference(q, k, v, key_mask)
    return _sdpa(q, k, v, key_mask)


def latent_decode_reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Plain torch, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).transpose(1, 2)
    if key_mask is None:
        return (logits.softmax(-1) @ v.to(wide)).to(q.dtype)
    dead = ~key_mask.any(-1)[:, None, None]
    logits = logits.masked_fill(~key_mask[:, None], float("-inf")).masked_fill(dead, 0.0)
    return (logits.softmax(-1).masked_fill(dead, 0.0) @ v.to(wide)).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """`scaled_dot_product_attention` with the heads as queries."""
    wide = max(k.shape[-1], v.shape[-1])
    looked = F.scaled_dot_product_attention(
        F.pad(q, (0, wide - q.shape[-1])).unsqueeze(1),
        F.pad(k, (0, wide - k.shape[-1])).unsqueeze(1),
        F.pad(v, (0, wide - v.shape[-1])).unsqueeze(1),
        attn_mask=None if key_mask is None else key_mask[:, None, None, :],
        scale=1.0,
    )[:, 0, :, : v.shape[-1]]
    if key_mask is not None:
        looked = looked.masked_fill(~key_mask.any(-1)[:, None, None], 0.0)
    return looked
