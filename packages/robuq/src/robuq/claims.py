"""The paper's claims as checks: ``robuq claims``. Rules and thresholds were set before the runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
from torch import Tensor

from icml26_shared.claims import Claim, ClaimContext, Measurement, Rule, needs_gpu
from robuq.accounting import PUBLISHED_GFLOPS, dit_xl2, equivalents, packed_size, speed_up_in_theory
from robuq.allocation import allocate_bits
from robuq.claims_runs import fp_run, qat_run, sensitivity_after, settings
from robuq.eval.tiny_dit import TinyDiT
from robuq.gaussian import Bits
from robuq.quantizer import Kind, TokenQuantizer
from robuq.sensitivity import Sensitivity
from robuq.surgery import macs_per_token, quantize

SEEDS = 5
TYPES = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")
PUBLISHED = {2.0: (2.75, 2.21, 2.00, 1.64), 3.0: (3.89, 2.96, 3.04, 2.31)}


def check_normality(ctx: ClaimContext) -> dict[str, Any]:
    """Kurtosis and errors of 20 inputs of SmolLM2, raw and rotated."""
    from robuq.eval import activations as real

    found: dict[str, list[float]] = {}
    kurtoses, errors = [], {2: [], 4: []}  # type: ignore[var-annotated]
    for kind, inputs in real.smollm2_inputs().items():
        rows: dict[str, list[float]] = {}
        for x, y in _with_rotated(inputs):
            rows.setdefault("raw", []).append(real.kurtosis(x))
            rows.setdefault("rotated", []).append(real.kurtosis(y))
            for bits in (2, 4):
                errors[bits].append(real.nmse(y, TokenQuantizer(bits)))
                rows.setdefault(f"minmax raw {bits}", []).append(real.nmse(x, TokenQuantizer(bits, "minmax")))
                rows.setdefault(f"minmax rotated {bits}", []).append(real.nmse(y, TokenQuantizer(bits, "minmax")))
                rows.setdefault(f"gauss raw {bits}", []).append(real.nmse(x, TokenQuantizer(bits)))
        for label, values in rows.items():
            found[f"{label}, {kind}"] = [float(np.median(values))]
        kurtoses.append(float(np.median(rows["rotated"])))
    return {
        "kurtosis": Measurement(kurtoses),
        "NMSE at 2 bit": Measurement(errors[2]),
        "NMSE at 4 bit": Measurement(errors[4]),
        **{name: Measurement(values) for name, values in found.items()},
    }


def _with_rotated(inputs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The input of each layer, as it is and rotated with the layer's own signs."""
    from robuq.eval import activations as real

    for name, x in inputs:
        yield x, real.rotate(x, *real.basis(x.shape[1], name, "signs"))


def check_minilm(ctx: ClaimContext) -> dict[str, Any]:
    """MiniLM with quantised activations."""
    found = {}
    for bits in (4, 3, 2):
        for label in MINILM_CASES:
            quality = _minilm_quality(ctx, label, bits)
            found[f"A{bits} {label}, cosine"] = Measurement([quality["cosine"]])
            found[f"A{bits} {label}, Spearman"] = Measurement([quality["spearman"]])
    return found


MINILM_CASES: dict[str, tuple[Kind, str]] = {  # quantiser and rotation
    "min-max unrotated": ("minmax", "none"),
    "min-max Hadamard": ("minmax", "plain"),
    "min-max signs": ("minmax", "signs"),
    "RobustQuantizer unrotated": ("gauss_uniform", "none"),
    "RobustQuantizer plain": ("gauss_uniform", "plain"),
    "RobustQuantizer": ("gauss_uniform", "signs"),
}


def _minilm_quality(ctx: ClaimContext, label: str, bits: Bits) -> dict[str, float]:
    from robuq.eval import activations as real

    kind, rotation = MINILM_CASES[label]
    run = partial(real.minilm_quality, TokenQuantizer(bits, kind), rotation)
    return ctx.cached((label, bits), run)


def _losses(ctx: ClaimContext, name: str) -> list[float]:
    return [qat_run(ctx, name, seed)["loss"] for seed in ctx.seeds]


def _excess(ctx: ClaimContext, name: str) -> Measurement:
    """Validation loss above the floating point model's, a value a seed."""
    return Measurement(
        [loss - fp_run(ctx, seed)["loss"] for loss, seed in zip(_losses(ctx, name), ctx.seeds, strict=True)]
    )


def check_robust(ctx: ClaimContext) -> dict[str, Any]:
    """A2 on the tiny DiT."""
    return {name: _excess(ctx, name) for name in ("A2", "A2 plain", "A2 minmax", "A2 minmax hadamard")}


