"""The paper's claims as checks: ``layerwise-lr claims``. Rules and thresholds were set before the runs.

All training runs are the small language model of `layerwise_lr.eval.stdlib_lm` on the sources of Python's standard
library. What the claims say of 60M to 3B parameters needs GPUs and FineWeb.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from icml26_shared.claims import Claim, ClaimContext, Measurement, Rule
from layerwise_lr.claims_runs import final_loss, losses, result
from layerwise_lr.eval.stdlib_lm import S2, Run

BASE = 4e-3
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SHORT, LONG = 400, 1500
LLR, UNIFORM = Run("llr", BASE, SHORT), Run("uniform", BASE, SHORT)
MUON = replace(LLR, muon=True)
SEEDS, SEEDS_LONG, SEEDS_CURVE = 10, 5, 3


def check_assignment(ctx: ClaimContext) -> dict[str, Any]:
    """LLR against its own ratios shuffled, and all at their mean; with FARMS for comparison."""
    return {
        "LLR": losses(ctx, LLR),
        "permuted": losses(ctx, replace(LLR, method="permuted")),
        "mean": losses(ctx, replace(LLR, method="mean")),
        "LLR with FARMS": losses(ctx, replace(LLR, settings=(("farms", True),))),
    }


def check_uniform_at_larger_rates(ctx: ClaimContext) -> dict[str, Any]:
    """A uniform rate at LLR's largest and at its mean ratio."""
    mean = []
    for seed in ctx.seeds:
        ratio = result(ctx, LLR, seed)["mean_ratio"]
        mean.append(final_loss(result(ctx, replace(UNIFORM, factor=ratio), seed)))
    return {
        "LLR": losses(ctx, LLR),
        "uniform at s2": losses(ctx, replace(UNIFORM, factor=S2)),
        "uniform at the mean": mean,
    }


def check_inverse(ctx: ClaimContext) -> dict[str, Any]:
    """Larger rates for heavier tails."""
    return {"LLR": losses(ctx, LLR), "inverse": losses(ctx, replace(LLR, method="inverse"))}


def check_muon(ctx: ClaimContext) -> dict[str, Any]:
    """Matrices under Muon."""
    return {
        "LLR": losses(ctx, MUON),
        "mean": losses(ctx, replace(MUON, method="mean")),
        "uniform": losses(ctx, replace(MUON, method="uniform")),
    }


def check_tuned(ctx: ClaimContext) -> dict[str, Any]:
    """Uniform tuned on the grid; LLR at that rate and one below."""
    uniform, best = tuned(ctx)
    index = RATES.index(best)
    found = {rate: losses(ctx, Run("llr", rate, LONG)) for rate in RATES[max(0, index - 1) : index + 1]}
    chosen = min(found, key=lambda rate: _mean(found[rate]))
    return {
        "LLR": found[chosen],
        "tuned uniform": uniform[best],
        "rate of LLR": Measurement([chosen]),
        "rate of tuned uniform": Measurement([best]),
    }


def tuned(ctx: ClaimContext) -> tuple[dict[float, list[float]], float]:
    """Losses of the uniform rates, and the rate with the lowest mean."""
    uniform = {rate: losses(ctx, Run("uniform", rate, LONG)) for rate in RATES}
    return uniform, min(uniform, key=lambda rate: _mean(uniform[rate]))


def check_faster(ctx: ClaimContext) -> dict[str, Any]:
    """Steps until LLR has the loss that tuned uniform ends with, both at that rate and of equal length."""
    _, best = tuned(ctx)
    ratios = []
    for seed in ctx.seeds:
        llr, uniform = (result(ctx, Run(method, best, LONG), seed) for method in ("llr", "uniform"))  # type: ignore[arg-type]
        ratios.append(speed_up(llr["curve"], uniform["curve"]))
    return {"tokens of uniform over LLR's": ratios}


