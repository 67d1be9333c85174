"""`dppo demo`: real handwritten digits, five ways to train, one table and one figure, in under two minutes."""

from __future__ import annotations

import argparse
import copy
import warnings
from typing import Any

import torch

from dppo.demo_tasks import TASKS
from dppo.learning import Curve, Recipe, train
from icml26_shared.checkpoint import atomic_write_json
from icml26_shared.console import Context
from icml26_shared.plots import figure, lines, save

RUNS = {
    "GRPO (full batch)": Recipe("grpo"),
    "DPPO .5/.5": Recipe("dppo"),
    "DPPO .7/.7": Recipe("dppo", 0.7, 0.7),
    "CPPO .5": Recipe("cppo"),
    "GRESO": Recipe("greso"),
}
DIGITS = {"prompts": 128, "samples": 16, "optimizer": "sgd", "lr": 0.2, "clip": None, "evaluate_every": 25}
ADDITION = {"prompts": 32, "samples": 16, "optimizer": "adamw", "lr": 3e-4, "clip": 1.0, "evaluate_every": 25}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--task", choices=sorted(TASKS), default="digits", help="default: digits")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of each run (digits 500, addition 150)")


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Trains the five, shows them, and says what this run showed."""
    steps = args.steps or (500 if args.task == "digits" else 150)
    if steps < 1:
        raise ValueError(f"--steps {args.steps}: at least 1")
    settings: dict[str, Any] = DIGITS if args.task == "digits" else ADDITION
    task = TASKS[args.task]()
    curves: dict[str, Curve] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small; one thread is fastest
    try:
        with ctx.progress("warm-up", len(RUNS) * steps) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            start = task.policy(ctx.seed)
            for name, recipe in RUNS.items():
                bar.update(name)
                recipe = Recipe(**{**vars(recipe), **settings, "steps": steps})
                curves[name] = train(task, recipe, ctx.seed, copy.deepcopy(start), on_step=bar.advance)
    finally:
        torch.set_num_threads(threads)
    rows = {name: _row(curve) for name, curve in curves.items()}
    ctx.table(
        f"{task.name}, {steps} steps; accuracy on held-out prompts (start {curves['DPPO .5/.5'].accuracy[0]:.3f})",
        ["run", "accuracy", "tokens generated", "tokens updated", "cost (gen. + 3 upd.)", "seconds"],
        [[name, *row.values()] for name, row in rows.items()],
    )
    path = ctx.out_file("demo.png")
    _draw(curves, task.name, path)
    conclusion = _conclusion(curves)
    ctx.say(conclusion)
    ctx.say(f"figure: {path}")
    result = {"task": task.name, "steps": steps, "runs": rows, "conclusion": conclusion, "figure": str(path)}
    atomic_write_json(ctx.out_file("demo.json"), {**result, "curves": {n: c.to_dict() for n, c in curves.items()}})
    return result


def _row(curve: Curve) -> dict[str, float]:
    return {
        "accuracy": curve.smooth()[-1], "generated": curve.generated[-1], "updated": curve.updated[-1],
        "cost": float(curve.cost()[-1]), "seconds": curve.seconds[-1],
    }  # fmt: skip


def _conclusion(curves: dict[str, Curve]) -> str:
    full, ours = curves["GRPO (full batch)"], curves["DPPO .5/.5"]
    finals = f"final accuracies {ours.smooth()[-1]:.3f} and {full.smooth()[-1]:.3f}"
    target = min(full.smooth()[-1], ours.smooth()[-1])
    if target <= full.accuracy[0]:  # both start from the same policy
        return f"In these few steps DPPO .5/.5 or the full batch gained nothing, so their costs say nothing; {finals}."
    share = ours.to_reach(target, ours.cost()) / full.to_reach(target, full.cost())
    return (
        f"DPPO .5/.5 reached accuracy {target:.3f} with {share:.0%} of the tokens (generated + 3 × updated) that the "
        f"full batch needed for it; {finals}."
    )


def _draw(curves: dict[str, Curve], task: str, path: Any) -> None:
    made, axes = figure(1, 2, size=(12, 4.5))
    for ax, by, label in (
        (axes[0], lambda c: c.cost() / 1e6, "tokens generated + 3 × updated [millions]"),
        (axes[1], lambda c: c.step, "optimizer steps"),
    ):
        series = {name: (by(curve), curve.smooth()) for name, curve in curves.items()}
        lines(series, xlabel=label, ylabel="accuracy on held-out prompts", ax=ax)
    axes[0].set_title(f"{task}: accuracy for the tokens spent")
    axes[1].set_title("the same runs by steps")
    save(made, path)
