"""Attention parameters and cache, by formula.

| kind   | parameters of a layer                                | cache of a token    |
| ------ | ---------------------------------------------------- | ------------------- |
| mha    | 4 d^2                                                | 2 d                 |
| gqa    | 2 d^2 + 2 n_KV d_H d                                 | 2 n_KV d_H          |
| mla    | d^2 + 5 d d_c (d_cQ = d_cKV = d_c, shared latent)    | d_c                 |
| tucker | 2 (r1 r2 r3 + H r1 + d r2 + d r3)                    | 2 r3                |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tucker_attention.ranks import factor_count

Kind = Literal["mha", "mqa", "gqa", "mla", "tucker"]


def param_count(
    kind: Kind, *, d_model: int, n_heads: int, n_kv_heads: int | None = None, latent: int | None = None,
    ranks: Sequence[int] | None = None, post_ranks: Sequence[int] | None = None, share_kv: bool = False,
    n_layers: int = 1,
) -> int:  # fmt: skip
    """Attention parameters, without biases.

    Args:
        kind: ``"mha"``, ``"mqa"``, ``"gqa"`` (needs ``n_kv_heads``), ``"mla"`` (needs ``latent``, d_c), ``"tucker"``
            (needs ``ranks``).
        d_model, n_heads: d and H.
        post_ranks: ranks of Wt; default ``ranks``.
        share_kv: Tucker only: V3 is U3, so d s3 fewer.
        n_layers: how many layers.

    Raises:
        ValueError: an unknown kind, or what it needs is missing.
    """
    d, per_layer = d_model, 0
    if kind == "mha":
        per_layer = 4 * d * d
    elif kind in ("mqa", "gqa"):
        groups = 1 if kind == "mqa" else _needed(kind, "n_kv_heads", n_kv_heads)
        per_layer = 2 * d * d + 2 * groups * (d // n_heads) * d
    elif kind == "mla":
        per_layer = d * d + 5 * d * _needed(kind, "latent", latent)
    elif kind == "tucker":
        if ranks is None:
            raise ValueError("param_count('tucker') needs ranks")
        sizes = (n_heads, d, d)
        per_layer = factor_count(ranks, sizes) + factor_count(ranks if post_ranks is None else post_ranks, sizes)
        if share_kv:
            per_layer -= d * (ranks if post_ranks is None else post_ranks)[2]
    else:
        raise ValueError(f"kind {kind!r} unknown; allowed: 'mha', 'mqa', 'gqa', 'mla', 'tucker'")
    return per_layer * n_layers


def cache_width(
    kind: Kind, *, d_model: int, n_heads: int, n_kv_heads: int | None = None, latent: int | None = None,
    ranks: Sequence[int] | None = None, post_ranks: Sequence[int] | None = None, share_kv: bool = False,
) -> int:  # fmt: skip
    """Numbers that a token leaves in the cache of one layer; arguments as in :func:`param_count`."""
    if kind == "mha":
        return 2 * d_model
    if kind in ("mqa", "gqa"):
        groups = 1 if kind == "mqa" else _needed(kind, "n_kv_heads", n_kv_heads)
        return 2 * groups * (d_model // n_heads)
    if kind == "mla":
        return _needed(kind, "latent", latent)
    if ranks is None:
        raise ValueError("cache_width('tucker') needs ranks")
    return ranks[2] + (0 if share_kv else (ranks if post_ranks is None else post_ranks)[2])


def _needed(kind: str, name: str, value: int | None) -> int:
    if value is None or value < 1:
        raise ValueError(f"param_count({kind!r}) needs {name} of at least 1, got {value}")
    return value
