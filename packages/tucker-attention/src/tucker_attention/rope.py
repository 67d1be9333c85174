"""Latent RoPE: rotary positions in the r3-dimensional space that all heads share (definition 3.1, corollary 3.2.1).

``R(m)`` turns pair p of a latent of even width r by the angle ``m theta^(-2 p / r)``. Keys are rotated once, after
their projection, and each head's query in the same space, so that ``(Q_m R(m)^T)(K_n R(n)^T)^T`` depends on m - n only.
The frequencies are those of width r3, not of d_H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tucker_attention.config import TuckerConfig
from tucker_attention.kernels.rotary import Tables


def frequencies(config: TuckerConfig) -> tuple[float, ...]:
    """Radians a position, one a pair; zero for the pairs beyond ``rope_fraction``, which do not rotate."""
    pairs = config.rope_width // 2
    if config.rope_frequencies is not None:
        return config.rope_frequencies
    turning = round(pairs * config.rope_fraction)
    return tuple(config.rope_theta ** (-p / turning) if p < turning else 0.0 for p in range(pairs))


def angles(
    positions: Int[Tensor, "b n"], inverse_frequencies: Float[Tensor, " p"], scale: float = 1.0
) -> tuple[Float[Tensor, "b n p"], Float[Tensor, "b n p"]]:
    """Cosines and sines of ``m f_p``.

    Args:
        positions: positions m [B, N].
        inverse_frequencies: f [P], radians a position, float64 so that long positions stay exact.
        scale: factor on both.

    Returns:
        cos and sin [B, N, P], float64 on devices that have it, else float32.
    """
    turned = positions[..., None].to(inverse_frequencies.dtype) * inverse_frequencies
    return turned.cos() * scale, turned.sin() * scale


class Angles(NamedTuple):
    """Angles of the new queries and of the new keys (each in the fields of queries), and the last position of a row."""

    query: Tables
    keys: Tables
    last: Tensor

    def of_cache(self, config: TuckerConfig, m: int, k: Tensor) -> Tables:
        """With a shared latent the cache holds keys unrotated: the angles of queries and of all ``m`` cached keys."""
        if self.keys.cos_q.shape[1] == m:
            return self.query._replace(cos_k=self.keys.cos_q, sin_k=self.keys.sin_q)
        positions = self.last[:, None] - torch.arange(m - 1, -1, -1, device=k.device)[None]
        made = tables(config, positions, k)
        return self.query._replace(cos_k=made.cos_q, sin_k=made.sin_q)


def tables(config: TuckerConfig, positions: Tensor, like: Tensor) -> Tables:
    """Angles at positions [1 or B, N], computed in float64, in the dtype of ``like`` or float32 if that is wider."""
    exact = torch.float32 if like.device.type == "mps" else torch.float64
    inverse = torch.tensor(frequencies(config), dtype=exact, device=like.device)
    cos, sin = angles(positions, inverse, config.rope_scale)
    kept = torch.promote_types(like.dtype, torch.float32)
    return Tables(cos.to(kept), sin.to(kept), None, None, config.rope_interleaved)


def new_angles(config: TuckerConfig, positions: Tensor | None, keys: int, past: int, x: Tensor) -> Angles | None:
    """Angles of new tokens; None for a layer without RoPE.

    Args:
        config: of the layer.
        positions: [N], [B, N] or None, where they go on from the ``past`` cached tokens.
        keys: number of new keys: N, or that of the context, which is at 0, 1, ...
        past: cached tokens.
        x: the new tokens [B, N, d].

    Raises:
        ValueError: positions of another shape, or for a layer without RoPE.
    """
    n = x.shape[1]
    if config.rope is None:
        if positions is not None:
            raise ValueError("positions were given to a layer without RoPE; set rope='latent' or leave them out")
        return None
    if positions is None:
        positions = torch.arange(past, past + n, device=x.device)
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.shape[-1] != n or positions.shape[0] not in (1, x.shape[0]) or positions.dim() != 2:
        raise ValueError(f"positions must be [{n}] or [{x.shape[0]}, {n}], one a token, got {tuple(positions.shape)}")
    query = tables(config, positions, x)
    same = keys == n
    key_tables = query if same else tables(config, torch.arange(keys, device=x.device).unsqueeze(0), x)
    return Angles(query, key_tables, positions[:, -1] if n else positions.new_zeros(1))
