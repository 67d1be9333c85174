"""``tucker bench``: time, memory and parameters of Tucker attention against multi-head attention."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from icml26_shared.bench import Bench, BenchReport, Measured, Rule, compare, peak_memory
from tucker_attention.attention import TuckerAttention
from tucker_attention.baselines import GroupedAttention
from tucker_attention.cache import TuckerCache
from tucker_attention.config import TuckerConfig
from tucker_attention.counts import cache_width, param_count

if TYPE_CHECKING:
    from icml26_shared.console import Context

BATCH, TOKENS, WIDTH, HEADS, RANKS = 4, 512, 768, 12, (8, 64, 64)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("--pairs", type=int, default=9, help="pairs of each comparison (default 9)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")


def run(ctx: Context, args: argparse.Namespace) -> BenchReport:
    """All rows."""
    bench = Bench(ctx, libraries=["transformers"])
    for threads in (1, 2) if args.device == "cpu" else (0,):
        _forward_row(bench, args.pairs, threads, args.device)
    _count_rows(bench)
    _decode_row(bench, args.device)
    _spectra_row(bench)
    return bench.report()


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Inside, torch uses this many threads; 0 leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pair(device: str = "cpu") -> tuple[TuckerAttention, GroupedAttention, torch.Tensor]:
    """A Tucker layer, merged, MHA over torch's fused attention, and tokens."""
    torch.manual_seed(0)
    ours = TuckerAttention(TuckerConfig(WIDTH, HEADS, RANKS)).merge().to(device)
    return ours, GroupedAttention(WIDTH, HEADS).eval().to(device), torch.randn(BATCH, TOKENS, WIDTH, device=device)


def _forward_row(bench: Bench, pairs: int, threads: int, device: str) -> None:
    def measure() -> Measured:
        ours, theirs, x = pair(device)
        with threads_set(threads), torch.no_grad():
            found = compare(lambda: ours(x), lambda: theirs(x), pairs=pairs)
            mine, peer = peak_memory(lambda: ours(x)), peak_memory(lambda: theirs(x))
        times = (peer.torch_bytes or 0) / max(1, mine.torch_bytes or 0)
        return Measured(found, peak=mine, extra={"peer's peak over ours": times})

    label = f"forward ({BATCH}, {TOKENS}, {WIDTH}), 12 heads, ranks 8,64,64, {threads} thread{'s' * (threads != 1)}"
    goals = [Rule("ratio", ">=", round(1 / 0.6, 4)), Rule("peer's peak over ours", ">=", 2)]
    bench.row(label, measure, peer="MHA over scaled_dot_product_attention", goal=goals)


def _count_rows(bench: Bench) -> None:
    def parameters() -> dict[str, float]:
        layer = TuckerAttention(TuckerConfig(WIDTH, HEADS, RANKS))
        held = sum(p.numel() for p in layer.parameters())
        return {"over the formula": held / param_count("tucker", d_model=WIDTH, n_heads=HEADS, ranks=RANKS)}

    exact = [Rule("over the formula", ">=", 1), Rule("over the formula", "<=", 1)]
    bench.row("parameters", parameters, goal=exact)

    def cached() -> dict[str, float]:
        layer, cache = TuckerAttention(TuckerConfig(WIDTH, HEADS, RANKS)), TuckerCache()
        with torch.no_grad():
            layer(torch.randn(2, 100, WIDTH), cache=cache)
        formula = 2 * 100 * 4 * cache_width("tucker", d_model=WIDTH, n_heads=HEADS, ranks=RANKS)
        mha = 2 * 100 * 4 * cache_width("mha", d_model=WIDTH, n_heads=HEADS)
        return {"over the formula": cache.nbytes / formula, "times smaller than MHA's": mha / cache.nbytes}

    bench.row("bytes of the cache", cached, goal=exact)

    def slope() -> dict[str, float]:
        widths = (512, 1024, 2048, 4096)
        found = {}
        for name, options in (("tucker", {"ranks": RANKS}), ("mha", {})):
            counts = [param_count(name, d_model=d, n_heads=HEADS, **options) for d in widths]  # type: ignore[arg-type]
            found[f"slope, {name}"] = math.log(counts[-1] / counts[0]) / math.log(widths[-1] / widths[0])
        return found

    bench.row("log parameters against log d at fixed ranks", slope, goal=Rule("slope, tucker", "<=", 1.05))


def _decode_row(bench: Bench, device: str) -> None:
    def measure() -> dict[str, float]:
        taken = {}
        for heads in (4, 16):
            layer = TuckerAttention(TuckerConfig(WIDTH, heads, (4, 64, 64))).merge().to(device)
            with torch.no_grad(), threads_set(1):
                cache = TuckerCache(8200)
                layer(torch.randn(1, 8192, WIDTH, device=device), cache=cache)
                token = torch.randn(1, 1, WIDTH, device=device)
                best = math.inf
                for _ in range(30):
                    start = time.perf_counter()
                    layer(token, cache=cache)
                    best = min(best, time.perf_counter() - start)
                    cache.crop(8192)
            taken[heads] = best
        return {"time at 16 heads over 4": taken[16] / taken[4], "ms at 16 heads": 1e3 * taken[16]}

    bench.row("decode step, 8192 cached tokens", measure, goal=Rule("time at 16 heads over 4", "<=", 1.5))


def _spectra_row(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        from icml26_shared import models
        from tucker_attention.spectra import attention_spectra

        model = models.load("smollm2", dtype="float32")[0]
        start = time.perf_counter()
        attention_spectra(model)
        seconds = time.perf_counter() - start
        layer = torch.nn.ModuleList([model.model.layers[0].self_attn])
        peak = peak_memory(lambda: attention_spectra(layer), warmup=1)
        return {"seconds": seconds, "peak over d^2 float64": (peak.torch_bytes or 0) / (8 * 576 * 576)}

    goals = [Rule("seconds", "<=", 90), Rule("peak over d^2 float64", "<=", 40)]
    bench.row("attention_spectra of SmolLM2-135M", measure, goal=goals)
