"""``manifoldkv demo``: what dropping part of the key-value cache does to the answers of a small real model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared import models
from icml26_shared.checkpoint import JsonlStore
from icml26_shared.errors import UserError, require
from manifoldkv import __version__
from manifoldkv.baselines import key_norm, keydiff, random_selection, streaming_llm
from manifoldkv.config import KVConfig

if TYPE_CHECKING:
    from icml26_shared.console import Context
    from manifoldkv.eval import Setting

TASKS = {"niah_single_1": "one key", "niah_3key": "three keys"}
RATIOS = (0.2, 0.5, 0.75)
FULL = "full cache"
AUTO = "auto (ManifoldKV)"
_GENERATED = 128  # what the tasks reserve; the prompts are that much shorter than the length


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--model", default="smollm2", help="smollm2 (default) or a local Hugging Face folder")
    parser.add_argument("--samples", type=int, default=4, help="samples per task (default 4)")
    parser.add_argument("--tokens", type=int, default=400, help="length of the prompts in tokens (default 400)")
    models.dtype_argument(parser, "bfloat16", "float32")
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens generated at most per answer (default 12)")


def settings_at(ratio: float, seed: int) -> dict[str, Setting]:
    """The compared rules at one ratio, by name; only StreamingLLM and SnapKV protect any tokens."""
    from manifoldkv.eval import SnapKV

    plain: dict[str, Any] = {"compression_ratio": ratio, "n_sink": 0, "n_recent": 0}
    return {
        AUTO: KVConfig(metric="auto", **plain),
        "L2 (ManifoldKV)": KVConfig(metric="l2", **plain),
        "L2, radius-calibrated": KVConfig(metric="decomposed", rho0="mean", rho_x="mean", **plain),
        "cosine (KeyDiff)": keydiff(ratio),
        "SnapKV": SnapKV(ratio),
        "key norm": key_norm(ratio),
        "StreamingLLM": streaming_llm(ratio),
        "random": random_selection(ratio, seed),
    }


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Compress prompts under every rule, ask for the needles, show accuracy against what was kept."""
    if args.samples < 1 or args.new_tokens < 1:
        raise UserError(f"--samples {args.samples} and --new-tokens {args.new_tokens} must be 1 or more")
    for module in ("transformers", "matplotlib", "wonderwords"):  # said now, not after the model has answered
        require(module, "manifoldkv[demo]")
    ctx.note(f"{args.samples} prompts for each of {len(TASKS)} tasks, every rule at {len(RATIOS)} ratios")
    rows, reason = _results(ctx, args)
    accuracy = _accuracy(rows)
    _show(ctx, accuracy)
    conclusion = conclude(accuracy)
    picture = ctx.out_file("demo.png")
    draw(accuracy, picture, f"{Path(args.model).name}, {args.tokens}-token prompts, {args.samples} samples a task")
    ctx.say(conclusion)
    ctx.say(f"metric='auto': {reason}")
    ctx.say(f"picture: {picture}")
    return {
        "tasks": list(TASKS),
        "samples": args.samples,
        "tokens": args.tokens,
        "accuracy": [
            {"method": method, "task": task, "removed": ratio, "accuracy": value}
            for (method, task, ratio), value in accuracy.items()
        ],
        "auto": reason,
        "conclusion": conclusion,
        "picture": str(picture),
    }


