"""Shared by the tests of layerwise-lr: run-time shape checks, hypothesis settings, threads, small models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shape annotations of these modules are checked at run time. Kernels are left out: Triton reads their source.
install_import_hook([f"layerwise_lr.{name}" for name in ("tail", "spectra")], "beartype.beartype")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """In every test of this package."""


def _make_model(seed: int = 0, width: int = 64, blocks: int = 2, vocabulary: int = 100):
    """An embedding, blocks of a square and two oblong matrices with norms, and a head of its own."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.mix = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 2 * width)
            self.down = nn.Linear(2 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.mix(self.norm(x)))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model()
        # Spectra that differ: columns of the square matrices fall off, each at its own pace.
        for index, layer in enumerate(model.layers):
            falling = torch.arange(1, width + 1, dtype=torch.float32) ** -(0.4 + 0.3 * index)
            layer.mix.weight.data *= falling
    return model


@pytest.fixture
def model():
    return _make_model()


@pytest.fixture
def make_model():
    """The function that makes such a model."""
    return _make_model


@pytest.fixture
def train_step():
    """The function that takes a training step."""
    return _train_step


def _train_step(model, optimizer, seed: int) -> float:
    """Forward, backward and optimizer step on random tokens; returns the loss."""
    import torch

    tokens = torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())
