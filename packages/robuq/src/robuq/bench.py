"""``robuq bench``: memory and time of packed layers against float32, bfloat16 and transformers' BitNet layer."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.bench import Bench, BenchReport, Measured, Rule, compare, growth, peak_memory
from robuq.accounting import dit_xl2, packed_size
from robuq.allocation import allocate_bits
from robuq.config import RobuQConfig
from robuq.hadamard import hadamard
from robuq.packed import PackedLinear
from robuq.sensitivity import Sensitivity
from robuq.storage import save_model
from robuq.surgery import freeze, quantize

if TYPE_CHECKING:
    from icml26_shared.console import Context

SHAPES = ((1, 1152, 1152), (16, 1152, 4608), (64, 1152, 1152), (256, 1152, 3456), (2048, 1152, 1152))
# At least this ratio against float32: M = 1, M = 16, M >= 64, M >= 256.
GOALS = ((1, 1 / 1.5), (16, 1.0), (64, 1.3), (256, 1.5))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("--pairs", type=int, default=9, help="pairs of each comparison (default 9)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the GPU rows alone (default cpu)")


def run(ctx: Context, args: argparse.Namespace) -> BenchReport:
    """All rows."""
    bench = Bench(ctx, libraries=["numba", "transformers"])
    if args.device != "cpu":
        _gpu_rows(bench, args.device, args.pairs)
        return bench.report()
    _memory_rows(bench, ctx)
    for threads in (1, 2):
        _layer_rows(bench, args.pairs, threads)
    _cached_row(bench, args.pairs)
    _hadamard_rows(bench)
    _model_row(bench)
    _allocation_row(bench)
    _training_row(bench, args.pairs)
    return bench.report()


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Inside, torch and the kernels use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_layer(n: int, out: int, rank: int = 16, bits: int = 4) -> tuple[nn.Linear, PackedLinear]:
    """A linear layer and its packed form."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(n, out)
        copied = nn.Linear(n, out)
        copied.load_state_dict(linear.state_dict())
    packed = freeze(quantize(copied, RobuQConfig(rank=rank, act_bits=bits)))
    if not isinstance(packed, PackedLinear):
        raise TypeError(f"expected a packed layer, got {type(packed).__name__}")
    return linear.requires_grad_(False), packed


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory_rows(bench: Bench, ctx: Context) -> None:
    def layer() -> dict[str, float]:
        n = out = 1152
        packed = make_layer(n, out, rank=0)[1]
        held = sum(t.numel() * t.element_size() for name, t in packed.named_buffers() if name != "bias")
        return {"bytes": held, "bytes over the bound": held / (0.2506 * n * out + 8 * out + 4 * out + n / 8)}

    bench.row("bytes of a packed layer 1152 x 1152, r = 0", layer, goal=Rule("bytes over the bound", "<=", 1.0))
    for rank, bound in ((0, 14.5), (16, 12.5)):

        def model(rank: int = rank) -> dict[str, float]:
            found = packed_size(dit_xl2(), rank, ctx.out)
            return {"packed MB": found["packed"] / 1e6, "float32 MB": found["float32"] / 1e6,
                    "times smaller": found["float32"] / found["packed"]}  # fmt: skip

        bench.row(f"DiT-XL/2 on disk, r = {rank}", model, peer="float32", goal=Rule("times smaller", ">=", bound))
    bench.row("resident bytes of a loaded model over its file", lambda: _resident(ctx), goal=Rule("ratio", "<=", 1.15))


_RESIDENT = """
import gc, json, sys
import psutil, torch
from torch import nn
from robuq.storage import load_model
from robuq.kernels import hadamard_quant
import robuq.kernels.cpu_gemm, robuq.kernels.cpu_transform
shapes = json.loads(sys.argv[2])
def factory():
    return nn.Sequential(*[nn.Linear(n, out) for n, out in shapes])
small = nn.Linear(8, 8)
from robuq import RobuQConfig, freeze, quantize
freeze(quantize(small, RobuQConfig(rank=2)))(torch.randn(9, 8))
gc.collect()
before = psutil.Process().memory_info().rss
model = load_model(sys.argv[1], factory)
x = torch.randn(16, shapes[0][0])
for layer in model:
    layer(torch.randn(16, layer.in_features))
del x
gc.collect()
import ctypes
ctypes.CDLL("libc.so.6").malloc_trim(0)
print(json.dumps(psutil.Process().memory_info().rss - before))
"""