def _results(ctx: Context, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Finished rows and the diagnosis, from disk where an earlier run got that far."""
    settings: dict[str, Setting] = {FULL: None}
    for ratio in RATIOS:
        settings |= {f"{name}@{ratio}": setting for name, setting in settings_at(ratio, ctx.seed).items()}
    dtype = models.chosen_dtype(args.dtype)
    run_settings = {key: getattr(args, key) for key in ("model", "tokens", "new_tokens")}
    run_settings |= {"dtype": dtype, "seed": ctx.seed, "version": __version__}
    total = len(TASKS) * args.samples * len(settings)
    with (
        JsonlStore(ctx.out_file("demo.jsonl"), key=("task", "index", "config"), settings=run_settings) as store,
        ctx.progress("loading the model", total) as bar,
    ):
        from icml26_shared.evaluation import ruler
        from manifoldkv.eval import run_eval

        model, tokenizer = models.load(args.model, dtype=dtype)
        bar.update("prompts")
        samples = {task: _prompts(ruler, task, tokenizer, args, ctx.seed) for task in TASKS}
        rows = []
        for task, own in samples.items():
            bar.update(f"{task}: answers")
            rows += run_eval(
                model, tokenizer, own, settings, store=store, max_new_tokens=args.new_tokens, advance=bar.advance
            )
        key = ("diagnosis", 0, AUTO)
        if not store.done(key):
            reason = _diagnose(model, tokenizer, own[0].context)
            store.append({"task": key[0], "index": key[1], "config": key[2], "reason": reason})
        kept = store.get(key)
    return rows, str(kept["reason"]) if kept else ""


def _prompts(ruler: Any, task: str, tokenizer: Any, args: argparse.Namespace, seed: int) -> list[Any]:
    try:
        return list(ruler.generate(task, tokenizer, args.tokens + _GENERATED, args.samples, seed=seed))
    except ValueError as error:
        raise UserError(
            f"--tokens {args.tokens} is too few (the task adds {_GENERATED} for the answer): {error}"
        ) from error


def _diagnose(model: Any, tokenizer: Any, text: str) -> str:
    from manifoldkv.geometry import diagnose

    found = diagnose(model, tokenizer(text, return_tensors="pt").input_ids)
    return f"{found.metric}, because {found.model.reason}"


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, float], float]:
    """Mean score by (method, task, ratio removed); the full cache has ratio 0."""
    scores: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        method, _, ratio = row["config"].partition("@")
        scores.setdefault((method, row["task"], float(ratio or 0)), []).append(row["score"])
    return {key: sum(values) / len(values) for key, values in scores.items()}


def _methods(accuracy: Mapping[tuple[str, str, float], float]) -> list[str]:
    return list(dict.fromkeys(method for method, _, _ in accuracy))


def _show(ctx: Context, accuracy: Mapping[tuple[str, str, float], float]) -> None:
    columns = ["rule", *(f"{words} −{ratio:.0%}" for words in TASKS.values() for ratio in RATIOS)]
    rows = []
    for method in _methods(accuracy):
        at = RATIOS if method != FULL else (0.0,) * len(RATIOS)
        rows.append([method, *(accuracy[method, task, ratio] for task in TASKS for ratio in at)])
    ctx.table("Needles found (share) after removing part of the cache before the question is seen", columns, rows)


def conclude(accuracy: Mapping[tuple[str, str, float], float]) -> str:
    """One line drawn from the figures: what the rules keep of the full cache's accuracy at half the cache."""

    def mean(method: str, ratio: float) -> float:
        return sum(accuracy[method, task, ratio] for task in TASKS) / len(TASKS)

    full = mean(FULL, 0.0)
    half = {method: mean(method, 0.5) for method in _methods(accuracy) if method != FULL}
    best = max(half.values())
    winners = " and ".join(method for method, value in half.items() if value == best)
    l2, auto = half["L2 (ManifoldKV)"], half[AUTO]
    return (
        f"With half of the cache removed, {winners} found {best:.0%} of the needles (full cache: {full:.0%}); "
        f"plain L2 found {l2:.0%}, and the metric that 'auto' chose found {auto:.0%}."
    )


def draw(accuracy: Mapping[tuple[str, str, float], float], path: Path, title: str) -> None:
    """Accuracy against the share of the cache kept, one panel a task, as PNG and SVG."""
    import matplotlib.pyplot as plt

    from icml26_shared import plots

    with plots.style():
        figure, axes = plt.subplots(1, len(TASKS), figsize=(10, 4.4), sharey=True, layout="constrained")
        for axis, (task, words) in zip(axes, TASKS.items(), strict=True):
            axis.axhline(accuracy[FULL, task, 0.0], color="0.4", linestyle="--", linewidth=1.2, label=FULL)
            methods = [method for method in _methods(accuracy) if method != FULL]
            for place, method in enumerate(methods):
                shift = (place - (len(methods) - 1) / 2) * 0.4  # lines that coincide stay visible side by side
                kept = [100 * (1 - ratio) + shift for ratio in RATIOS]
                values = [accuracy[method, task, ratio] for ratio in RATIOS]
                marker = "osD^vPX*"[place % 8]
                style = {"color": "0.6"} if method.startswith("random") else {}  # chance is the background
                axis.plot(kept, values, marker=marker, label=method, linewidth=2.4 if method == AUTO else 1.3, **style)
            axis.set(title=f"{words} in noise ({task})", xlabel="cache kept (% of tokens)", ylim=(-0.05, 1.05))
        axes[0].set_ylabel("needles found (share)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(title)
        plots.save(figure, path)
