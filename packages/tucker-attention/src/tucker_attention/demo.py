"""``tucker demo``: a small ViT on digits with MHA, GQA, MLA and Tucker attention: accuracy against parameters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

from icml26_shared import plots
from tucker_attention.eval.small import Kind, train_digits

if TYPE_CHECKING:
    from icml26_shared.console import Context

STEPS = 150
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small are slower on several cores
    results: dict[str, dict[str, Any]] = {}
    try:
        with ctx.progress("training", STEPS * len(KINDS)) as bar:
            for name, kind in KINDS.items():
                bar.update(f"training: {name}")
                results[name] = train_digits(kind, ctx.seed, STEPS, on_step=bar.advance)
    finally:
        torch.set_num_threads(threads)
    whole = results["MHA"]["parameters"]
    rows = [
        [name, r["parameters"], f"{100 * r['parameters'] / whole:.0f} %", f"{100 * r['accuracy']:.1f} %"]
        for name, r in results.items()
    ]
    columns = ["attention", "parameters a block", "of MHA", "accuracy on 597 test digits"]
    ctx.table(f"Small ViT on digits, {STEPS} steps (seed {ctx.seed})", columns, rows)
    path = str(_plot(ctx, results))
    said = conclusion(results)
    ctx.say(said)
    ctx.note(f"figure: {path}")
    return {"results": results, "plot": path, "conclusion": said}


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
