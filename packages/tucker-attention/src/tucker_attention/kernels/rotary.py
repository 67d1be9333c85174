"""Rotate pairs of coordinates by angles: ``(a, b) -> (a cos - b sin, b cos + a sin)``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """Cosines and sines, float32 or wider, [B or 1, N, pairs]: of queries, and of keys that are not rotated already.

    ``interleaved``: which coordinates make a pair, see :func:`rotate`.
    """

    cos_q: Tensor
    sin_q: Tensor
    cos_k: Tensor | None = None
    sin_k: Tensor | None = None
    interleaved: bool = False

    def rotate_queries(self, q: Tensor) -> Tensor:
        """Queries [B, H, N, r3], rotated."""
        return rotate(q, self.cos_q[:, None], self.sin_q[:, None], self.interleaved)

    def rotate_keys(self, k: Tensor) -> Tensor:
        """Keys [B, M, r3], rotated if there are angles for them."""
        if self.cos_k is None or self.sin_k is None:
            return k
        return rotate(k, self.cos_k, self.sin_k, self.interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the last dimension of ``x``.

    Args:
        x: [..., N, 2 P].
        cos, sin: [..., N, P], broadcast against x's pairs.
        interleaved: pair p is (2 p, 2 p + 1), else (p, p + P).

    Returns:
        Like x, in its dtype; the arithmetic is in the wider of the two dtypes.
    """
    wide = torch.promote_types(x.dtype, cos.dtype)
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b, cos, sin = a.to(wide), b.to(wide), cos.to(wide), sin.to(wide)
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return both.to(x.dtype)
