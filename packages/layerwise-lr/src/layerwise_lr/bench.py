"""``layerwise-lr bench``: the spectra against WeightWatcher, the cost in training, and how cost grows."""

from __future__ import annotations

import argparse
import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from icml26_shared.bench import Bench, BenchReport, Measured, Rule, compare, growth, peak_memory
from layerwise_lr.eval.stdlib_lm import Run, train
from layerwise_lr.integrations.checkpoint import analyze
from layerwise_lr.measurement import Measure
from layerwise_lr.spectra import spectrum
from layerwise_lr.tail import fit_tail

if TYPE_CHECKING:
    from icml26_shared.console import Context

SIZES = (256, 512, 1024, 2048)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("--pairs", type=int, default=5, help="pairs of each comparison of trainings (default 5)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each training (default 400)")


def run(ctx: Context, args: argparse.Namespace) -> BenchReport:
    """All rows."""
    bench = Bench(ctx, libraries=["weightwatcher", "powerlaw"])
    _analyze_rows(bench)
    _fit_row(bench)
    _training_rows(bench, args)
    _growth_rows(bench)
    _memory_row(bench)
    return bench.report()


def _analyze_rows(bench: Bench) -> None:
    def measure() -> Measured:
        from layerwise_lr.eval.peers import smollm2, weightwatcher_alphas

        model, found = smollm2(), {}

        def ours() -> None:
            found["ours"] = {r.name: r.alpha for r in analyze(model, fit="gof") if r.fitted}

        def theirs() -> None:
            found["theirs"] = weightwatcher_alphas(model)

        compared = compare(ours, theirs, pairs=2, warmup=0)
        apart = [abs(alpha - found["theirs"][name]) for name, alpha in found["ours"].items()]
        return Measured(compared, extra={"matrices": len(apart), "largest difference of alpha": max(apart)})

    goals = [Rule("ratio", ">=", 3), Rule("largest difference of alpha", "<=", 1e-4)]
    bench.row("analyze(SmolLM2-135M), gof", measure, peer="WeightWatcher", goal=goals)


def _fit_row(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        eigs = torch.from_numpy(np.random.default_rng(0).pareto(1.5, 4096) + 1).sort().values
        start = time.perf_counter()
        fit_tail(eigs, "gof")
        return {"seconds": time.perf_counter() - start}

    bench.row("fit_tail(gof), N = 4096", measure, goal=Rule("seconds", "<", 0.3))
    eigs = torch.from_numpy(np.random.default_rng(0).pareto(1.5, 1024) + 1).sort().values
    loop = functools.partial(gof_by_loop, eigs.numpy())
    bench.row(
        "fit_tail(gof), N = 1024",
        lambda: Measured(compare(lambda: fit_tail(eigs, "gof"), loop, pairs=5)),
        peer="a loop over thresholds in numpy",
    )


def gof_by_loop(eigs: np.ndarray) -> tuple[float, float]:
    """Alpha and distance by a loop over thresholds."""
    best = (np.inf, np.nan)
    for i in range(len(eigs) - 1):
        logs = np.log(eigs[i:] / eigs[i])
        total = logs.sum()
        if total > 0:
            alpha = 1 + len(logs) / total
            best = min(best, (np.abs(1 - np.exp((1 - alpha) * logs) - np.arange(len(logs)) / len(logs)).max(), alpha))
    return float(best[1]), float(best[0])


def _training_rows(bench: Bench, args: argparse.Namespace) -> None:
    uniform = Run("uniform", steps=args.steps)
    background = (("background", True),)
    for name, ours, least in (
        ("training with LLR, interval 40", Run("llr", steps=args.steps), 0.97),
        ("training with LLR in the background", Run("llr", steps=args.steps, settings=background), 0.97),
    ):

        def measure(ours: Run = ours) -> Measured:
            sides = functools.partial(train, ours, 0), functools.partial(train, uniform, 0)
            return Measured(compare(*sides, pairs=args.pairs, warmup=1))

        goal = Rule("ratio", ">=", least)
        bench.row(f"{name}, {args.steps} steps", measure, peer="the same with one rate", goal=goal)


def falling(n: int) -> Tensor:
    """A matrix [n, 2 n] with a falling spectrum."""
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, 2 * n, generator=g) * torch.arange(1, 2 * n + 1) ** -0.5


def _growth_rows(bench: Bench) -> None:
    matrices = {n: falling(n) for n in SIZES}

    def measure(method: Any) -> dict[str, Any]:
        found = growth(lambda n: spectrum(matrices[n], method), list(SIZES))
        apart = [
            abs(fit_tail(spectrum(w, method)).alpha - fit_tail(spectrum(w, "svd", torch.float64)).alpha)
            for w in matrices.values()
        ]
        return {"growth": found, "apart": max(apart)}

    for method, bar in (("gram", 1e-4), ("lanczos", 0.05)):

        def row(method: str = method) -> Measured:
            found = measure(method)
            return Measured(growth=found["growth"], extra={"largest difference of alpha": found["apart"]})

        goal = Rule("largest difference of alpha", "<=", bar)
        bench.row(f"spectrum({method}) of n x 2n", row, peer="float64 SVD", goal=goal)

    def crossover() -> dict[str, float]:
        for n, w in matrices.items():
            ratio = compare(lambda w=w: spectrum(w, "lanczos"), lambda w=w: spectrum(w, "gram"), pairs=3).ratio  # type: ignore[misc]
            if ratio > 1:
                return {"smallest n at which lanczos is faster": n}
        return {"lanczos is slower up to n": SIZES[-1]}

    bench.row("crossover of lanczos and gram", crossover)


def _memory_row(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        w, measured = falling(1536), Measure()
        peak = peak_memory(lambda: measured("w", w))
        return {"Gram matrices of extra memory": peak.rss_bytes / (1536 * 1536 * 4)}

    bench.row("memory of measuring 1536 x 3072", measure, goal=Rule("Gram matrices of extra memory", "<=", 3))
