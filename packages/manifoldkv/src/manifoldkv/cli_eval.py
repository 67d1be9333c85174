"""Commands about long-context tasks: ``ruler generate``, ``eval``, ``longbench``."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from icml26_shared import models
from icml26_shared.errors import UserError
from manifoldkv import __version__

if TYPE_CHECKING:
    from icml26_shared.console import Context
    from manifoldkv.eval import Setting

FULL = "full"
_OWN = "calibrated, snapkv"  # metrics of these commands beside those of KVConfig
_DESCRIBES = ("protocol", "n_sink", "n_recent", "window", "new_tokens")  # what results depend on


def ruler_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ruler generate``."""
    parser.add_argument("--task", required=True, help="niah_single_1 ... niah_multiquery, niah_3key, vt, cwe or fwe")
    parser.add_argument("--length", type=int, required=True, help="tokens of each prompt, generated ones included")
    parser.add_argument("--num-samples", type=int, default=50, help="default 50")
    parser.add_argument("--tokenizer", default="smollm2", help="smollm2 (default) or a local folder with a tokenizer")
    parser.add_argument(
        "--haystack", help="text file for the essay tasks (default: ICML26_DATA/manifoldkv/emerson_essays.txt)"
    )
    parser.add_argument("-o", dest="folder", metavar="DIR", help="folder for TASK/validation.jsonl (default: --out)")