def _resident(ctx: Context) -> dict[str, float]:
    """A new process loads eight DiT-XL/2 blocks' layers and runs them; what its resident memory grew by."""
    shapes = [shape[:2] for (shape, _) in dit_xl2().values()] * 8
    layers = [PackedLinear(n, out, True, RobuQConfig(rank=16), str(i)) for i, (n, out) in enumerate(shapes)]
    folder = ctx.out_file("resident/model")
    save_model(nn.Sequential(*layers), folder)
    size = (Path(folder) / "model.safetensors").stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", _RESIDENT, str(folder), json.dumps(shapes)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measuring process failed:\n{done.stderr[-2000:]}")
    grown = json.loads(done.stdout.splitlines()[-1])
    return {"ratio": grown / size, "file MB": size / 1e6, "resident MB": grown / 1e6}


# -- layers ------------------------------------------------------------------------------------------------------------


def goal_for(tokens: int) -> float:
    """Smallest ratio against float32 at a number of tokens."""
    return max(ratio for least, ratio in GOALS if tokens >= least)


@torch.no_grad()
def _layer_rows(bench: Bench, pairs: int, threads: int) -> None:
    for m, n, out in SHAPES:
        linear, packed = make_layer(n, out)
        x = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
        wide, half = x.bfloat16(), linear.weight.bfloat16()
        bit, label = bitnet_layer(linear), f"({m}, {n}, {out}), {threads} thread{'s' * (threads > 1)}"
        peers: dict[str, tuple[Callable[[], Tensor], Any]] = {
            "F.linear float32": (functools.partial(F.linear, x, linear.weight, linear.bias), goal_for(m)),
            "F.linear bfloat16": (functools.partial(F.linear, wide, half), None),
            "transformers BitLinear": (functools.partial(bit, x), 1.0),
        }
        for peer, (call, least) in peers.items():
            goal = () if least is None else Rule("ratio", ">=", round(least, 4))

            def measure(x: Tensor = x, packed: PackedLinear = packed, call: Callable[[], Tensor] = call) -> Measured:
                with threads_set(threads), torch.no_grad(), eager():
                    found = compare(lambda: packed(x), call, pairs=pairs)
                    cpu = _cpu_time(lambda: packed(x)), _cpu_time(call)
                    return Measured(
                        found, peak=peak_memory(lambda: packed(x)), extra={"CPU time ratio": cpu[1] / cpu[0]}
                    )

            bench.row(f"PackedLinear {label} against {peer}", measure, peer=peer, goal=goal)


@torch.no_grad()
def _cached_row(bench: Bench, pairs: int) -> None:
    linear, packed = make_layer(1152, 1152)
    packed.cache = "int8"
    x = torch.randn(1, 1152, generator=torch.Generator().manual_seed(0))

    def measure() -> Measured:
        with threads_set(1), torch.no_grad():
            return Measured(compare(lambda: packed(x), lambda: linear(x), pairs=pairs))

    name = 'PackedLinear (1, 1152, 1152), cache="int8", 1 thread'
    bench.row(name, measure, peer="F.linear float32", goal=Rule("ratio", ">=", 1.0))


def _cpu_time(call: Callable[[], Any], repeats: int = 7) -> float:
    """Smallest processor time of a call, in seconds; short calls are repeated."""
    start = time.process_time()
    call()
    calls = max(1, int(0.005 / max(time.process_time() - start, 1e-6)))
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - start) / calls)
    return max(best, 1e-9)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """BitLinear's helpers are under torch.compile; run them as they are, as there may be no compiler."""
    before = torch.compiler.set_stance("force_eager")
    with before:
        yield


def bitnet_layer(linear: nn.Linear) -> nn.Module:
    """transformers' BitLinear with this layer's ternary weights."""
    from transformers.integrations.bitnet import BitLinear, pack_weights

    from robuq.ternary import ternarize

    codes, alpha = ternarize(linear.weight, granularity="tensor")
    made: nn.Module = BitLinear(linear.in_features, linear.out_features, True, dtype=torch.float32)
    made.weight = pack_weights(codes.clone())
    made.weight_scale = 1 / alpha[:1]
    made.bias = linear.bias.detach()
    return made