def speed_up(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Length of their run over the steps in which ours reaches their last loss; if it does not, their steps to our last
    loss over the length of our run, which is below 1. Steps between measured points are interpolated.
    """
    if ours[-1][1] is None or theirs[-1][1] is None:  # diverged
        return math.nan
    reached = first_reached(ours, theirs[-1][1])
    if reached is not None:
        return theirs[-1][0] / reached
    behind = first_reached(theirs, ours[-1][1])
    return math.nan if behind is None else behind / ours[-1][0]


def first_reached(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The first step at which a curve is at or below a loss."""
    before: Sequence[float] | None = None
    for point in curve:
        if point[1] is not None and point[1] <= loss:
            if before is None or before[1] == point[1]:
                return float(point[0])
            share = (before[1] - loss) / (before[1] - point[1])
            return before[0] + share * (point[0] - before[0])
        before = point if point[1] is not None else before
    return None


def check_transfer(ctx: ClaimContext) -> dict[str, Any]:
    """Base-rate curves of both."""
    curves = {
        method: {rate: losses(ctx, Run(method, rate, SHORT)) for rate in RATES}  # type: ignore[arg-type]
        for method in ("uniform", "llr")
    }
    best = {method: min(range(len(RATES)), key=lambda i: _mean(curve[RATES[i]])) for method, curve in curves.items()}
    found = {
        f"{method} at {rate:g}": Measurement(values)
        for method, curve in curves.items()
        for rate, values in curve.items()
    }
    spread = {
        f"spread of {method} over rates": Measurement([max(map(_mean, c.values())) - min(map(_mean, c.values()))])
        for method, c in curves.items()
    }
    return {"grid steps between the optima": Measurement([abs(best["llr"] - best["uniform"])]), **spread, **found}


def check_alpha(ctx: ClaimContext) -> dict[str, Any]:
    """Every matrix of SmolLM2-135M: median against the float64 SVD, gof against WeightWatcher."""
    from layerwise_lr.eval.peers import smollm2_differences

    return {name: Measurement(values) for name, values in ctx.cached("smollm2", smollm2_differences).items()}


def _mean(values: Sequence[float]) -> float:
    """Mean; infinite when a run diverged, so that it is never the best."""
    return float(np.mean(values)) if np.isfinite(values).all() else math.inf


_AT_SCALE = "layerwise-lr pretrain --suite {suite} --root FINEWEB_DIR --tokenizer DIR --out {suite}"
CLAIMS = [
    Claim(
        "assignment",
        "The assignment by heavy-tailedness matters, not just bigger rates",
        "abstract",
        check_assignment,
        [
            Rule("LLR", "<", 0, plus="permuted", on="interval"),
            Rule("LLR", "<", 0, plus="mean", on="interval"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "uniform-at-larger-rates",
        "A uniform rate at LLR's largest or mean rate is worse (68.28 against 20.30 at 60M)",
        "tables of the paper",
        check_uniform_at_larger_rates,
        [
            Rule("LLR", "<", 0, plus="uniform at s2", on="interval"),
            Rule("LLR", "<", 0, plus="uniform at the mean", on="interval"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "inverse",
        "The inverse mapping hurts",
        "ablation",
        check_inverse,
        Rule("LLR", "<", 0, plus="inverse", on="interval"),
        seeds=SEEDS,
    ),
    Claim(
        "muon",
        "It works with Muon as well: the same direction as with AdamW",
        "section on Muon",
        check_muon,
        Rule("LLR", "<", 0, plus="mean", on="interval"),
        seeds=SEEDS_LONG,
    ),
    Claim(
        "tuned",
        "LLR beats the tuned uniform rate (21.94 to 20.30 at 60M)",
        "abstract",
        check_tuned,
        Rule("LLR", "<=", 0.995, times="tuned uniform", on="interval"),
        seeds=SEEDS_LONG,
    ),
    Claim(
        "faster",
        "Up to 1.5 times faster: fewer tokens to the same loss",
        "abstract",
        check_faster,
        Rule("tokens of uniform over LLR's", ">=", 1.1),
        seeds=SEEDS_LONG,
    ),
    Claim(
        "transfer",
        "Low tuning overhead: the optimal base rate is the uniform one's",
        "abstract",
        check_transfer,
        Rule("grid steps between the optima", "<=", 1),
        seeds=SEEDS_CURVE,
    ),
    Claim(
        "alpha",
        "The exponent is Hill's and WeightWatcher's",
        "method",
        check_alpha,
        [
            Rule("median against float64 SVD", "<=", 1e-4, on="every"),
            Rule("gof against WeightWatcher", "<=", 1e-4, on="every"),
        ],
        seeds=1,
    ),
    Claim(
        "at-scale-60m",
        "Perplexity 20.30 against 21.94 at 60M parameters",
        "tables of the paper",
        rule=[Rule("perplexity of LLR", "<=", 1.02 * 20.30), Rule("perplexity of uniform", "<=", 1.02 * 21.94)],
        needs="8 GPUs and FineWeb on disk",
        command=_AT_SCALE.format(suite="llama60m"),
    ),
    Claim(
        "at-scale-1b",
        "Perplexity 9.59 against 9.77 at 1B parameters; zero-shot mean 49.02 against 47.09",
        "abstract",
        rule=[Rule("perplexity of LLR", "<=", 1.02 * 9.59), Rule("perplexity of uniform", "<=", 1.02 * 9.77)],
        needs="8 GPUs and FineWeb on disk",
        command=_AT_SCALE.format(suite="llama1b"),
    ),
]