def ruler_generate(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Write ``OUT/TASK/validation.jsonl`` in the benchmark's own format."""
    from icml26_shared.evaluation import ruler as tasks

    if args.task not in tasks.TASKS:
        raise UserError(f"--task {args.task!r} is unknown; choose from {', '.join(tasks.TASKS)}")
    _at_least_one(args, "num_samples")
    path = Path(args.folder or ctx.out) / args.task / "validation.jsonl"
    _require_writable(path.parent)
    tokenizer = _tokenizer(args.tokenizer)
    with ctx.progress(args.task, args.num_samples) as bar:
        samples = tasks.generate(
            args.task,
            tokenizer,
            args.length,
            args.num_samples,
            ctx.seed,
            args.haystack,
            progress=lambda: bar.advance(1),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks.write_jsonl(path, samples)
    longest = max(sample.length for sample in samples)
    ctx.say(f"{len(samples)} samples of {args.task}, at most {longest} of {args.length} tokens: {path}")
    return {"path": str(path), "samples": len(samples), "longest": longest}


def _require_writable(folder: Path) -> None:
    """Says so before the work is done; makes nothing, since the work may yet fail."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"-o {folder.parent}: cannot write into {there}; give a folder that can be written to")


def _tokenizer(name: str) -> Any:
    """Of a named model or of a local folder, which needs no weights."""
    from icml26_shared.errors import require

    transformers = require("transformers", "manifoldkv[transformers]")
    folder = models.path(name) if name in models.MODELS else Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"no tokenizer at {name}; give one of {', '.join(models.MODELS)} or a local folder with one")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {said[0]}") from error


def _at_least_one(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be 1 or more")


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``eval``."""
    parser.add_argument("--data", required=True, help="folder of TASK/validation.jsonl files, or one such file")
    _run_arguments(parser)


def longbench_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``longbench``."""
    parser.add_argument("--data", required=True, help="folder of LongBench's *.jsonl files, or one of them")
    parser.add_argument(
        "--max-length", type=int, default=7500, help="context tokens; longer ones lose their middle (default 7500)"
    )
    _run_arguments(parser)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2 (default) or a local Hugging Face folder")
    parser.add_argument(
        "--metric", nargs="+", default=["auto"], help="metrics to compare, also calibrated and snapkv (default auto)"
    )
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5], help="shares removed, in [0, 1) (default 0.5)")
    parser.add_argument("--protocol", choices=("query-agnostic", "query-aware"), default="query-agnostic")
    parser.add_argument("--window", type=int, help="tokens per window for local centroids")
    parser.add_argument("--n-sink", type=int, default=0, help="first tokens always kept (default 0)")
    parser.add_argument("--n-recent", type=int, default=0, help="last tokens always kept (default 0)")
    parser.add_argument("--num-samples", type=int, help="samples per task at most")
    parser.add_argument("--new-tokens", type=int, help="cap on the generated tokens")
    models.dtype_argument(parser, "bfloat16", "float16", "float32")
    parser.add_argument("-o", dest="results", metavar="FILE", help="results file (default: results.jsonl in --out)")


def settings_of(args: argparse.Namespace, seed: int) -> dict[str, Setting]:
    """The settings to compare, by ``metric@ratio``, the full cache first."""
    from manifoldkv.config import KVConfig, Metric
    from manifoldkv.eval import SnapKV

    found: dict[str, Setting] = {FULL: None}
    common: dict[str, Any] = {"n_sink": args.n_sink, "n_recent": args.n_recent, "seed": seed}
    for ratio in args.ratio:
        for metric in args.metric:
            if metric == "snapkv":
                KVConfig(compression_ratio=ratio)  # checks the ratio
                found[f"{metric}@{ratio:g}"] = SnapKV(ratio)
                continue
            own: dict[str, Any] = {"metric": metric}
            if metric == "calibrated":
                own = {"metric": "decomposed", "rho0": "mean", "rho_x": "mean"}
            elif metric not in get_args(Metric):
                raise UserError(f"--metric {metric!r} is unknown; choose from {', '.join(get_args(Metric))}, {_OWN}")
            window = args.window if own["metric"] in ("auto", "l2", "cosine", "cosine_mean", "decomposed") else None
            found[f"{metric}@{ratio:g}"] = KVConfig(compression_ratio=ratio, window=window, **own, **common)
    return found


def evaluate(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """RULER-style accuracy of every setting; finished (task, index, setting) lines are not computed again."""
    from icml26_shared.evaluation import ruler as tasks

    source = Path(args.data)
    files = sorted(source.glob("*/validation.jsonl")) if source.is_dir() else [source]
    if not files:
        raise UserError(
            f"no TASK/validation.jsonl under {source}; make some with: manifoldkv ruler generate ... -o {source}"
        )
    _at_least_one(args, "num_samples")
    samples = [sample for file in files for sample in tasks.read_jsonl(file)[: args.num_samples]]

    def run(
        model: Any, tokenizer: Any, settings: Mapping[str, Setting], store: Any, advance: Any
    ) -> list[dict[str, Any]]:
        from manifoldkv.eval import run_eval

        return run_eval(model, tokenizer, samples, settings, args.protocol, store, args.new_tokens, advance)

    return _evaluate(ctx, args, len(samples), run)


def longbench(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """LongBench scores of every setting; resumable like ``eval``."""
    from icml26_shared.evaluation import longbench as bench

    _at_least_one(args, "num_samples", "max_length")
    counts: Counter[str] = Counter()
    examples = []
    for example in bench.load(args.data):
        counts[example.dataset] += 1
        if args.num_samples is None or counts[example.dataset] <= args.num_samples:
            examples.append(example)

    def run(
        model: Any, tokenizer: Any, settings: Mapping[str, Setting], store: Any, advance: Any
    ) -> list[dict[str, Any]]:
        from manifoldkv.eval import run_longbench

        return run_longbench(
            model, tokenizer, examples, settings, args.protocol, store, args.max_length, args.new_tokens, advance
        )

    return _evaluate(ctx, args, len(examples), run)


def _evaluate(
    ctx: Context, args: argparse.Namespace, count: int, run: Callable[..., list[dict[str, Any]]]
) -> dict[str, Any]:
    from icml26_shared.checkpoint import JsonlStore

    _at_least_one(args, "new_tokens")
    dtype = models.chosen_dtype(args.dtype)
    settings = settings_of(args, ctx.seed)
    described = {name: getattr(args, name) for name in _DESCRIBES}
    described |= {"dtype": dtype, "model": str(args.model), "seed": ctx.seed, "version": __version__}
    path = Path(args.results) if args.results else ctx.out_file("results.jsonl")
    with JsonlStore(path, settings=described) as store, ctx.progress("answers", count * len(settings)) as bar:
        model, tokenizer = models.load(args.model, dtype=dtype)
        rows = run(model, tokenizer, settings, store, bar.advance)
    means = summarise(rows)
    tasks = list(dict.fromkeys(task for task, _ in means))
    table = [[name, *(means.get((task, name)) for task in tasks)] for name in settings]
    ctx.table(f"Mean score ({args.protocol})", ["setting", *tasks], table)
    ctx.say(f"results: {path}")
    return {"results": str(path), "scores": [{"task": t, "setting": s, "score": v} for (t, s), v in means.items()]}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Mean score by (task, setting)."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        scores.setdefault((row["task"], row["config"]), []).append(row["score"])
    return {key: sum(values) / len(values) for key, values in scores.items()}
