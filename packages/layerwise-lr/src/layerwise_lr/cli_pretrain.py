"""``llr pretrain``: the paper's runs on FineWeb."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.checkpoint import atomic_write_json
from icml26_shared.errors import UserError, require

if TYPE_CHECKING:
    from icml26_shared.console import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``pretrain``."""
    parser.add_argument("--suite", required=True, choices=("llama60m", "llama1b"), help="which published run")
    parser.add_argument("--root", required=True, help="folder with FineWeb's *.parquet files")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer, or smollm2")
    parser.add_argument("--method", choices=("both", "llr", "uniform"), default="both", help="default both")
    parser.add_argument("--micro", type=int, default=8, help="sequences a forward pass and process (default 8)")
    parser.add_argument("--steps", type=int, help="fewer steps than published, for a trial")


def pretrain(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train with LLR and with one rate; start it with torchrun for several GPUs. Run again to go on."""
    from dataclasses import replace

    from icml26_shared import models
    from layerwise_lr.eval.pretrain import SUITES, Job, join_processes

    if args.micro < 1 or (args.steps is not None and args.steps < 1):
        raise UserError(f"--micro {args.micro} and --steps {args.steps} must be at least 1")
    transformers = require("transformers", "layerwise-lr[fineweb]")
    folder = models.path(args.tokenizer) if args.tokenizer in models.MODELS else Path(args.tokenizer)
    if not folder.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer} is not a folder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    suite = SUITES[args.suite] if args.steps is None else replace(SUITES[args.suite], steps=args.steps)
    device, results = join_processes(), {}
    for method in ("llr", "uniform") if args.method == "both" else (args.method,):
        job = Job(suite, Path(args.root), tokenizer, ctx.out_file(f"{args.suite}-{method}/state").parent,
                  llr=method == "llr", seed=ctx.seed, micro=args.micro, device=device)  # fmt: skip
        with ctx.progress(f"{args.suite}, {method}", suite.steps) as bar:
            results[method] = job.run(lambda step, bar=bar: bar.advance())
    atomic_write_json(ctx.out_file(f"{args.suite}.json"), results)
    ctx.table(
        args.suite, ["rates", "perplexity", "tokens"], [[m, r["perplexity"], r["tokens"]] for m, r in results.items()]
    )
    if len(results) == 2:
        llr, uniform = results["llr"]["perplexity"], results["uniform"]["perplexity"]
        ctx.say(f"Perplexity {llr:.2f} with LLR, {uniform:.2f} with one rate of {suite.lr:g}.")
    return {"suite": args.suite, "results": results}
