"""`dppo bench`: what pruning, packing and packed attention cost, against what one would use instead."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo import bench_workloads as workloads
from dppo.config import PruningConfig
from dppo.kernels import packed_policy_loss
from dppo.kernels.policy_loss import Clip
from dppo.packed import pack_sequences
from dppo.packing import pack_best_fit_decreasing, pack_window
from dppo.pruning import prune_completions
from icml26_shared.bench import Bench, Measured, Rule, compare, growth, peak_memory
from icml26_shared.console import Context


def run(ctx: Context, args: argparse.Namespace) -> Any:
    """Handler of the command."""
    bench = Bench(ctx, libraries=["transformers", "trl"])
    _pruning(bench, ctx.seed)
    _packing(bench, ctx.seed)
    _attention(bench, ctx.seed)
    _training(bench, ctx.seed)
    return bench.report()


def loop_pruner(advantages: Tensor, size: int, rate: float, seed: int) -> tuple[list[bool], list[float]]:
    """The same rule as one would first write it: a loop over groups and their members."""
    rng = np.random.default_rng(seed)
    keep, weight = [], []
    for group in advantages.reshape(-1, size).tolist():
        mean = sum(map(abs, group)) / size
        for a in group:
            low = a != 0 and abs(a) < mean - 1e-9
            kept = a != 0 and not (low and rng.random() < rate)
            keep.append(kept)
            weight.append(0.0 if not kept else 1 / (1 - rate) if low else 1.0)
    return keep, weight


def _pruning(bench: Bench, seed: int) -> None:
    advantages = torch.randn(8192, generator=torch.Generator().manual_seed(seed))
    cfg = PruningConfig()

    def ours() -> Any:
        return prune_completions(advantages, 16, cfg, generator=seed)

    bench.row(
        "prune 8,192 completions, groups of 16", goal=Rule("ours", "<=", 1e-3), peer="Python loop over groups",
        measure=lambda: Measured(compare(ours, lambda: loop_pruner(advantages, 16, 0.5, seed)), peak=peak_memory(ours)),
    )  # fmt: skip

    def prune(size: int) -> None:
        prune_completions(torch.randn(size), 16, cfg, generator=seed)

    bench.row(
        "pruner, growth with the batch", goal=Rule("exponent", "<=", 1.1),
        measure=lambda: growth(prune, [65_536, 131_072, 262_144, 524_288]),
    )  # fmt: skip


def _packing(bench: Bench, seed: int) -> None:
    lengths = workloads.lengths_of("lognormal 400", 100_000, 4096, seed)

    def ours() -> Any:
        return pack_window(lengths, 4096, 64)

    bench.row(
        "pack 100,000 sequences, window 64", goal=Rule("ours", "<=", 2.0), peer="best fit decreasing",
        measure=lambda: Measured(
            compare(ours, lambda: pack_best_fit_decreasing(lengths, 4096), pairs=5, warmup=1), peak=peak_memory(ours),
            extra={"density": ours().density},
        ),
    )  # fmt: skip
    bench.row(
        "packer, growth with the number of sequences", goal=Rule("exponent", "<=", 1.1),
        measure=lambda: growth(lambda n: pack_window(lengths[:n], 4096, 64), [12_500, 25_000, 50_000, 100_000]),
    )  # fmt: skip


def _attention(bench: Bench, seed: int) -> None:
    inputs = workloads.attention_inputs(4096, 256, seed=seed)

    def both() -> Measured:
        ours, peer = workloads.attention_step(*inputs), workloads.dense_attention_step(*inputs)
        return Measured(compare(ours, peer, pairs=5, warmup=1), peak=peak_memory(ours))

    bench.row(
        "packed attention, forward and backward, T=4096, mean length 256", goal=Rule("ratio", ">=", 3.0),
        peer="dense T×T mask", measure=both,
    )  # fmt: skip

    def step(tokens: int) -> None:
        workloads.attention_step(*workloads.attention_inputs(tokens, 256, seed=seed))()

    bench.row(
        "packed attention, growth with T at mean length 256", goal=Rule("exponent", "<=", 1.2),
        measure=lambda: growth(step, [2048, 4096, 8192, 16_384]),
    )  # fmt: skip

    def loss() -> Measured:
        rng = torch.Generator().manual_seed(seed)
        bounds = torch.arange(0, 262_145, 512)
        logps = torch.randn(262_144, generator=rng, requires_grad=True)
        old = logps.detach() + 0.1 * torch.randn(262_144, generator=rng)
        numbers = (torch.randn(512, generator=rng), torch.rand(512, generator=rng), bounds)

        def on(path: Any) -> Any:
            def step() -> None:
                value = packed_policy_loss(logps, *numbers, old_logps=old, clip=Clip(), path=path)
                torch.autograd.grad(value.sum(), logps)

            return step

        return Measured(compare(on("cpu"), on("torch"), pairs=10), peak=peak_memory(on("cpu")))

    bench.row(
        "packed policy loss, 262,144 tokens, forward and backward", goal=Rule("ratio", ">=", 1.0),
        peer="plain autograd", measure=loss,
    )  # fmt: skip


def _training(bench: Bench, seed: int) -> None:
    lengths = workloads.lengths_of("lognormal 400", 24, 4096, seed)

    def against_padding() -> Measured:
        step = workloads.TrainingStep(lengths, seed=seed)
        return Measured(compare(step.packed, step.padded, pairs=5, warmup=1), peak=peak_memory(step.packed))

    bench.row(
        "two-layer Llama, forward and backward per valid token", goal=Rule("ratio", ">=", 1.6),
        peer="padding, batches of 8", measure=against_padding,
    )  # fmt: skip
    bench.row(
        "log-probabilities with gradient, two-layer Llama", goal=Rule("ratio", ">=", 1.0),
        peer="TRL 1.16's padded pass", measure=lambda: _against_trl(lengths, seed),
    )  # fmt: skip
    bench.row(
        "shared prompts: prompt 256, completion 128, 8 completions",
        goal=(Rule("tokens_saved", ">=", 0.55), Rule("ratio", ">=", 1.0)), peer="each with its own prompt",
        measure=lambda: _shared_prompts(seed),
    )  # fmt: skip
    bench.row(
        "memory of a training step, half the tokens kept", goal=Rule("share_of_full", "<=", 0.6),
        measure=lambda: _memory(seed),
    )  # fmt: skip


def _against_trl(lengths: np.ndarray, seed: int) -> Measured:
    """TRL's pass on the same rows: left-padded prompts, right-padded completions, its fused head, batches of 8."""
    from icml26_shared.errors import require

    utils = require("trl.trainer.utils", "dppo[trl]")
    step = workloads.TrainingStep(lengths, seed=seed)
    other = workloads.small_llama(seed)
    utils.add_fused_lm_head(other, outputs=("log_probs", "entropy"))

    def trl() -> None:
        for start in range(0, len(step.prompts), 8):
            prompts, completions = step.prompts[start : start + 8], step.completions[start : start + 8]
            ids = torch.cat([_padded(prompts, left=True), _padded(completions, left=False)], 1)
            mask = (ids > 0).long()
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, : max(map(len, prompts))] = -100
            output = other(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            (-output.log_probs.sum() / step.targets).backward()
        other.zero_grad(set_to_none=True)

    return Measured(compare(step.packed, trl, pairs=5, warmup=1))


def _padded(rows: list[Tensor], *, left: bool) -> Tensor:
    width = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(r, (width - len(r), 0) if left else (0, width - len(r))) for r in rows])


