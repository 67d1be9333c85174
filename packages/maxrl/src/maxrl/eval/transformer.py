"""A small causal transformer for tasks with a handful of tokens: pre-norm, learned positions, tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Cache:
    """Keys and values (B, heads, T, width) of one block. With ``room`` they stand in a buffer that ``room`` more tokens
    fit into, and grow in place; that is for sampling, without a graph."""

    def __init__(self, k: Tensor, v: Tensor, room: int = 0) -> None:
        self.k, self.v, self.length = k, v, k.shape[2]
        self._room = room
        if room:
            b, heads, _, width = k.shape
            self.k, self.v = (x.new_empty(b, heads, self.length + room, width) for x in (k, v))
            self.k[:, :, : self.length], self.v[:, :, : self.length] = k, v

    def extended(self, k: Tensor, v: Tensor) -> Cache:
        """The cache with ``k`` and ``v`` after what it holds."""
        if not self._room:
            return Cache(torch.cat([self.k, k], 2), torch.cat([self.v, v], 2))
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values up to here."""
        return self.k[:, :, : self.length], self.v[:, :, : self.length]

    def of(self, rows: Tensor, room: int = 0) -> Cache:
        """The cache of the given rows (with repetitions)."""
        k, v = self.seen()
        return Cache(k[rows], v[rows], room)


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, width) and the cache before it; returns the same shape, and the cache up to here."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        cache = Cache(k, v) if past is None else past.extended(k, v)
        k, v = cache.seen()
        # After a cache, a new token sees all that came before it and the new ones up to itself.
        mask = None if past is None or t == 1 else torch.ones(t, k.shape[2], dtype=torch.bool).tril(k.shape[2] - t)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)))), cache


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

    def step(self, ids: Tensor, past: list[Cache] | None) -> tuple[Tensor, list[Cache]]:
        """Logits of the new tokens ``ids`` (B, t), and the grown cache, one a block."""
        start = 0 if past is None else past[0].length
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        grown = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if past is None else past[i])
            grown.append(cache)
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
    owner = torch.arange(prompts.shape[0]).repeat_interleave(rollouts)
    cache = [one.of(owner, room=length) for one in cache]
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


def completion_log_probs(
    model: TinyTransformer, prompts: Tensor, completions: Tensor, owner: Tensor | None = None
) -> Tensor:
    """Log-probability of every completion token, (B, length); arguments as in :func:`completion_log_distributions`."""
    log_probs = completion_log_distributions(model, prompts, completions, owner)
    return log_probs.gather(2, completions[:, :, None]).squeeze(2)


def completion_log_distributions(
    model: TinyTransformer, prompts: Tensor, completions: Tensor, owner: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the whole vocabulary at every completion token, (B, length, vocabulary).

    ``prompts`` (P, L), ``completions`` (B, length >= 1); ``owner`` (B,) is the prompt of each completion, default one
    completion a prompt. A prompt is read once, however many completions it has.
    """
    owner = torch.arange(completions.shape[0]) if owner is None else owner
    logits, cache = model.step(prompts, None)
    logits = logits[owner, -1:]
    if completions.shape[1] > 1:
        grown, _ = model.step(completions[:, :-1], [one.of(owner) for one in cache])
        logits = torch.cat([logits, grown], 1)
    return torch.log_softmax(logits, -1)
