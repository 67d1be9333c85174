"""``layerwise-lr demo``: train a small language model with one rate and with one for each matrix."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from icml26_shared import plots
from layerwise_lr.eval.stdlib_lm import S1, S2, Run, train
from layerwise_lr.eval.text import load_text

if TYPE_CHECKING:
    from icml26_shared.console import Context

STEPS, LR = 300, 4e-3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``demo``."""
    parser.add_argument("--text", metavar="FILE", help="text to train on (default: the standard library's sources)")


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train, tabulate, plot; the conclusion is drawn from the figures of this run."""
    text = load_text(args.text)
    llr = Run("llr", LR, STEPS)
    todo = {"one rate": replace(llr, method="uniform"), f"LLR, {S1:g} to {S2:g}": llr,
            "one rate, LLR's mean": replace(llr, method="mean")}  # fmt: skip
    results: dict[str, dict[str, Any]] = {}
    with ctx.progress("training", STEPS * len(todo)) as bar:
        for name, each in todo.items():
            bar.update(f"training: {name}")
            results[name] = train(each, ctx.seed, text, on_step=lambda step: bar.advance())
    ours = results[f"LLR, {S1:g} to {S2:g}"]
    rows = [[layer, ours["alphas"].get(layer, ""), ratio, LR * ratio] for layer, ratio in ours["ratios"].items()]
    ctx.table(f"Each matrix at its last refresh (base rate {LR:g})", ["matrix", "alpha", "ratio", "peak rate"], rows)
    ctx.table(
        f"Byte-level language model, {STEPS} steps, {text.origin} (seed {ctx.seed})",
        ["rates", "validation loss [nats/byte]"],
        [[name, result["loss"]] for name, result in results.items()],
    )
    paths = _plot(ctx, results, ours)
    said = _conclusion(results, ours)
    ctx.say(said)
    ctx.note(f"figures: {', '.join(paths)}")
    return {"results": results, "text": text.sha256, "plots": paths, "conclusion": said}


def _conclusion(results: dict[str, dict[str, Any]], ours: dict[str, Any]) -> str:
    one, mean = results["one rate"]["loss"], results["one rate, LLR's mean"]["loss"]
    heavy, light = min(ours["alphas"], key=ours["alphas"].get), max(ours["alphas"], key=ours["alphas"].get)

    def against(other: float) -> str:
        return f"{abs(ours['loss'] - other):.4f} nats {'below' if ours['loss'] < other else 'above'}"

    return (
        f"With a rate for each matrix ({light} the largest, {heavy} the smallest) the loss after {STEPS} steps is "
        f"{ours['loss']:.4f}: {against(one)} one rate of {LR:g}, {against(mean)} one rate of the same average; "
        "one seed decides nothing, `layerwise-lr claims` runs several."
    )


def _plot(ctx: Context, results: dict[str, dict[str, Any]], ours: dict[str, Any]) -> list[str]:
    curves = {name: tuple(zip(*result["curve"], strict=True)) for name, result in results.items()}
    loss = plots.lines(
        curves, xlabel="step", ylabel="validation loss [nats/byte]", title="One rate, and one for each matrix"
    )
    figure, ax = plots.figure(size=(8, 0.26 * len(ours["ratios"]) + 1.2))
    names = list(ours["ratios"])[::-1]
    with plots.style():
        ax.barh(range(len(names)), [ours["ratios"][name] for name in names], color=plots.PALETTE[0])
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.set(xlabel="ratio to the base rate", ylabel="matrix", title="Learning rate ratios after the last refresh")
    return [str(plots.save(loss, ctx.out_file("loss.png"))[0]), str(plots.save(figure, ctx.out_file("ratios.png"))[0])]
