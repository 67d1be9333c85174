"""Training runs that several claims share."""

from __future__ import annotations

import math
from typing import Any

import torch

from icml26_shared.claims import ClaimContext
from layerwise_lr.eval.stdlib_lm import Run, train
from layerwise_lr.eval.text import load_text


def result(ctx: ClaimContext, run: Run, seed: int) -> dict[str, Any]:
    """What `train(run, seed)` returns, trained once for all claims; other texts or versions of torch train anew."""
    text = load_text()
    key = {"run": run.to_json(), "seed": seed, "text": text.sha256, "torch": torch.__version__}

    def compute() -> dict[str, Any]:
        with ctx.progress(f"{run.method} {run.lr:g}, seed {seed}", run.steps) as bar:
            return train(run, seed, text, on_step=lambda step: bar.advance())

    found: dict[str, Any] = ctx.shared(key, compute)
    return found


def losses(ctx: ClaimContext, run: Run) -> list[float]:
    """Validation loss of each seed; NaN where a run diverged."""
    return [final_loss(result(ctx, run, seed)) for seed in ctx.seeds]


def final_loss(trained: dict[str, Any]) -> float:
    """The loss of a run as it is kept: NaN is null in JSON."""
    return math.nan if trained["loss"] is None else trained["loss"]
