"""A whole training run in TRL from the command line: prompts, verifier, checkpoints, metrics and a report."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared import models
from icml26_shared.checkpoint import atomic_write_text
from icml26_shared.errors import UserError, require
from maxrl.eval.loading import load_model
from maxrl.eval.prompts import Prompt, load_prompts
from maxrl.eval.verifiers import Scorer

if TYPE_CHECKING:
    from icml26_shared.console import Context


def run_training(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """The command ``maxrl train``; see :mod:`maxrl.cli_train` for its arguments."""
    from maxrl.integrations.trl import MaxRLTrainer

    if args.resume not in ("auto", "no") and not Path(args.resume).is_dir():
        raise UserError(f"--resume {args.resume}: auto, no, or a checkpoint folder")
    out = ctx.out_file("report.md").parent
    prompts = load_prompts(args.data, args.limit)
    config = make_config(args, ctx.seed, out)
    checkpoint = _checkpoint(args.resume, out)
    if checkpoint is None:
        (out / "metrics.jsonl").unlink(missing_ok=True)
    scorer = Scorer(args.verifier, sandbox=args.sandbox, timeout=args.timeout, max_failures=args.max_verifier_failures)
    model, tokenizer = load_model(args.model, models.chosen_dtype(args.dtype))
    tokenizer.padding_side = "left"
    metrics = metrics_callback(out / "metrics.jsonl", ctx, int(config.max_steps))

    def verified(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [None if r != r else r for r in scorer(texts, answer)]

    try:
        trainer = MaxRLTrainer(
            model=model,
            reward_funcs=verified,
            args=config,
            train_dataset=make_dataset(prompts, args.chat),
            processing_class=tokenizer,
            callbacks=[metrics],
        )
        if checkpoint is not None:
            ctx.note(f"going on from {checkpoint}; --resume no starts again")
        with metrics.showing():
            trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(out / "model"))
    finally:
        scorer.close()
    result = write_report(out, config, len(prompts), scorer.failures)
    ctx.say(result["conclusion"])
    ctx.note(f"report: {out / 'report.md'}; model: {out / 'model'}")
    return result


def make_config(args: argparse.Namespace, seed: int, out: Path) -> Any:
    """``MaxRLConfig`` from the YAML file, with what the command line decides on top."""
    from maxrl.integrations.trl import MaxRLConfig

    given: dict[str, Any] = {}
    if args.config is not None:
        file = Path(args.config)
        if not file.is_file():
            raise UserError(f"no file at {args.config}: give a YAML file with fields of MaxRLConfig")
        yaml = require("yaml", "trl")
        try:
            given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise UserError(f"{args.config} is not YAML: {error}") from None
        if not isinstance(given, dict):
            raise UserError(f"{args.config}: fields and values are needed, got {type(given).__name__}")
    known = {f.name for f in fields(MaxRLConfig)}
    if unknown := sorted(set(given) - known):
        raise UserError(f"{args.config}: MaxRLConfig has no {', '.join(unknown)}")
    import torch

    defaults = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 10, "report_to": [], "num_generations": 8}
    defaults |= {"bf16": False, "use_cpu": not torch.cuda.is_available()}
    fixed = {"output_dir": str(out), "seed": seed, "disable_tqdm": True}
    if args.steps is not None:
        fixed["max_steps"] = args.steps
    return MaxRLConfig(**{**defaults, **given, **fixed})


def make_dataset(prompts: list[Prompt], chat: bool) -> Any:
    """Columns ``prompt`` (text, or one user message) and ``answer``."""
    datasets = require("datasets", "trl")
    ask = [[{"role": "user", "content": p.prompt}] if chat else p.prompt for p in prompts]
    return datasets.Dataset.from_dict({"prompt": ask, "answer": [p.answer for p in prompts]})


def _checkpoint(resume: str, out: Path) -> str | None:
    if resume == "no":
        return None
    if resume != "auto":
        return resume
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(out)) if out.is_dir() else None


def metrics_callback(path: Path, ctx: Context, total: int) -> Any:
    """A trainer callback that appends every log to ``path``, one JSON object a line, without the steps that a resumed
    run makes again, and moves a progress bar."""
    transformers = require("transformers", "trl")
    from contextlib import contextmanager

    class Metrics(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        bar: Any = None

        @contextmanager
        def showing(self) -> Any:
            with ctx.progress("training", total if total > 0 else None) as self.bar:
                yield

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rows = read_metrics(path)
            kept = [row for row in rows if row["step"] <= state.global_step]
            if len(kept) != len(rows):
                atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            if self.bar is not None:
                self.bar.advance(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and logs and "loss" in logs:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.bar is not None:
                self.bar.advance()

    return Metrics()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Complete rows of ``metrics.jsonl``; a last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_report(out: Path, config: Any, prompts: int, failures: int) -> dict[str, Any]:
    """``report.md`` and the run's result, from its metrics."""
    from icml26_shared.reports import markdown_table

    rows = read_metrics(out / "metrics.jsonl")
    if not rows:
        raise UserError(f"{out / 'metrics.jsonl'} has no step: the run made none (max_steps = {config.max_steps}?)")
    names = (
        "reward",
        "maxrl/frac_groups_no_success",
        "maxrl/frac_groups_all_success",
        "maxrl/dropped_tokens",
        "entropy",
    )
    tenth = max(1, len(rows) // 10)

    def average(part: list[dict[str, Any]], name: str) -> float:
        values = [float(row[name]) for row in part if row.get(name) is not None]
        return sum(values) / len(values) if values else float("nan")

    table = [[name, f"{average(rows[:tenth], name):.4g}", f"{average(rows[-tenth:], name):.4g}"] for name in names]
    order = rows[-1].get("maxrl/effective_order")
    first, last = average(rows[:tenth], "reward"), average(rows[-tenth:], "reward")
    objective = (
        f"the likelihood of success to order {float(order):.0f}" if order is not None else "no likelihood of any order"
    )
    said = (
        f"{rows[-1]['step']} steps of {config.estimator} with {config.num_generations} rollouts a prompt ascended "
        f"{objective}; the mean reward went from {first:.3f} to {last:.3f}."
    )
    text = [
        "# Training report",
        "",
        said,
        "",
        f"{prompts} prompts; loss type {config.loss_type}; learning rate {config.learning_rate:g}; "
        f"{failures} verifier failures.",
        "",
        markdown_table(["metric", f"first {tenth} steps", f"last {tenth} steps"], table),
        "",
    ]
    atomic_write_text(out / "report.md", "\n".join(text))
    return {
        "steps": rows[-1]["step"],
        "first_reward": first,
        "last_reward": last,
        "effective_order": None if order is None else float(order),
        "verifier_failures": failures,
        "metrics": str(out / "metrics.jsonl"),
        "report": str(out / "report.md"),
        "conclusion": said,
    }
