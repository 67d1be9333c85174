"""`dppo pack`: all packers on one list of lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from dppo.logs import LogError, read_lengths
from dppo.packing import (
    Packing,
    pack_best_fit_decreasing,
    pack_first_fit_decreasing,
    pack_next_fit,
    pack_window,
    pad_batches,
)
from icml26_shared.console import Context


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Handler of the command."""
    lengths = read_lengths(args.lengths)
    if not len(lengths):
        raise LogError(f"{args.lengths} has no lengths")
    options = {"capacity": args.capacity, "overflow": args.overflow}
    packers: dict[str, tuple[Callable[[], Packing], str]] = {
        f"padding, batches of {args.batch_size}": (lambda: pad_batches(lengths, args.batch_size), "kept"),
        "next fit (window 1)": (lambda: pack_next_fit(lengths, **options), "kept"),
        f"window {args.window}": (lambda: pack_window(lengths, window=args.window, **options), "head first"),
        "first fit decreasing": (lambda: pack_first_fit_decreasing(lengths, **options), "lost"),
        "best fit decreasing": (lambda: pack_best_fit_decreasing(lengths, **options), "lost"),
    }
    found = []
    for name, (packer, order) in packers.items():
        start = time.perf_counter()
        packing = packer()
        seconds = time.perf_counter() - start
        found.append(
            {"packer": name, "rows": len(packing.rows), "density": packing.density, "order": order, "seconds": seconds}
        )
    ctx.table(
        f"{len(lengths)} sequences, {int(lengths.sum())} tokens, rows of {args.capacity}",
        ["packer", "rows", "density", "arrival order", "seconds"],
        [list(row.values()) for row in found],
    )
    ours, padded = found[2]["density"], found[0]["density"]
    ctx.say(f"Window {args.window} fills {ours:.1%} of its rows; padding fills {padded:.1%} of its batches.")
    return {"sequences": len(lengths), "tokens": int(lengths.sum()), "capacity": args.capacity, "packers": found}
