"""The tiny-DiT protocol on scikit-learn's digits: train, quantise, train on, and judge the samples.

FP training 2500 steps (AdamW 3e-3, cosine, batch 64, EMA); QAT from that checkpoint (AdamW 1e-3, 250 steps, batch 64,
EMA 0.98). Validation: noise-prediction error on 1024 fixed (image, step, noise) triples. Samples: 300, 25 DDIM steps,
guidance 1.5; Frechet distance of 32 penultimate features of a small CNN, and that CNN's accuracy on the classes asked
for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.errors import require
from robuq.config import RobuQConfig
from robuq.eval.tiny_dit import TIMESTEPS, TinyDiT, add_noise, sample
from robuq.frechet import Moments, frechet_distance
from robuq.surgery import quantize
from robuq.training import QAT, QATConfig

BATCH = 64
FP_STEPS, QAT_STEPS = 2500, 250


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in [-1, 1] and labels [1797]."""
    raw = require("sklearn.datasets", "demo").load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return images, torch.tensor(raw.target, dtype=torch.int64)


def diffusion_loss(model: nn.Module, step: int) -> Tensor:
    """Mean squared error of the predicted noise on a random batch, from torch's default generator."""
    images, labels = digits()
    picks = torch.randint(0, len(images), (BATCH,))
    x, y = images[picks], labels[picks]
    t, noise = torch.randint(0, TIMESTEPS, (BATCH,)), torch.randn(BATCH, 1, 8, 8)
    return F.mse_loss(model(add_noise(x, t, noise), t, y), noise)


def train_fp(seed: int, steps: int = FP_STEPS, on_step: Callable[[int], None] | None = None) -> TinyDiT:
    """The floating point model, its averaged weights (decay 0.995), in eval mode."""
    torch.manual_seed(seed)
    model = TinyDiT().train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(steps):
        rate = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        diffusion_loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.995, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 1 - decay)
        if on_step is not None:
            on_step(step)
    model.load_state_dict({**model.state_dict(), **average})
    return model.eval()


@dataclass(frozen=True)
class Run:
    """A quantised training: settings of the model, and the average bits of the plan (None: as the settings say)."""

    config: RobuQConfig
    avg_bits: float | None = None
    warm: int = 100
    solver: str = "dp"
    steps: int = QAT_STEPS

    def key(self) -> dict[str, Any]:
        """Names the run."""
        return {
            "config": self.config.to_json(),
            "avg_bits": self.avg_bits,
            "warm": self.warm,
            "solver": self.solver,
            "steps": self.steps,
        }


def calibration(count: int = 256, seed: int = 77) -> tuple[list[Any], Any]:
    """Fixed (x_t, t, class) batches with common noise, and the function that runs them."""
    images, labels = digits()
    g = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(images), (count,), generator=g)
    t = torch.randint(0, TIMESTEPS, (count,), generator=g)
    noise = torch.randn(count, 1, 8, 8, generator=g)
    batch = (add_noise(images[picks], t, noise), t, labels[picks])
    return [batch], lambda model, inputs: model(*inputs)


def train_quantised(
    fp: nn.Module, run: Run, seed: int, on_step: Callable[[int, float], None] | None = None
) -> tuple[nn.Module, QAT]:
    """Quantise a copy and train it; the model has its averaged weights and is in eval mode."""
    model = quantize(copy.deepcopy(fp), run.config)
    settings = QATConfig(
        steps=run.steps, lr=1e-3, lr_warmup=20, ema=0.98, seed=seed, avg_bits=run.avg_bits, warm=run.warm,
        solver=run.solver,  # type: ignore[arg-type]
    )  # fmt: skip
    training = QAT(model, settings, diffusion_loss, calibrate=calibration, on_step=on_step)
    training.run()
    return training.load_ema().eval(), training


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Error of the predicted noise on 1024 fixed triples."""
    images, labels = digits()
    g = torch.Generator().manual_seed(4242)
    picks = torch.randint(0, len(images), (1024,), generator=g)
    t = torch.randint(0, TIMESTEPS, (1024,), generator=g)
    noise = torch.randn(1024, 1, 8, 8, generator=g)
    model.eval()
    return float(F.mse_loss(model(add_noise(images[picks], t, noise), t, labels[picks]), noise))


class Judge(nn.Module):
    """A small CNN on digits: 32 penultimate features, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [b, 10]."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
@torch.enable_grad()
def judge() -> Judge:
    """The CNN, trained for 400 steps with seed 0."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, (images, labels) = Judge(), digits()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(400):
        picks = torch.randint(0, len(images), (128,))
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images[picks]), labels[picks]).backward()
        optimizer.step()
    torch.set_rng_state(state)
    return model.eval()


@torch.no_grad()
def judge_samples(model: nn.Module, count: int = 300, steps: int = 25, seed: int = 0) -> dict[str, float]:
    """Frechet distance of features to all digits, and accuracy on the classes asked for."""
    labels = torch.arange(count) % 10
    return judge_images(sample(model, labels, steps=steps, seed=seed), labels)


@torch.no_grad()
def judge_images(images: Tensor, labels: Tensor) -> dict[str, float]:
    """The same for images that are there."""
    seen = judge()
    accuracy = float((seen(images).argmax(1) == labels).float().mean())
    real, made = (Moments.of(seen.body(each).numpy()) for each in (digits()[0], images))
    return {"fd": frechet_distance(real, made), "accuracy": accuracy}
