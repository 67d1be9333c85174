"""``tucker demo``: a small ViT on digits with MHA, GQA, MLA and Tucker attention: accuracy against parameters."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import torch

from icml26_shared import plots
from tucker_attention.eval.small import VIT_STEPS, Kind, train_digits

if TYPE_CHECKING:
    from icml26_shared.console import Context

KINDS = {
    "MHA": Kind("gqa", 8),
    "GQA-2": Kind("gqa", 2),
    "MLA-16": Kind("mla", 16),
    "Tucker [4,16,16]": Kind("tucker", (4, 16, 16)),
    "Tucker [2,12,8]": Kind("tucker", (2, 12, 8)),
    "Tucker [2,6,4]": Kind("tucker", (2, 6, 4)),
}


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train each, tabulate, plot; the conclusion is drawn from the figures of this run."""
    results = train_all(ctx)
    whole = results["MHA"]["parameters"]
    rows = [
        [name, r["parameters"], f"{100 * r['parameters'] / whole:.0f} %", f"{100 * r['accuracy']:.1f} %"]
        for name, r in results.items()
    ]
    columns = ["attention", "parameters a block", "of MHA", "accuracy on 597 test digits"]
    ctx.table(f"Small ViT on digits, {VIT_STEPS} steps (seed {ctx.seed})", columns, rows)
    path = str(_plot(ctx, results))
    said = conclusion(results)
    ctx.say(said)
    ctx.note(f"figure: {path}")
    return {"results": results, "plot": path, "conclusion": said}


def train_all(ctx: Context) -> dict[str, dict[str, Any]]:
    """Every attention, two at a time, each on one core: layers this small are slower on several."""
    workers = min(2, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ctx.progress(f"training {len(KINDS)} models", len(KINDS)) as bar:
        with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            jobs = {name: pool.submit(train_digits, kind, ctx.seed) for name, kind in KINDS.items()}
            for done in as_completed(jobs.values()):
                done.result()
                bar.advance()
        return {name: job.result() for name, job in jobs.items()}


def conclusion(results: dict[str, dict[str, Any]]) -> str:
    """The smallest Tucker attention whose accuracy is within 2 points of GQA-2's; or that there is none."""
    peer = results["GQA-2"]
    near = [
        (r["parameters"], name)
        for name, r in results.items()
        if name.startswith("Tucker") and r["accuracy"] >= peer["accuracy"] - 0.02
    ]
    if not near:
        return f"No Tucker attention came within 2 points of GQA-2's {100 * peer['accuracy']:.1f} % in this run."
    parameters, name = min(near)
    return (
        f"{name} classifies {100 * results[name]['accuracy']:.1f} % of the digits with {parameters} attention "
        f"parameters a block; GQA-2 needs {peer['parameters'] / parameters:.1f} times as many for "
        f"{100 * peer['accuracy']:.1f} %."
    )


def _plot(ctx: Context, results: dict[str, dict[str, Any]]) -> Any:
    families = {"MHA, GQA": ("MHA", "GQA"), "MLA": ("MLA",), "Tucker": ("Tucker",)}
    series = {}
    for family, heads in families.items():
        chosen = sorted((r["parameters"], 100 * r["accuracy"]) for n, r in results.items() if n.startswith(heads))
        series[family] = ([p for p, _ in chosen], [a for _, a in chosen])
    figure = plots.lines(
        series, xlabel="attention parameters a block", ylabel="test accuracy [%]", xscale="log",
        title="Digits ViT: accuracy against attention parameters",
    )  # fmt: skip
    return plots.save(figure, ctx.out_file("digits.png"))[0]
