"""Training runs that several claims share, kept one by one in the output folder so that a stopped check goes on."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import Any

from icml26_shared.claims import ClaimContext
from maxrl.eval import addition, digits

DIGITS_LRS = (0.03, 0.1, 0.3, 1.0)
ADDITION_LRS = (1e-4, 3e-4, 1e-3, 3e-3)
ADDITION_METHODS = ("maxrl", "grpo", "rloo")
# Trained and tuned in the same way and reported, but not part of a rule.
ADDITION_OTHERS = ("grpo with entropy bonus", "differential smoothing", "pkpo k=8")
_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo with entropy bonus": {"estimator": "grpo", "entropy_bonus": 0.01},
    "differential smoothing": {"estimator": "grpo", "smoothing": 0.05},
    "pkpo k=8": {"estimator": "pkpo", "order": 8},
}
TUNING_SEED = 1000
_LAST = 50


def digits_run(ctx: ClaimContext, run: digits.Run, seed: int) -> dict[str, float]:
    """Exact test metrics of one run on digits-100."""

    def compute() -> dict[str, float]:
        with ctx.progress(f"{run.estimator} N={run.rollouts} lr={run.lr} seed {seed}", run.epochs) as bar:
            model = digits.train(run, seed, epoch=lambda _: bar.advance())
        return digits.exact_metrics(model, digits.number_images(2000, places=run.places, split="test", seed=seed))

    return ctx.shared({"task": "digits", **asdict(run), "seed": seed}, compute)


def addition_run(ctx: ClaimContext, method: str, lr: float, seed: int, scarce: int | None) -> dict[str, Any]:
    """Result of one run on addition; its state is saved on the way."""
    run = addition.Run(**_SETTINGS.get(method, {"estimator": method}), lr=lr, seed=seed, scarce=scarce)
    folder = ctx.out_file(f"addition-state/{method.replace(' ', '-')}-{lr:g}-{seed}-{scarce}")

    def compute() -> dict[str, Any]:
        with ctx.progress(
            f"{method} lr={lr:g} seed {seed} {'256 prompts' if scarce else 'all prompts'}", run.steps
        ) as bar:
            return addition.train(run, checkpoint=folder, step=lambda done, of: bar.advance())

    return ctx.shared({"task": "addition", **asdict(run)}, compute)


def addition_value(result: dict[str, Any], metric: str) -> float:
    """One figure of a run's result, better when higher: ``"pass@1"`` and ``"pass@64"`` on held-out prompts, ``"sum"``
    of the two, ``"train likelihood"`` (minus the NLL of the training prompts), or ``"hits"``, the share of prompts with
    a success in the last 50 steps."""
    if metric == "sum":
        return result["test"]["pass@1"] + result["test"]["pass@64"]
    if metric == "train likelihood":
        return -result["train"]["nll"]
    if metric == "hits":
        return mean(result["hit_share"][-_LAST:])
    return result["test"][metric]


def addition_best_lr(ctx: ClaimContext, method: str, metric: str, scarce: int | None) -> float:
    """The learning rate of the grid with the best ``metric`` of :func:`addition_value` on a seed that no claim is
    judged on."""
    return max(ADDITION_LRS, key=lambda lr: addition_value(addition_run(ctx, method, lr, TUNING_SEED, scarce), metric))


def addition_tuned(
    ctx: ClaimContext, method: str, metric: str, scarce: int | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Runs of the judged seeds and their learning rate: MaxRL and the methods outside the rules at one rate for all
    metrics, a baseline at its best rate for ``metric``."""
    lr = addition_best_lr(ctx, method, metric if method in ("grpo", "rloo") else "sum", scarce)
    return [addition_run(ctx, method, lr, seed, scarce) for seed in ctx.seeds], lr
