"""``robuq demo``: train a small diffusion transformer on digits, quantise it four ways, and look at what it still
draws.
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from icml26_shared import plots
from robuq.config import RobuQConfig
from robuq.eval import digits
from robuq.eval.tiny_dit import sample
from robuq.surgery import freeze, packed_bytes, quantised_layers

if TYPE_CHECKING:
    from icml26_shared.console import Context

FP_STEPS, QAT_STEPS, WARM = 1000, 60, 25
SAMPLES, DDIM_STEPS = 100, 20
TYPES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def runs() -> dict[str, digits.Run]:
    """The quantised models."""

    def config(bits: Any) -> RobuQConfig:
        return RobuQConfig.for_dit(attn_bits=None, rank=4, act_bits=bits)

    uniform = {f"W1.58A{bits}": digits.Run(config(bits), steps=QAT_STEPS) for bits in (4, 3, 2)}
    return {**uniform, "W1.58A2 AMPN": digits.Run(config(4), avg_bits=2.0, warm=WARM, steps=QAT_STEPS)}


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train, quantise, tabulate, plot; the conclusion is drawn from the figures of this run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small are slower on several cores
    try:
        return _run(ctx)
    finally:
        torch.set_num_threads(threads)


def _run(ctx: Context) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {}
    images: dict[str, Tensor] = {}
    todo = runs()
    with ctx.progress("training", FP_STEPS + len(todo) * QAT_STEPS * 2) as bar:
        bar.update("training in floating point")
        fp = digits.train_fp(ctx.seed, FP_STEPS, on_step=lambda step: bar.advance())
        results["FP32"], images["FP32"] = _judge(fp)
        for name, settings in todo.items():
            bar.update(f"quantising and training: {name}")
            model, training = digits.train_quantised(
                fp,
                settings,
                ctx.seed,
                on_step=lambda step, loss: bar.advance(2),  # a quantised step takes longer
            )
            packed = freeze(copy.deepcopy(model)).eval()
            results[name], images[name] = _judge(packed)
            layers = [(layer, module) for layer, module in quantised_layers(packed) if not module.is_ada]
            results[name]["bits"] = {layer: module.bits for layer, module in layers}
            if training.plan is not None:
                results[name]["average"] = training.plan.avg
    columns = ["model", "validation loss", "FD", "accuracy of samples", "bytes", "smaller"]
    whole = results["FP32"]["bytes"]
    rows = [
        [name, r["loss"], r["fd"], r["accuracy"], r["bytes"], f"{whole / r['bytes']:.1f}x"]
        for name, r in results.items()
    ]
    ctx.table(f"Diffusion transformer on digits, {QAT_STEPS} steps after quantising (seed {ctx.seed})", columns, rows)
    paths = [_plot_samples(ctx, images), _plot_bits(ctx, results)]
    said = _conclusion(results)
    ctx.say(said)
    ctx.note(f"figures: {', '.join(paths)}")
    return {"results": results, "plots": paths, "conclusion": said}


def _judge(model: nn.Module) -> tuple[dict[str, Any], Tensor]:
    labels = torch.arange(SAMPLES) % 10
    images = sample(model, labels, steps=DDIM_STEPS)
    return {
        "loss": digits.validation_loss(model),
        **digits.judge_images(images, labels),
        "bytes": packed_bytes(model),
    }, images[:20]


def _conclusion(results: dict[str, dict[str, Any]]) -> str:
    fp, uniform, mixed = results["FP32"], results["W1.58A2"], results["W1.58A2 AMPN"]
    better = "lower" if mixed["loss"] < uniform["loss"] else "higher"
    return (
        f"With ternary weights and 2-bit activations the model takes {uniform['bytes'] / 1e3:.0f} kB instead of "
        f"{fp['bytes'] / 1e3:.0f} kB ({fp['bytes'] / uniform['bytes']:.1f} times smaller) and its digits are read as "
        f"asked {100 * uniform['accuracy']:.0f} % of the time ({100 * fp['accuracy']:.0f} % in floating point). Bits "
        f"allocated by AMPN at the same average give a loss of {mixed['loss']:.4f}, {better} than uniform bits with "
        f"{uniform['loss']:.4f}."
    )


def _plot_samples(ctx: Context, images: dict[str, Tensor]) -> str:
    """One row a model, one column a digit; all start from the same noise."""
    figure, ax = plots.figure(size=(9, 0.85 * len(images) + 0.9))
    cell = 10  # pixels of an image with its frame
    rows = [torch.cat(list(torch.nn.functional.pad(d[:10, 0], (1, 1, 1, 1), value=1.0)), 1) for d in images.values()]
    ax.imshow(torch.cat(rows, 0).numpy(), cmap="gray", vmin=-1, vmax=1, aspect="equal")
    ax.set_xticks([cell * i + cell / 2 for i in range(10)], [str(i) for i in range(10)])
    ax.set_yticks([cell * i + cell / 2 for i in range(len(images))], list(images))
    ax.set(xlabel="digit asked for", ylabel="model", title="Samples from the same noise")
    ax.grid(False)
    return str(plots.save(figure, ctx.out_file("samples.png"))[0])


def _plot_bits(ctx: Context, results: dict[str, dict[str, Any]]) -> str:
    bits = results["W1.58A2 AMPN"]["bits"]
    depth = 1 + max(int(name.split(".")[1]) for name in bits)
    series = {f"block {i}": [float(bits[f"blocks.{i}.{kind}"]) for kind in TYPES] for i in range(depth)}
    figure, ax = plots.figure(size=(8, 4))
    title = f"Activation bits by AMPN, average {results['W1.58A2 AMPN']['average']:.2f} over MACs"
    plots.bars(TYPES, series, xlabel="layer", ylabel="activation bits", title=title, ax=ax, ylim=(0, 4.8))
    return str(plots.save(figure, ctx.out_file("bits.png"))[0])
