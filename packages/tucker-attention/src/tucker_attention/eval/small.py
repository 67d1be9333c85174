"""The small models and data on which attentions are compared, trained alike.

* Digits ViT: scikit-learn's 8 x 8 digits as 16 patches of 2 x 2; d 64, 3 pre-norm blocks, 8 heads; 1200 train, 597
  test; 300 steps of 64, AdamW 2e-3 with cosine decay, input noise 0.15.
* Byte language model on the sources of Python's standard library: d 128, 4 blocks, 8 heads, 128 bytes of context; 1500
  steps of 8, AdamW 1e-3 with cosine decay after 100 steps of warm-up; loss over 64 fixed held-out windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.data.text import standard_library
from icml26_shared.errors import require
from tucker_attention.attention import TuckerAttention
from tucker_attention.baselines import FactoredAttention, GroupedAttention, LatentAttention
from tucker_attention.config import TuckerConfig

VIT = {"d": 64, "heads": 8, "depth": 3}
LM = {"d": 128, "heads": 8, "depth": 4}
VIT_STEPS, LM_STEPS, CONTEXT = 300, 1500, 128


@dataclass(frozen=True)
class Kind:
    """An attention to train: ``gqa`` (size: key heads), ``mla`` (latent), ``svd`` (rank), ``tucker`` (ranks)."""

    name: str
    size: int | tuple[int, int, int]

    def build(self, d: int, heads: int, depth: int, causal: bool) -> nn.Module:
        """The layer, freshly initialised."""
        if self.name == "tucker" and isinstance(self.size, tuple):
            return TuckerAttention(TuckerConfig(d, heads, self.size, causal=causal, n_layers=depth))
        if not isinstance(self.size, int):
            raise ValueError(f"{self.name} takes one size, got {self.size}")
        classes: dict[str, Callable[..., nn.Module]] = {
            "gqa": GroupedAttention, "mla": LatentAttention, "svd": FactoredAttention,
        }  # fmt: skip
        return classes[self.name](d, heads, self.size, causal=causal)


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around."""

    def __init__(self, kind: Kind, d: int, heads: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = kind.build(d, heads, depth, causal)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, d]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Patches or bytes in, classes or next bytes out.

    Args:
        kind: the attention.
        patch: width of a patch, or 0 for bytes.
        classes: outputs.
        length: tokens.
        d, heads, depth: sizes.
    """

    def __init__(self, kind: Kind, patch: int, classes: int, length: int, d: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Linear(patch, d) if patch else nn.Embedding(classes, d)
        self.pooled = bool(patch)
        self.positions = nn.Parameter(torch.randn(length, d) * 0.02)
        self.blocks = nn.ModuleList(Block(kind, d, heads, depth, not patch) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes], or [B, N, classes] of a language model."""
        x = self.embed(x)
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.pooled else x)

    @property
    def attention_parameters(self) -> int:
        """Of one block."""
        return sum(p.numel() for name, p in self.named_parameters() if name.startswith("blocks.0.attention."))


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Patches [1200, 16, 4] in [-1, 1] and labels to train on, patches [597, 16, 4] and labels to test on."""
    raw = require("sklearn.datasets", "demo", distribution="tucker-attention").load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32).reshape(-1, 4, 2, 4, 2) / 8 - 1
    patches = images.transpose(2, 3).reshape(-1, 16, 4)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return patches[train], labels[train], patches[test], labels[test]


def train_digits(
    kind: Kind, seed: int, steps: int = VIT_STEPS, on_step: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Accuracy on the test images, and attention parameters of a block."""
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = Transformer(kind, 4, 10, 16, VIT["d"], VIT["heads"], VIT["depth"])
    draws = torch.Generator().manual_seed(seed)  # every attention sees the same batches and noise
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        picks = torch.randint(0, len(x), (64,), generator=draws)
        noisy = x[picks] + 0.15 * torch.randn(64, 16, 4, generator=draws)
        loss = F.cross_entropy(model(noisy), y[picks])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step()
    with torch.no_grad():
        accuracy = float((model.eval()(test_x).argmax(-1) == test_y).float().mean())
    return {"accuracy": accuracy, "parameters": model.attention_parameters}


@lru_cache(maxsize=1)
def stdlib_bytes(size: int = 2_000_000) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, in order of their names: to train on, and the last tenth to test on."""
    text = standard_library(size, packages=False)
    if len(text) < 100_000:
        raise ValueError(f"the standard library has only {len(text)} bytes of Python sources; this needs 100000")
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def windows(text: Tensor, starts: Tensor) -> Tensor:
    """[B, CONTEXT + 1] bytes."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def train_lm(kind: Kind, seed: int, steps: int = LM_STEPS, on_step: Callable[[], None] | None = None) -> dict[str, Any]:
    """Cross-entropy (nats a byte) on held-out windows, and attention parameters of a block."""
    train, test = stdlib_bytes()
    torch.manual_seed(seed)
    model = Transformer(kind, 0, 256, CONTEXT, LM["d"], LM["heads"], LM["depth"])
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    warm = min(100, max(1, steps // 4))
    for step in range(steps):
        rate = 1e-3 * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = windows(train, torch.randint(0, len(train) - CONTEXT - 1, (8,), generator=draws))
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step()
    held = windows(test, torch.linspace(0, len(test) - CONTEXT - 1, 64).long())
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten())
    return {"loss": float(loss), "parameters": model.attention_parameters}
