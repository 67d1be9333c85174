"""`dppo train`: a TRL run from one YAML file."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dppo.logs import read_lines
from icml26_shared.checkpoint import atomic_write_text
from icml26_shared.console import Context
from icml26_shared.errors import UserError, require

KEYS = {"model", "data", "verifier", "trainer", "output_dir"}


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Handler of the command."""
    settings = read_config(args.config)
    require("trl", "dppo[trl]")
    trainer = make_trainer(settings, seed=ctx.seed)
    folder = Path(settings["output_dir"])
    checkpoint = find_checkpoint(folder, args.resume)
    ctx.note(f"resuming from {checkpoint}" if checkpoint else f"starting a new run in {folder}")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "model"))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    atomic_write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in trainer.state.log_history))
    result = summary(rows, trainer.state.global_step)
    lines = "\n".join(f"- {name}: {value}" for name, value in result.items())
    atomic_write_text(folder / "report.md", f"# dppo train\n\n{lines}\n")
    ctx.table("trained", ["figure", "value"], [[name, value] for name, value in result.items()])
    return {"output_dir": str(folder), **result}


def summary(rows: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """First and last reward, and what was saved."""

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    return {
        "steps": steps,
        "first_reward": rows[0].get("reward") if rows else None,
        "last_reward": rows[-1].get("reward") if rows else None,
        "prompts_kept": mean("dppo/prompts_kept"),
        "completions_kept": mean("dppo/completions_kept"),
        "speedup_tokens": mean("dppo/speedup_tokens"),
    }


def read_config(path: str | Path) -> dict[str, Any]:
    """The YAML file: model (folder or name), data (JSONL with prompt and answer), verifier, output_dir, and trainer,
    the arguments of DynamicPruningConfig.

    Raises:
        FileNotFoundError; UserError: not YAML, unknown or missing keys.
    """
    yaml = require("yaml", "dppo[trl]")
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold keys and values: {', '.join(sorted(KEYS))}")
    unknown, missing = set(settings) - KEYS, {"model", "data", "output_dir"} - set(settings)
    if unknown or missing:
        wrong = {"unknown": unknown, "missing": missing}
        what = "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in wrong.items() if names)
        raise UserError(f"{path}: {what} (keys: {', '.join(sorted(KEYS))})")
    return {"verifier": "exact", "trainer": {}, **settings}


def find_checkpoint(folder: Path, resume: str) -> str | None:
    """The checkpoint to go on from: the newest whole one ("auto"), none ("no"), or the folder given."""
    if resume == "no":
        return None
    if resume != "auto":
        if not Path(resume).is_dir():
            raise FileNotFoundError(f"--resume {resume}: no such checkpoint folder (or auto, or no)")
        return resume
    steps = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    return next((str(steps[step]) for step in sorted(steps, reverse=True) if _is_whole(steps[step])), None)


def _is_whole(checkpoint: Path) -> bool:
    """Whether saving it came to its end: trainer_state.json is written last."""
    try:
        return isinstance(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")), dict)
    except (FileNotFoundError, ValueError):
        return False


def make_trainer(settings: dict[str, Any], *, seed: int) -> Any:
    """The trainer of a config.

    Raises:
        UserError: options that the trainer's config does not have, data without prompts and answers.
    """
    from datasets import Dataset

    from dppo.integrations.trl import DynamicPruningConfig, DynamicPruningTrainer

    rows = read_data(settings["data"])
    verify = find_verifier(settings["verifier"])
    options = {"report_to": [], "seed": seed, **settings["trainer"], "output_dir": str(settings["output_dir"])}
    try:
        config = DynamicPruningConfig(**options)
    except TypeError as error:
        raise UserError(f"trainer: {error}") from error

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(verify(_text(c), a)) for c, a in zip(completions, answer, strict=True)]

    model = settings["model"]
    if not isinstance(model, str):
        raise UserError(f"model: a folder or a name, got {model!r}")
    return DynamicPruningTrainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows))


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def read_data(path: str | Path) -> list[dict[str, Any]]:
    """Rows {"prompt", "answer"}; "question" and "problem" are read as prompts too."""
    rows = []
    for number, line in read_lines(Path(path)):
        try:
            row = json.loads(line)
            prompt = next(row[name] for name in ("prompt", "question", "problem") if name in row)
            rows.append({"prompt": prompt, "answer": str(row["answer"])})
        except (json.JSONDecodeError, StopIteration, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}: expected an object with prompt and answer ({error!r})") from error
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def find_verifier(name: str) -> Callable[[str, str], bool]:
    """ "exact", "contains", "boxed" (the last \\boxed{...}), "number" (the last number), or "module:function"."""
    built_in: dict[str, Callable[[str, str], bool]] = {
        "exact": lambda text, answer: text.strip() == answer.strip(),
        "contains": lambda text, answer: answer.strip() in text,
        "boxed": lambda text, answer: _last(r"\\boxed\{([^{}]*)\}", text) == answer.strip(),
        "number": lambda text, answer: _last(r"-?\d[\d,]*(?:\.\d+)?", text).replace(",", "") == answer.strip(),
    }
    if name in built_in:
        return built_in[name]
    module, _, function = str(name).partition(":")
    if not function:
        raise UserError(f"verifier {name!r}: one of {', '.join(built_in)}, or module:function")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"verifier {name!r} cannot be imported: {error}") from error


def _last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1].strip() if found else ""