def _shared_prompts(seed: int) -> Measured:
    rng = torch.Generator().manual_seed(seed)
    model = workloads.small_llama(seed)
    prompt = torch.randint(2, 1024, (256,), generator=rng)
    completions = [torch.randint(2, 1024, (128,), generator=rng) for _ in range(8)]
    packings = {share: pack_sequences([prompt] * 8, completions, share_prompts=share) for share in (True, False)}

    def step(share: bool) -> Any:
        def run() -> None:
            with workloads.packed_attention_of(model):
                logps, _ = workloads.packed_logps(model, packings[share][1])
                torch.cat(list(logps.values())).sum().backward()
            model.zero_grad(set_to_none=True)

        return run

    saved = 1 - packings[True][0].tokens / packings[False][0].tokens
    return Measured(compare(step(True), step(False), pairs=7, warmup=2), extra={"tokens_saved": saved})


def _memory(seed: int) -> Measured:
    """Torch's peak of a packed step on all sequences, and on half of them (one row each)."""
    lengths = np.full(16, 256)
    full = peak_memory(workloads.TrainingStep(lengths, capacity=4096, seed=seed).packed)
    half = peak_memory(workloads.TrainingStep(lengths[:8], capacity=4096, seed=seed).packed)
    gradients = sum(p.numel() * 4 for p in workloads.small_llama(seed).parameters())
    if full.torch_bytes is None or half.torch_bytes is None:
        raise RuntimeError("torch's allocations were not recorded")
    share = (half.torch_bytes - gradients) / (full.torch_bytes - gradients)
    return Measured(peak=half, extra={"share_of_full": share})
