"""Training runs that several claims share, kept one by one in the output folder so that a stopped check goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from icml26_shared.checkpoint import JsonlStore
from icml26_shared.claims import ClaimContext
from maxrl.eval import addition, digits

DIGITS_LRS = (0.03, 0.1, 0.3, 1.0)
ADDITION_LRS = (1e-4, 3e-4, 1e-3)
ADDITION_METHODS = ("maxrl", "grpo", "rloo")
TUNING_SEED = 1000


def digits_run(ctx: ClaimContext, run: digits.Run, seed: int) -> dict[str, float]:
    """Exact test metrics of one run on digits-100."""

    def compute() -> dict[str, float]:
        with ctx.progress(f"{run.estimator} N={run.rollouts} lr={run.lr} seed {seed}", run.epochs) as bar:
            model = digits.train(run, seed, epoch=lambda _: bar.advance())
        return digits.exact_metrics(model, digits.number_images(2000, places=run.places, split="test", seed=seed))

    return _remember(ctx, "digits-runs.jsonl", {**asdict(run), "seed": seed}, compute)


def addition_run(ctx: ClaimContext, method: str, lr: float, seed: int, scarce: int | None) -> dict[str, Any]:
    """Result of one run on addition; its state is saved on the way."""
    run = addition.Run(method, lr=lr, seed=seed, scarce=scarce)
    folder = ctx.out_file(f"addition-state/{method}-{lr:g}-{seed}-{scarce}")

    def compute() -> dict[str, Any]:
        with ctx.progress(
            f"{method} lr={lr:g} seed {seed} {'256 prompts' if scarce else 'all prompts'}", run.steps
        ) as bar:
            return addition.train(run, checkpoint=folder, step=lambda done, of: bar.advance())

    return _remember(ctx, "addition-runs.jsonl", asdict(run), compute)


def addition_best_lr(ctx: ClaimContext, method: str, metric: str, scarce: int | None) -> float:
    """The learning rate of the grid with the best ``metric`` on a seed that no claim is judged on. ``metric`` is a name
    of the test metrics, or ``"sum"`` for pass@1 + pass@64."""

    def value(lr: float) -> float:
        test = addition_run(ctx, method, lr, TUNING_SEED, scarce)["test"]
        return test["pass@1"] + test["pass@64"] if metric == "sum" else test[metric]

    return max(ADDITION_LRS, key=value)


@lru_cache(maxsize=1)
def training_digest() -> str:
    """Digest of the sources that decide what a training run gives."""
    digest = hashlib.sha256()
    folder = Path(addition.__file__).parent.parent
    names: tuple[str, ...] = ("advantages", "groups", "coefficients", "estimators", "baselines")
    names += ("eval/digits", "eval/addition", "eval/transformer")
    for name in names:
        digest.update((folder / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _remember(ctx: ClaimContext, file: str, settings: dict[str, Any], compute: Callable[[], Any]) -> Any:
    # One store per call: the file is locked only while a run is looked up or written, and holds every finished run. A
    # run made by other training code is another run.
    key = {"run": {**settings, "code": training_digest()}}
    with JsonlStore(ctx.out_file(file), key=("run",)) as store:
        if store.done(key):
            return store.remember(key, compute)
    value = compute()
    with JsonlStore(ctx.out_file(file), key=("run",)) as store:
        return store.remember(key, lambda: value)
