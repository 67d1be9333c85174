"""What Tucker attention is compared with: MHA, GQA and MQA, MLA, and every projection factorised by itself.

All are modules of tokens [B, N, d] to tokens, trained from scratch, with attention by torch's fused function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class GroupedAttention(nn.Module):
    """MHA, GQA or MQA: ``2 d^2 + 2 n_KV d_H d`` parameters.

    Args:
        d_model, n_heads: d and H.
        n_kv_heads: key and value heads; H is MHA, 1 is MQA.
        causal: hide later tokens.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = n_heads, n_kv_heads or n_heads, causal
        width = d_model // n_heads
        self.query = nn.Linear(d_model, n_heads * width, bias=False)
        self.key, self.value = (nn.Linear(d_model, self.groups * width, bias=False) for _ in range(2))
        self.output = nn.Linear(n_heads * width, d_model, bias=False)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Attend."""
        q, k, v = (
            split(p(x), heads)
            for p, heads in ((self.query, self.heads), (self.key, self.groups), (self.value, self.groups))
        )
        grouped = self.heads != self.groups
        out: Tensor = self.output(
            join(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped))
        )
        return out


class LatentAttention(nn.Module):
    """MLA without positions: queries and keys with values each through a latent of d_c: ``d^2 + 5 d d_c`` parameters.

    Args:
        d_model, n_heads: d and H.
        latent: d_c of queries and of keys with values.
        causal: hide later tokens.
        separate: a latent of its own for values: d d_c more parameters.
        rope_dim: width of a decoupled rotary part of queries and of one shared key head: ``d_c H + d`` times it more.
    """

    def __init__(
        self, d_model: int, n_heads: int, latent: int, causal: bool = False, separate: bool = False, rope_dim: int = 0
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.rope_dim = n_heads, causal, rope_dim
        self.width = d_model // n_heads
        self.query_down, self.kv_down = (nn.Linear(d_model, latent, bias=False) for _ in range(2))
        self.value_down = nn.Linear(d_model, latent, bias=False) if separate else None
        self.query_up, self.key_up, self.value_up = (nn.Linear(latent, d_model, bias=False) for _ in range(3))
        self.output = nn.Linear(d_model, d_model, bias=False)
        if rope_dim:
            self.query_rope = nn.Linear(latent, n_heads * rope_dim, bias=False)
            self.key_rope = nn.Linear(d_model, rope_dim, bias=False)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Attend."""
        query_latent, latent = self.query_down(x), self.kv_down(x)
        q, k = split(self.query_up(query_latent), self.heads), split(self.key_up(latent), self.heads)
        v = split(self.value_up(latent if self.value_down is None else self.value_down(x)), self.heads)
        if self.rope_dim:
            turned = rotated(split(self.query_rope(query_latent), self.heads))
            shared = rotated(split(self.key_rope(x), 1)).expand(-1, self.heads, -1, -1)
            q, k = torch.cat([q, turned], -1), torch.cat([k, shared], -1)
        out: Tensor = self.output(join(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
        return out


class FactoredAttention(nn.Module):
    """MHA with each of Q, K, V, O a product of matrices of inner width r (as a truncated SVD): ``8 d r`` parameters.

    Args:
        d_model, n_heads: d and H.
        rank: r.
        causal: hide later tokens.
    """

    def __init__(self, d_model: int, n_heads: int, rank: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = n_heads, causal

        def thin() -> nn.Module:
            return nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_model, bias=False))

        self.query, self.key, self.value, self.output = thin(), thin(), thin(), thin()

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Attend."""
        q, k, v = (split(p(x), self.heads) for p in (self.query, self.key, self.value))
        out: Tensor = self.output(join(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
        return out


def split(x: Float[Tensor, "b n c"], heads: int) -> Float[Tensor, "b h n w"]:
    """Columns by head."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def join(x: Float[Tensor, "b h n w"]) -> Float[Tensor, "b n c"]:
    """Heads side by side."""
    return x.transpose(1, 2).flatten(2)


def rotated(x: Float[Tensor, "b h n w"]) -> Float[Tensor, "b h n w"]:
    """RoPE of a head's whole width, positions 0, 1, ..."""
    from tucker_attention.kernels.rotary import rotate

    pairs = x.shape[-1] // 2
    turns = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * 1e4 ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )
    return rotate(x, turns.cos().to(x), turns.sin().to(x), False)


def svd_truncated(matrix: Float[Tensor, "p q"], rank: int) -> Float[Tensor, "p q"]:
    """The nearest matrix of this rank, for factorising a trained model's projections one by one."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]
