"""A diffusion transformer small enough to train in a minute, with the parameter names of DiT's own checkpoints.

W. Peebles and S. Xie, "Scalable diffusion models with transformers" (2023): patches, adaLN-Zero, noise prediction. 8 x
8 images, patch 2, 16 tokens, width 64, 3 blocks, 4 heads; 1000 steps with linear beta from 1e-4 to 0.02; DDIM sampling
with classifier-free guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMESTEPS = 1000


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection, as in timm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, d] to [b, t, d]."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d]."""
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """A transformer block with adaLN-Zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens [b, t, d] under the condition [b, d]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a[:, None] * self.attn(_modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m[:, None] * self.mlp(_modulate(self.norm2(x), shift_m, scale_m))  # type: ignore[no-any-return]


class TimestepEmbedder(nn.Module):
    """Sinusoids, then two layers."""

    def __init__(self, dim: int, frequencies: int = 64) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        """[b] to [b, d]."""
        half = self.frequencies // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angles = t[:, None].float() * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1))  # type: ignore[no-any-return]


class LabelEmbedder(nn.Module):
    """One vector a class, and one for no class, which stands in at random while training."""

    def __init__(self, classes: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.classes, self.dropout = classes, dropout
        self.embedding_table = nn.Embedding(classes + 1, dim)

    def forward(self, y: Tensor) -> Tensor:
        """[b] to [b, d]."""
        if self.training and self.dropout:
            y = torch.where(torch.rand(y.shape[0], device=y.device) < self.dropout, self.classes, y)
        return self.embedding_table(y)  # type: ignore[no-any-return]


class FinalLayer(nn.Module):
    """adaLN and the projection to pixels."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """[b, t, d] to [b, t, out]."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(_modulate(self.norm_final(x), shift, scale))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """Patches by a strided convolution."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, h, w] to [b, t, d]."""
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class TinyDiT(nn.Module):
    """``model(x, t, y)`` predicts the noise in images [b, c, h, w] at steps t [b] of classes y [b] (last: no class).

    The defaults are the tiny model on digits; with DiT's own sizes it reads DiT's own checkpoints
    (:func:`dit_factory`).
    """

    def __init__(
        self,
        size: int = 8,
        patch: int = 2,
        dim: int = 64,
        depth: int = 3,
        heads: int = 4,
        classes: int = 10,
        channels: int = 1,
        out_channels: int | None = None,
        frequencies: int = 64,
    ) -> None:
        super().__init__()
        self.patch, self.grid, self.classes = patch, size // patch, classes
        self.channels, self.out_channels = channels, out_channels or channels
        self.x_embedder = PatchEmbed(channels, patch, dim)
        self.t_embedder = TimestepEmbedder(dim, frequencies)
        self.y_embedder = LabelEmbedder(classes, dim, 0.1)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2, dim))
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.final_layer = FinalLayer(dim, patch * patch * self.out_channels)
        nn.init.normal_(self.pos_embed, std=0.02)
        zeroed: list[Any] = [m.adaLN_modulation[1] for m in self.modules() if isinstance(m, Block | FinalLayer)]
        for layer in [*zeroed, self.final_layer.linear]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predicted noise, of x's shape."""
        tokens = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            tokens = block(tokens, c)
        p, g, channels = self.patch, self.grid, self.out_channels
        patches = self.final_layer(tokens, c).reshape(-1, g, g, p, p, channels)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, g * p, g * p)  # type: ignore[no-any-return]


def dit_factory(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], TinyDiT]:
    """A function that makes the model of a DiT checkpoint, its sizes read from the shapes of its tensors.

    Heads are not among these: width 1152 has 16, other widths have heads of 64, and below 256 of 16.

    Raises:
        ValueError: these are not the tensors of a DiT.
    """
    try:
        dim, channels, patch, _ = shapes["x_embedder.proj.weight"]
        tokens = shapes["pos_embed"][1]
        classes = shapes["y_embedder.embedding_table.weight"][0] - 1
        frequencies = shapes["t_embedder.mlp.0.weight"][1]
        out_channels = shapes["final_layer.linear.weight"][0] // patch**2
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"this is no checkpoint of a DiT: {type(error).__name__} {error}") from None
    depth = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")), default=-1)
    heads = 16 if dim == 1152 else dim // (64 if dim >= 256 else 16)
    size = math.isqrt(tokens) * patch
    return lambda: TinyDiT(size, patch, dim, depth, max(heads, 1), classes, channels, out_channels, frequencies)


def alphas_bar() -> Tensor:
    """``prod (1 - beta)`` of the 1000 steps, float32."""
    beta = torch.linspace(1e-4, 0.02, TIMESTEPS, dtype=torch.float64)
    return torch.cumprod(1 - beta, 0).float()


def add_noise(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """``sqrt(abar) x + sqrt(1 - abar) noise``."""
    abar = alphas_bar()[t].reshape(-1, *[1] * (x.dim() - 1))
    return abar.sqrt() * x + (1 - abar).sqrt() * noise


@torch.no_grad()
def sample(model: nn.Module, labels: Tensor, *, steps: int = 25, guidance: float = 1.5, seed: int = 0) -> Tensor:
    """Images [b, 1, 8, 8] in [-1, 1] by deterministic DDIM with classifier-free guidance."""
    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), 1, 8, 8, generator=generator)
    abar, nothing = alphas_bar(), torch.full_like(labels, 10)
    times = torch.linspace(TIMESTEPS - 1, 0, steps).round().long()
    for i, t in enumerate(times):
        both = torch.full((2 * len(labels),), int(t))
        eps = model(torch.cat([x, x]), both, torch.cat([labels, nothing]))
        with_class, without = eps.chunk(2)
        eps = without + guidance * (with_class - without)
        now = abar[t]
        clean = ((x - (1 - now).sqrt() * eps) / now.sqrt()).clamp(-1, 1)
        eps = (x - now.sqrt() * clean) / (1 - now).sqrt()
        then = abar[times[i + 1]] if i + 1 < len(times) else torch.tensor(1.0)
        x = then.sqrt() * clean + (1 - then).sqrt() * eps
    model.train(training)
    return x.clamp(-1, 1)
