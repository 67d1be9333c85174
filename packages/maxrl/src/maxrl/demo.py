"""``maxrl demo``: real handwritten digits, and five ways to learn to read two of them from sampled answers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

from icml26_shared import plots
from maxrl.estimators import effective_order
from maxrl.eval import digits
from maxrl.objective import weight

if TYPE_CHECKING:
    from icml26_shared.console import Context

EPOCHS = 10
RUNS = {
    "cross-entropy": digits.Run("cross_entropy", epochs=EPOCHS),
    "MaxRL N=64": digits.Run("maxrl", 64, epochs=EPOCHS),
    "MaxRL N=16": digits.Run("maxrl", 16, epochs=EPOCHS),
    "GRPO N=64": digits.Run("grpo", 64, epochs=EPOCHS),
    "RLOO N=64": digits.Run("rloo", 64, epochs=EPOCHS),
}


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train, tabulate, plot; the conclusion is drawn from the figures of this run."""
    test = digits.number_images(2000, split="test", seed=ctx.seed)
    curves: dict[str, list[dict[str, float]]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small are slower on several cores
    try:
        with ctx.progress("training", len(RUNS) * EPOCHS) as bar:
            for name, settings in RUNS.items():
                bar.update(f"training: {name}")
                seen = curves.setdefault(name, [])

                def after_epoch(model: torch.nn.Module, seen: list[dict[str, float]] = seen) -> None:
                    seen.append(digits.exact_metrics(model, test))
                    bar.advance()

                digits.train(settings, ctx.seed, epoch=after_epoch)
    finally:
        torch.set_num_threads(threads)
    final = {name: seen[-1] for name, seen in curves.items()}
    ctx.table(
        f"digits-100: two handwritten digits, 100 classes, {EPOCHS} epochs, learning rate 0.1 (seed {ctx.seed})",
        ["method", "objective", "NLL [nats]", "pass@1", "pass@128"],
        [[name, _objective(RUNS[name]), m["nll"], m["pass@1"], m["pass@128"]] for name, m in final.items()],
    )
    path = _plot(ctx, curves)
    said = _conclusion(final)
    ctx.say(said)
    ctx.note(f"figure: {path}")
    return {"final": final, "curves": curves, "plot": path, "conclusion": said}


def _objective(settings: digits.Run) -> str:
    if settings.estimator == "cross_entropy":
        return "likelihood"
    order = effective_order(settings.estimator, settings.rollouts)
    return "no likelihood of any order" if order is None else f"likelihood to order {order}"


def _conclusion(final: dict[str, dict[str, float]]) -> str:
    baselines = ("GRPO N=64", "RLOO N=64")
    best = min(baselines, key=lambda name: final[name]["nll"])
    ours, theirs, exact = final["MaxRL N=64"], final[best], final["cross-entropy"]
    ratio = theirs["nll"] / ours["nll"]
    better = "lower" if ratio > 1 else "higher"
    shares = {name: 100 * final[name]["pass@128"] for name in ("MaxRL N=64", best, "cross-entropy")}
    return (
        f"With 64 sampled answers an image, MaxRL reaches an NLL of {ours['nll']:.2f} and solves "
        f"{shares['MaxRL N=64']:.1f} % of the images within 128 attempts; {best} reaches {theirs['nll']:.2f} and "
        f"{shares[best]:.1f} % (MaxRL's NLL is {max(ratio, 1 / ratio):.1f} times {better}). Cross-entropy, which is "
        f"shown the answers, has {exact['nll']:.2f} and {shares['cross-entropy']:.1f} %."
    )


def _plot(ctx: Context, curves: dict[str, list[dict[str, float]]]) -> str:
    figure, axes = plots.figure(1, 3, size=(14, 4.2))
    epochs = list(range(1, EPOCHS + 1))
    for ax, metric, label in (
        (axes[0], "nll", "test NLL [nats]"),
        (axes[1], "pass@128", "test pass@128 (share of images)"),
    ):
        series = {name: (epochs, [m[metric] for m in seen]) for name, seen in curves.items()}
        scale: dict[str, Any] = {"yscale": "log"} if metric == "nll" else {"ylim": (0, 1.02)}
        plots.lines(series, xlabel="epoch", ylabel=label, title=label.split(" [")[0].split(" (")[0], ax=ax, **scale)
    axes[0].legend(loc="center right", bbox_to_anchor=(1.0, 0.62))  # between the curves, which the corner is not
    p = torch.logspace(-3, -0.005, 60, dtype=torch.float64)
    weights = {
        "maximum likelihood, 1/p": weight(p, "ml"),
        "MaxRL N=64 (order 63)": weight(p, order=63),
        "MaxRL N=16 (order 15)": weight(p, order=15),
        "GRPO": weight(p, "grpo"),
        "RLOO": weight(p, "rloo"),
    }
    series = {name: (p[::6].tolist(), w[::6].tolist()) for name, w in weights.items()}
    plots.lines(
        series,
        xlabel="pass rate p of a prompt",
        ylabel="weight w(p) of its gradient",
        title="What each objective looks at",
        ax=axes[2],
        xscale="log",
        yscale="log",
    )
    return str(plots.save(figure, ctx.out_file("digits.png"))[0])
