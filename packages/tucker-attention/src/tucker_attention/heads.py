"""Between latents and heads, in cores that keep every head's two thin matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def heads_of(latent: Float[Tensor, "b n r"], maps: Tensor | None, heads: int) -> Float[Tensor, "b h n w"]:
    """Each head's view of a latent: times its map [H, r, w], or, without maps, its own w columns."""
    if maps is not None:
        return torch.matmul(latent.unsqueeze(1), maps)
    b, n, columns = latent.shape
    return latent.view(b, n, heads, columns // heads).transpose(1, 2)


def merge_heads(looked: Float[Tensor, "b h n w"], maps: Tensor | None) -> Float[Tensor, "b n s"]:
    """The heads' values in the output's latent: sum over heads of values times map^T [w, s], or side by side."""
    b, heads, n, width = looked.shape
    rows = looked.transpose(1, 2).reshape(b, n, heads * width)
    return rows if maps is None else rows @ maps.transpose(1, 2).reshape(heads * width, maps.shape[1])


def selector(rank: int, heads: int, width: int, like: Tensor) -> Float[Tensor, "h r w"]:
    """The maps that pick each head's own columns, [H, H w, w]."""
    return torch.eye(rank, dtype=like.dtype, device=like.device).view(rank, heads, width).transpose(0, 1)