def check_bottleneck(ctx: ClaimContext) -> dict[str, Any]:
    """Excess of activations against excess of weights."""
    loss = {name: _losses(ctx, name) for name in ("A16", "A4", "A3", "A2")}
    fp = [fp_run(ctx, seed)["loss"] for seed in ctx.seeds]

    def minus(a: Sequence[float], b: Sequence[float]) -> Measurement:
        return Measurement([x - y for x, y in zip(a, b, strict=True)])

    return {
        "A2 - A16": minus(loss["A2"], loss["A16"]),
        "A16 - FP": minus(loss["A16"], fp),
        "A4 - A16": minus(loss["A4"], loss["A16"]),
        "A3 - A16": minus(loss["A3"], loss["A16"]),
    }


def check_branch(ctx: ClaimContext) -> dict[str, Any]:
    """The low-rank branch before and after training."""
    runs = {name: [qat_run(ctx, name, seed) for seed in ctx.seeds] for name in ("A4", "A4 r=0")}
    ratio = [b["start"] / a["start"] for a, b in zip(runs["A4"], runs["A4 r=0"], strict=True)]
    return {
        "loss before training, r=0 over r=8": Measurement(ratio),
        "r=8": Measurement([run["loss"] for run in runs["A4"]]),
        "r=0": Measurement([run["loss"] for run in runs["A4 r=0"]]),
    }


def check_hadamard(ctx: ClaimContext) -> dict[str, Any]:
    """MiniLM decides; the tiny DiT, without outliers at width 64, is reported."""
    return {
        **{
            f"A4 {label}, cosine": Measurement([_minilm_quality(ctx, label, 4)["cosine"]])
            for label in ("RobustQuantizer", "min-max unrotated")
        },
        "tiny DiT, Hadamard": Measurement(_losses(ctx, "A4")),
        "tiny DiT, none": Measurement(_losses(ctx, "A4 none")),
    }


def check_uniform(ctx: ClaimContext) -> dict[str, Any]:
    """Uniform steps against Lloyd-Max levels."""
    from robuq.eval import activations as real

    gain = []
    for inputs in real.smollm2_inputs().values():
        for _, y in _with_rotated(inputs):
            gain.append(real.nmse(y, TokenQuantizer(2, "gauss_lloyd")) / real.nmse(y, TokenQuantizer(2)))
    return {
        "uniform": Measurement(_losses(ctx, "A2")),
        "Lloyd-Max": Measurement(_losses(ctx, "A2 lloyd")),
        "NMSE of Lloyd-Max over uniform, 2 bit": Measurement(gain),
    }


def check_ampn(ctx: ClaimContext) -> dict[str, Any]:
    """Plans against uniform bits, the greedy solver and random plans; when the sensitivity is measured."""
    from robuq.eval.activations import spearman

    found: dict[str, list[float]] = {}
    counted = macs_per_token(quantize(TinyDiT(), settings()))

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for seed in ctx.seeds:
        planned = {avg: qat_run(ctx, f"plan {avg}", seed) for avg in (2.0, 2.5)}
        sens = Sensitivity.from_json(planned[2.0]["sensitivity"])
        macs = {layer: counted[layer] for layer in sens.layers}
        for avg in (2.0, 2.5):
            plan = allocate_bits(sens, macs, avg)
            greedy, uniform = (allocate_bits(sens, macs, avg, solver) for solver in ("greedy", "uniform"))  # type: ignore[arg-type]
            add("objective over uniform's", plan.objective / uniform.objective)
            add("objective over greedy's", plan.objective / max(greedy.objective, 1e-300))
            add("objective over random plans' mean", plan.objective / _random_objective(sens, macs, avg, seed))
        add("plan 2.0", planned[2.0]["loss"])
        add("plan 2.5", planned[2.5]["loss"])
        add("uniform 2", qat_run(ctx, "A2", seed)["loss"])
        add("uniform 2 after the same warm-up", qat_run(ctx, "uniform 2.0 after warm-up", seed)["loss"])
        add("greedy 2.0", qat_run(ctx, "greedy 2.0", seed)["loss"])
        ranks = {steps: _ranking(sensitivity_after(ctx, steps, seed)) for steps in (0, 100, 250)}
        add("rank correlation, step 100 and 250", spearman(ranks[100], ranks[250]))
        add("rank correlation, step 0 and 250", spearman(ranks[0], ranks[250]))
    return {name: Measurement(values) for name, values in found.items()}


