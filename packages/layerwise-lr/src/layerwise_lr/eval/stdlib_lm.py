"""The reference runs: a byte-level language model on the standard library's sources, one CPU core.

Width 64, 4 layers, 4 heads, FFN 160, 64 bytes, batch 8, AdamW (0.9, 0.95) with weight decay 0.1 on everything, linear
warm-up over 10 % of the steps, cosine to 10 %, gradients clipped to norm 1. LLR: ratios 1 to 3, a refresh every 40
steps, ramps of 20, in the first fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from layerwise_lr.baselines import LAMB, LARS, BlockwiseSharpnessLR, mean_ratio, permuted
from layerwise_lr.controller import LayerwiseLR
from layerwise_lr.eval.llama import Llama, Shape
from layerwise_lr.eval.text import Text, batch, load_text, windows
from layerwise_lr.groups import param_groups
from layerwise_lr.muon import MuonAdamW

Method = Literal["uniform", "llr", "permuted", "mean", "inverse", "sharpness", "lars", "lamb"]
S1, S2, INTERVAL, RAMP, ACTIVE = 1.0, 3.0, 40, 20, 0.2
VALIDATION = 256  # windows
CURVE_POINTS, CURVE_WINDOWS = 25, 64


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        method: how rates are set. ``"permuted"``, ``"mean"`` and ``"inverse"`` are LLR with its ratios shuffled, all
            replaced by their mean, or turned around.
        lr: base rate.
        steps: optimizer steps.
        factor: of the base rate, for ``"uniform"`` at LLR's mean or largest ratio.
        muon: matrices under Muon.
        settings: further ones of LLR, as pairs.
    """

    method: Method = "llr"
    lr: float = 4e-3
    steps: int = 400
    factor: float = 1.0
    muon: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A key for stores."""
        return {**asdict(self), "settings": [list(pair) for pair in self.settings]}


def schedule(steps: int) -> Callable[[int], float]:
    """Linear warm-up over 10 %, then cosine to 10 % of the peak."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))

    return factor


def make_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """The optimizer of a run, one group a matrix."""
    lr = run.lr * run.factor
    groups = param_groups(model, lr, "muon" if run.muon else "adamw", 0.1, decay_norm_bias=True)
    if run.muon:
        return MuonAdamW(groups, lr=lr, betas=(0.9, 0.95))
    if run.method == "lars":
        return LARS(groups, lr)
    if run.method == "lamb":
        return LAMB(groups, lr, betas=(0.9, 0.95))
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def make_controller(
    optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: Any, run: Run, seed: int
) -> LayerwiseLR | BlockwiseSharpnessLR | None:
    """The controller of a run; None for a uniform rate."""
    if run.method in ("uniform", "lars", "lamb"):
        return None
    if run.method == "sharpness":
        return BlockwiseSharpnessLR(optimizer, model, scheduler)
    remaps = {"permuted": permuted(seed), "mean": mean_ratio}
    settings = {
        "s1": S1, "s2": S2, "interval": INTERVAL, "ramp": RAMP, "active_fraction": ACTIVE, "total_steps": run.steps,
        "inverse": run.method == "inverse", **dict(run.settings),
    }  # fmt: skip
    return LayerwiseLR(optimizer, model, scheduler, remap=remaps.get(run.method), **settings)


def train(
    run: Run,
    seed: int,
    text: Text | None = None,
    *,
    shape: Shape | None = None,
    batch_size: int = 8,
    on_step: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Train once, deterministically by seed, on one thread.

    Returns:
        ``loss`` (validation, nats a byte, of the trained model), ``curve`` (list of
        [step, validation loss on a quarter of the windows]), and for
        LLR ``ratios``, ``alphas`` and ``mean_ratio`` over matrices at the end.
    """
    text, shape = text or load_text(), shape or Shape()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = Llama(shape, seed)
        optimizer = make_optimizer(model, run)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(run.steps))
        controller = make_controller(optimizer, model, scheduler, run, seed)
        held_out = windows(text.validation, shape.length, VALIDATION)
        generator = torch.Generator().manual_seed(10_000 + seed)
        some = held_out[:: max(1, VALIDATION // CURVE_WINDOWS)]
        curve = []
        every = max(1, run.steps // CURVE_POINTS)
        for step in range(1, run.steps + 1):
            optimizer.zero_grad()
            model.loss(batch(text.train, shape.length, batch_size, generator)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if controller is not None:
                controller.step()
            if step % every == 0 or step == run.steps:
                curve.append([step, validation_loss(model, some)])
            if on_step is not None:
                on_step(step)
        loss = validation_loss(model, held_out)
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = {"loss": loss, "curve": curve}
    if isinstance(controller, LayerwiseLR):
        ratios = controller.ratios
        result |= {"ratios": ratios, "alphas": controller.alphas, "mean_ratio": sum(ratios.values()) / len(ratios)}
    return result


@torch.no_grad()
def validation_loss(model: Llama, held_out: torch.Tensor) -> float:
    """Nats a byte."""
    return float(sum(float(model.loss(part)) * len(part) for part in held_out.split(64)) / len(held_out))
