"""A LLaMA-style language model: RMS norms, rotary positions, SwiGLU, no biases, an untied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the default is the small reference."""

    vocabulary: int = 128
    width: int = 64
    layers: int = 4
    heads: int = 4
    ffn: int = 160
    length: int = 64


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, T, width]; cos and sin [T, head / 2]."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, T, width]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward with norms before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.width, 1e-5), nn.RMSNorm(shape.width, 1e-5)
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, T, width]."""
        x = x + self.self_attn(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """The model. Weights are normal with spread 0.02, those that write into the residual stream
    ``0.02 / sqrt(2 layers)``.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02
                nn.init.normal_(parameter, std=spread, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, T, vocabulary] of tokens [batch, T]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross entropy, nats a token, of windows [batch, T + 1]."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