def _random_objective(sens: Sensitivity, macs: dict[str, int], avg: float, seed: int) -> float:
    """Mean objective of 100 random plans that fill the budget."""
    rng = np.random.default_rng(seed)
    budget, totals = avg * sum(macs.values()), []
    for _ in range(100):
        bits = dict.fromkeys(sens.layers, min(sens.bits))
        for name in rng.permutation(list(sens.layers) * (len(sens.bits) - 1)):
            spent = sum(macs[layer] * b for layer, b in bits.items())
            if bits[name] < max(sens.bits) and spent + macs[name] <= budget:
                bits[name] += 1
        totals.append(sum(sens.values[layer][b] for layer, b in bits.items()))
    return float(mean(totals))


def _ranking(sens: Sensitivity) -> np.ndarray:
    """What few bits in each layer cost, in one order of (layer, bits)."""
    return np.array([sens.values[layer][b] for layer in sens.layers for b in sens.bits[:-1]])


def check_types(ctx: ClaimContext) -> dict[str, Any]:
    """Mean bits of each type of layer in the plans at 2 bits."""
    found: dict[str, list[float]] = {kind: [] for kind in TYPES}
    for seed in ctx.seeds:
        bits = qat_run(ctx, "plan 2.0", seed)["plan"]["bits"]
        for kind in TYPES:
            found[kind].append(mean(b for name, b in bits.items() if name.endswith(kind)))
    leads = [found["attn.proj"][i] - max(found[k][i] for k in TYPES[1:]) for i in range(len(ctx.seeds))]
    last = [min(found[k][i] for k in TYPES[:-1]) - found["mlp.fc2"][i] for i in range(len(ctx.seeds))]
    published = {f"published, {k}": Measurement([b]) for k, b in zip(TYPES, PUBLISHED[2.0], strict=True)}
    return {
        "lead of attn.proj": Measurement(leads),
        "others over mlp.fc2": Measurement(last),
        **{kind: Measurement(values) for kind, values in found.items()},
        **published,
    }


def check_stable(ctx: ClaimContext) -> dict[str, Any]:
    """Samples at A2."""
    runs = [qat_run(ctx, "A2", seed) for seed in ctx.seeds]
    return {
        "accuracy of samples": Measurement([run["accuracy"] for run in runs]),
        "FD": Measurement([run["fd"] for run in runs]),
        "FD of FP": Measurement([fp_run(ctx, seed)["fd"] for seed in ctx.seeds]),
        "loss": Measurement([run["loss"] for run in runs]),
    }


def check_size(ctx: ClaimContext) -> dict[str, Any]:
    """Bytes of DiT-XL/2, measured from layers of its shapes that are packed and saved one by one."""
    sizes = {rank: ctx.cached(("bytes", rank), partial(packed_size, dit_xl2(), rank, ctx.out)) for rank in (0, 16)}
    return {
        "ratio, r=0": Measurement([sizes[0]["float32"] / sizes[0]["packed"]]),
        "ratio, r=16": Measurement([sizes[16]["float32"] / sizes[16]["packed"]]),
        "MB, r=0": Measurement([sizes[0]["packed"] / 1e6]),
        "MB, r=16": Measurement([sizes[16]["packed"] / 1e6]),
    }


def check_speed(ctx: ClaimContext) -> dict[str, Any]:
    """The count of operations, from DiT-XL/2's shapes."""
    counted = equivalents()
    three = [name for name in counted if name != "rest"]
    return {
        "speed-up in theory": Measurement([speed_up_in_theory()]),
        "GFLOP-eq over published": Measurement([sum(counted[n] for n in three) / sum(PUBLISHED_GFLOPS.values())]),
        **{f"GFLOP-eq, {name}": Measurement([counted[name]]) for name in three},
        **{f"published GFLOP-eq, {name}": Measurement([PUBLISHED_GFLOPS[name]]) for name in three},
    }


def check_gpu_speed(ctx: ClaimContext) -> dict[str, Any]:
    """A DiT-XL/2 layer against float32 on this GPU."""
    from robuq.bench import gpu_ratio

    return {"ratio": Measurement([gpu_ratio("cuda") for _ in range(5)])}