def _hadamard_rows(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        times = {}
        with threads_set(1):
            for n in (1024, 4096):
                x = torch.randn(512, n)
                times[n] = _cpu_time(functools.partial(hadamard, x)) / x.numel()
        return {"per element, 4096 over 1024": times[4096] / times[1024], "ns an element at 1024": 1e9 * times[1024]}

    bench.row("hadamard, 512 tokens", measure, goal=Rule("per element, 4096 over 1024", "<=", 2))
    calls = {n: torch.randn(256, n) for n in (512, 1024, 2048, 4096)}
    bench.row(
        "hadamard against n",
        lambda: growth(lambda n: hadamard(calls[n]), list(calls)),
        goal=Rule("exponent", "<=", 1.3),
    )


def _model_row(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        from icml26_shared import models

        model = models.load("smollm2", dtype="float32")[0]
        block = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
        start = time.perf_counter()
        peak = peak_memory(lambda: quantize(model, RobuQConfig.for_llm()), warmup=0)
        seconds = time.perf_counter() - start
        kept = sum(p.numel() * 4 for n, p in model.named_parameters() if n.endswith((".A", ".B")))
        return {"seconds": seconds, "blocks of extra memory": (peak.rss_bytes - kept) / block, "branch MB": kept / 1e6}

    goals = [Rule("seconds", "<=", 60), Rule("blocks of extra memory", "<=", 2)]
    bench.row("quantize() of SmolLM2-135M", measure, goal=goals)


def _allocation_row(bench: Bench) -> None:
    def measure() -> dict[str, float]:
        rng = np.random.default_rng(0)
        rows = np.sort(rng.random((112, 4)), axis=1)[:, ::-1]
        names = [f"layer {i}" for i in range(112)]
        sens = Sensitivity(
            {n: dict(zip((1, 2, 3, 4), map(float, r), strict=True)) for n, r in zip(names, rows, strict=True)},
            (1, 2, 3, 4),
        )
        macs = {n: (1, 3, 4, 4)[i % 4] * 1152 * 1152 for i, n in enumerate(names)}
        start = time.perf_counter()
        allocate_bits(sens, macs, 2.0)
        return {"seconds": time.perf_counter() - start}

    bench.row("AMPN, 112 layers, 4 candidates", measure, goal=Rule("seconds", "<=", 1))


def _training_row(bench: Bench, pairs: int) -> None:
    def measure() -> Measured:
        linear = nn.Linear(1152, 1152)
        layer = quantize(make_layer(1152, 1152)[0].requires_grad_(True), RobuQConfig(act_bits=2))
        x = torch.randn(512, 1152)

        def step(module: nn.Module) -> None:
            given = x.clone().requires_grad_()
            module(given).square().mean().backward()
            module.zero_grad(set_to_none=True)

        with threads_set(1):
            return Measured(compare(lambda: step(layer), lambda: step(linear), pairs=pairs))

    goal = Rule("ratio", ">=", round(1 / 2.2, 4))
    bench.row("training step, 512 tokens, 1152 x 1152, A2", measure, peer="nn.Linear float32", goal=goal)


# -- GPU ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gpu_ratio(device: str, m: int = 2048, n: int = 1152, out: int = 4608, pairs: int = 9) -> float:
    """float32's time over the packed layer's on a GPU."""
    linear, packed = (module.to(device) for module in make_layer(n, out, bits=2))
    x = torch.randn(m, n, device=device)
    return compare(lambda: packed(x), lambda: linear(x), pairs=pairs).ratio


def _gpu_rows(bench: Bench, device: str, pairs: int) -> None:
    for m, n, out in SHAPES:
        linear, packed = (module.to(device) for module in make_layer(n, out, bits=2))
        x = torch.randn(m, n, device=device)
        for peer, module, tokens in _gpu_peers(linear, x):

            def measure(packed: Any = packed, module: Any = module, x: Tensor = x, tokens: Tensor = tokens) -> Measured:
                with torch.no_grad():
                    return Measured(compare(lambda: packed(x), lambda: module(tokens), pairs=pairs))

            bench.row(f"PackedLinear ({m}, {n}, {out}) on {device} against {peer}", measure, peer=peer)


def _gpu_peers(linear: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    import copy

    return [("float32", linear, x), ("bfloat16", copy.deepcopy(linear).bfloat16(), x.bfloat16())]
