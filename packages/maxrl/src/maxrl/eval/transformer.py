"""A small causal transformer for tasks with a handful of tokens: pre-norm, learned positions, tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(B, T, width) and the keys and values before it; returns the same shape, and keys and values up to here."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)))), (k, v)


class TinyTransformer(nn.Module):
    """``forward(ids (B, T)) -> logits (B, T, vocabulary)``."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits at every position."""
        return self.step(ids, None)[0]

    def step(
        self, ids: Tensor, cache: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits of the new tokens ``ids`` (B, t), one at a time after the first call, and the grown cache."""
        start = 0 if cache is None else cache[0][0].shape[2]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        grown = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, None if cache is None else cache[i])
            grown.append(kv)
        return self.norm(x) @ self.tokens.weight.T, grown


@torch.no_grad()
def sample(
    model: TinyTransformer,
    prompts: Tensor,
    rollouts: int,
    length: int,
    generator: torch.Generator,
    *,
    stop: int | None = None,
) -> Tensor:
    """``length`` sampled tokens (B * rollouts, length) after ``prompts`` (B, P), temperature 1; after ``stop`` only
    ``stop``."""
    logits, cache = model.step(prompts, None)
    probabilities = logits[:, -1].softmax(-1)
    token = torch.multinomial(probabilities, rollouts, replacement=True, generator=generator).reshape(-1, 1)
    cache = [(k.repeat_interleave(rollouts, 0), v.repeat_interleave(rollouts, 0)) for k, v in cache]
    out = [token]
    for _ in range(length - 1):
        logits, cache = model.step(token, cache)
        token = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
        if stop is not None:
            token = torch.where(out[-1] == stop, stop, token)
            if bool((token == stop).all()):
                out += [token] * (length - len(out))
                break
        out.append(token)
    return torch.cat(out, 1)


def completion_log_probs(model: TinyTransformer, prompts: Tensor, completions: Tensor) -> Tensor:
    """Log-probability of every completion token, (B, length)."""
    logits = model(torch.cat([prompts, completions[:, :-1]], 1))[:, prompts.shape[1] - 1 :]
    return torch.log_softmax(logits, -1).gather(2, completions[:, :, None]).squeeze(2)