CLAIMS = [
    Claim(
        "normality",
        "The Hadamard transform turns unknown per-token distributions into normal ones",
        "abstract",
        check_normality,
        [
            Rule("kurtosis", ">=", 2.3, on="every"),
            Rule("kurtosis", "<=", 3.2, on="every"),
            Rule("NMSE at 2 bit", ">=", 0.090, on="every"),
            Rule("NMSE at 2 bit", "<=", 0.128, on="every"),
            Rule("NMSE at 4 bit", ">=", 0.009, on="every"),
            Rule("NMSE at 4 bit", "<=", 0.0125, on="every"),
        ],
        seeds=1,
    ),
    Claim(
        "robust-minilm",
        "RobustQuantizer beats min-max and un-rotated quantisers at low bits (MiniLM, activations only)",
        "abstract",
        check_minilm,
        [
            Rule("A4 RobustQuantizer, cosine", ">=", 0.95),
            Rule("A4 min-max unrotated, cosine", "<=", 0.80),
            Rule("A3 RobustQuantizer, cosine", ">", 0, plus="A3 min-max signs, cosine"),
        ],
        seeds=1,
    ),
    Claim(
        "robust-dit",
        "RobustQuantizer beats min-max at 2 bits after training (tiny DiT, excess loss over FP)",
        "abstract",
        check_robust,
        [
            Rule("A2", "<=", 0.8, times="A2 minmax", on="interval"),
            Rule("A2", "<=", 0.8, times="A2 minmax hadamard", on="interval"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "bottleneck",
        "Activations, not weights, are the bottleneck",
        "abstract",
        check_bottleneck,
        [
            Rule("A2 - A16", ">", 0, plus="A16 - FP", on="interval"),
            Rule("A4 - A16", "<=", 0.5, times="A2 - A16"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "branch",
        "The SVD-initialised low-rank branch is a large part of the baseline (FID 41.6 to 29.6)",
        "ablation, public notes of the paper",
        check_branch,
        [
            Rule("loss before training, r=0 over r=8", ">=", 2),
            Rule("r=8", "<=", 0, plus="r=0", on="interval"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "hadamard",
        "The Hadamard transform on all layers helps further (29.6 to 20.8)",
        "ablation, public notes of the paper",
        check_hadamard,
        [Rule("A4 RobustQuantizer, cosine", ">=", 0.95), Rule("A4 min-max unrotated, cosine", "<=", 0.80)],
        seeds=SEEDS,
    ),
    Claim(
        "uniform-quantiser",
        "Uniform levels do as well as non-uniform ones, and are robust",
        "ablation, public notes of the paper",
        check_uniform,
        Rule("uniform", "<=", 1.03, times="Lloyd-Max"),
        seeds=SEEDS,
    ),
    Claim(
        "ampn",
        "Mixed activation bits beat uniform bits of the same average; a sensitivity after short training predicts best",
        "abstract",
        check_ampn,
        [
            Rule("objective over uniform's", "<=", 1, on="every"),
            Rule("objective over greedy's", "<=", 1, on="every"),
            Rule("plan 2.0", "<", 0, plus="uniform 2", on="interval"),
            Rule("rank correlation, step 100 and 250", ">", 0, plus="rank correlation, step 0 and 250"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "bits-by-type",
        "attn.proj gets most bits and mlp.fc2 fewest (2.75, 2.21, 2.00, 1.64 at 2 bits)",
        "public notes of the paper",
        check_types,
        Rule("lead of attn.proj", ">", 0),
        seeds=SEEDS,
    ),
    Claim(
        "stable-a2",
        "Generation is stable at W1.58A2",
        "abstract",
        check_stable,
        [
            Rule("accuracy of samples", ">=", 0.9, on="every"),
            Rule("FD", "<=", 1.5, times="FD of FP"),
            Rule("loss", "<=", 0.5, on="every"),
        ],
        seeds=SEEDS,
    ),
    Claim(
        "checkpoint-size",
        "DiT-XL/2's checkpoint is 15.2 times smaller, 13.2 times with the branch",
        "public notes of the paper",
        check_size,
        [Rule("ratio, r=0", ">=", 14.5), Rule("ratio, r=16", ">=", 12.0)],
        seeds=1,
    ),
    Claim(
        "speed-theory",
        "17.3 times fewer operations",
        "public notes of the paper",
        check_speed,
        [
            Rule("GFLOP-eq over published", ">=", 0.95),
            Rule("GFLOP-eq over published", "<=", 1.05),
            Rule("speed-up in theory", ">=", round(17.3 * 0.95, 3)),
            Rule("speed-up in theory", "<=", round(17.3 * 1.05, 3)),
        ],
        seeds=1,
    ),
    Claim(
        "speed-gpu",
        "3.5 times faster on an RTX 4090",
        "public notes of the paper",
        check_gpu_speed,
        Rule("ratio", ">=", 3.5),
        needs=needs_gpu(),
        command="robuq bench --device cuda",
        seeds=1,
    ),
    Claim(
        "fid",
        "ImageNet-1K and FFHQ: FID of W1.58A4, A3 and A2 near or better than all published methods",
        "abstract",
        rule=Rule("FID", "<=", 1.05, times="published FID"),
        needs="the DiT-XL/2 checkpoint, ImageNet and GPU weeks",
        command="robuq qat configs/dit_xl_a2.yaml, then sample 10,000 with guidance 1.5, and robuq eval-fid",
    ),
]
