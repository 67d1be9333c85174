"""Inputs that claims and benches share: length laws, packed and padded training steps, attention on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dppo.integrations.transformers import packed_attention_of, packed_logps
from dppo.kernels import PackedLayout, packed_attention
from dppo.packed import PackedRow, pack_sequences

LAWS = ("lognormal 400", "lognormal 800", "uniform 64-3000")


def lengths_of(law: str, n: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Sequence lengths: log-normal (ln 400, 0.6), (ln 800, 0.7) clipped to [16, capacity], or uniform 64–3000."""
    rng = np.random.default_rng(seed)
    if law == "uniform 64-3000":
        return np.minimum(rng.integers(64, 3001, n), capacity)
    median, sigma = {"lognormal 400": (400, 0.6), "lognormal 800": (800, 0.7)}[law]
    return np.clip(np.round(rng.lognormal(np.log(median), sigma, n)), 16, capacity).astype(np.int64)


def small_llama(seed: int = 0) -> Any:
    """A two-layer Llama, width 256, in fp32."""
    from icml26_shared.models import tiny_llama

    torch.manual_seed(seed)
    return tiny_llama(
        num_hidden_layers=2, hidden_size=256, intermediate_size=688, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, max_position_embeddings=8192,
    ).float()  # fmt: skip


class TrainingStep:
    """Forward and backward of one batch of prompt-completion pairs, packed or padded, to the same loss.

    Args:
        lengths: tokens of each sequence; the first quarter (at least 1) is the prompt.
        capacity, window: of the packer. batch_size: of the padded batches. seed: of tokens and model.
    """

    def __init__(
        self, lengths: np.ndarray, *, capacity: int = 4096, window: int = 64, batch_size: int = 8, seed: int = 0
    ) -> None:
        self.model = small_llama(seed)
        rng = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(2, 1024, (int(n),), generator=rng) for n in lengths]
        cuts = [max(1, len(t) // 4) for t in tokens]
        self.prompts = [t[:cut] for t, cut in zip(tokens, cuts, strict=True)]
        self.completions = [t[cut:] for t, cut in zip(tokens, cuts, strict=True)]
        self.capacity, self.window, self.batch_size = capacity, window, batch_size
        self.tokens = sum(len(t) for t in tokens)
        self.targets = sum(len(c) for c in self.completions)

    def packed(self) -> float:
        """Packed rows, packing included; returns the loss."""
        _, rows = pack_sequences(
            self.prompts, self.completions, capacity=self.capacity, window=self.window, share_prompts=False
        )
        total = 0.0
        with packed_attention_of(self.model):
            for row in rows:
                total += self._backward_row(row)
        self.model.zero_grad(set_to_none=True)
        return total

    def _backward_row(self, row: PackedRow) -> float:
        logps, _ = packed_logps(self.model, [row])
        loss = -torch.cat(list(logps.values())).sum() / self.targets
        loss.backward()
        return float(loss.detach())

    def padded(self) -> float:
        """Batches in arrival order, padded on the right to their longest; returns the loss."""
        total = 0.0
        for start in range(0, len(self.prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            loss = self._padded_loss(self.prompts[part], self.completions[part])
            loss.backward()
            total += float(loss.detach())
        self.model.zero_grad(set_to_none=True)
        return total

    def _padded_loss(self, prompts: list[Tensor], completions: list[Tensor]) -> Tensor:
        rows = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        width = max(map(len, rows))
        ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        starts = torch.tensor([len(p) for p in prompts])
        place = torch.arange(width)
        mask = (place < lengths[:, None]).long()
        logits = self.model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        scored = (place[1:] >= starts[:, None]) & (place[1:] < lengths[:, None])
        labels = ids[:, 1:].masked_fill(~scored, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / self.targets


def attention_inputs(
    tokens: int, mean: int, *, heads: int = 8, kv_heads: int = 2, dim: int = 64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, PackedLayout]:
    """q, k, v and a layout of segments of exponential lengths of this mean, filling exactly `tokens`."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < tokens:
        sizes.append(int(min(max(1, rng.exponential(mean)), tokens - sum(sizes))))
    torch.manual_seed(seed)
    shapes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim))
    q, k, v = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    return q, k, v, PackedLayout(torch.tensor(np.concatenate([[0], np.cumsum(sizes)])))


def attention_step(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], None]:
    """Forward and backward of packed attention."""

    def step() -> None:
        torch.autograd.grad(packed_attention(q, k, v, layout).sum(), (q, k, v))  # type: ignore[union-attr]

    return step


def dense_attention_step(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], None]:
    """The same by PyTorch's attention with a dense T×T mask."""
    mask, repeat = layout.dense_mask(), q.shape[1] // k.shape[1]

    def step() -> None:
        heads = (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
        queries, keys, values = (x.transpose(0, 1)[None] for x in heads)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        torch.autograd.grad(out.sum(), (q, k, v))

    return step
