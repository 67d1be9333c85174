"""The paper's claims as checks: `dppo claims`."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dppo.audit import Design, audit_unbiasedness
from dppo.baselines import Cppo, Greso
from dppo.config import PruningConfig
from dppo.demo_tasks import Addition
from dppo.learning import Curve, Recipe, train
from dppo.losses import Surrogate
from dppo.toy import ToyBatch
from icml26_shared.bench import compare
from icml26_shared.claims import Claim, ClaimContext, Measurement, Result, Rule

RATES = (0.3, 0.5, 0.7, 0.9)
CONFIGS = (PruningConfig(completion_rate=0.6), PruningConfig(completion_rate=0.6, mode="fixed"))


def _rewards(seed: int) -> torch.Tensor:
    """Two groups of five with rewards 0 and 1, neither all equal."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation([1.0] * k + [0.0] * (5 - k)) for k in rng.integers(1, 5, 2)]
    return torch.tensor(np.array(rows))


def _relative_bias(
    seed: int, surrogate: Surrogate, design: PruningConfig | Design, dtype: torch.dtype, prompt_low: Sequence[bool]
) -> float:
    toy = ToyBatch(_rewards(seed), seed=seed, dtype=dtype)
    batch = toy.batch(prompt_low=list(prompt_low) or None, prompt_ids=[0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = audit_unbiasedness(toy.loss_fn(surrogate), toy.params, batch, design)
    return report.relative_bias


def _greso() -> Greso:
    """After two visits at which the first prompt was all wrong."""
    greso = Greso()
    for _ in range(2):
        greso.update([0, 1], [0.0, 0.5])
    return greso


def check_unbiased(ctx: ClaimContext) -> dict[str, list[float]]:
    """All masks of both levels, three loss types, clipped, off-policy, with KL; and the biased ways in the same
    harness."""
    surrogates = [
        Surrogate("grpo", beta=0.1), Surrogate("dr_grpo", beta=0.1, max_length=7), Surrogate("dapo", beta=0.1)
    ]  # fmt: skip
    found: dict[str, list[float]] = {}
    for seed in ctx.track(ctx.seeds, "enumerating"):
        for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
            worst = max(
                _relative_bias(seed, s, cfg, dtype, [True, True] if cfg.mode == "fixed" else [True, False])
                for s in surrogates
                for cfg in CONFIGS
            )
            found.setdefault(name, []).append(worst)
        for name, least in _least_biases(seed, surrogates).items():
            found.setdefault(name, []).append(least)
    return found


BIASED = ("deterministic", "cppo", "greso")


def _least_biases(seed: int, surrogates: Sequence[Surrogate]) -> dict[str, float]:
    """The smallest relative bias, over the surrogates, of each of the ways that do not re-weight rightly."""
    designs: tuple[PruningConfig | Design, ...] = (PruningConfig(mode="deterministic"), Cppo(0.5), _greso())
    return {
        name: min(_relative_bias(seed, s, design, torch.float64, []) for s in surrogates)
        for name, design in zip(BIASED, designs, strict=True)
    }


def check_loss_types(ctx: ClaimContext) -> dict[str, list[float]]:
    """GRPO and DAPO losses with token and sequence level ratios (sequence: GSPO), and the biased ways."""
    found: dict[str, list[float]] = {}
    surrogates = {
        f"{loss_type} {level}": Surrogate(loss_type, level, epsilon_high=0.28)  # type: ignore[arg-type]
        for loss_type in ("grpo", "dapo")
        for level in ("token", "sequence")
    }
    for seed in ctx.track(ctx.seeds, "enumerating"):
        for name, surrogate in surrogates.items():
            worst = max(
                _relative_bias(seed, surrogate, cfg, torch.float64, [True, cfg.mode == "fixed"]) for cfg in CONFIGS
            )
            found.setdefault(name, []).append(worst)
        for name, least in _least_biases(seed, list(surrogates.values())).items():
            found.setdefault(name, []).append(least)
    return found


STEPS = 300  # the learning rate is the one of {1e-3, 3e-4} with which the full batch learns; pruning uses the same


@contextmanager
def _one_quiet_thread() -> Iterator[None]:
    """The tensors are small: one thread is fastest, and its CPU time is what the run costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _warmed_up(seed: int) -> tuple[Addition, torch.nn.Module]:
    """The task and the policy that all runs of a seed start from."""
    task = Addition()
    return task, task.policy(seed)


def _addition(ctx: ClaimContext, seed: int, recipe: Recipe) -> Curve:
    """One training run on the addition task, shared by the claims; all runs of a seed start from the same policy."""

    def run() -> dict[str, Any]:
        task, policy = _warmed_up(seed)
        policy = copy.deepcopy(policy)
        with ctx.progress(f"{recipe.method} {recipe.completion_rate:g}, seed {seed}", recipe.steps) as bar:
            return train(task, recipe, seed, policy, on_step=bar.advance).to_dict()

    with _one_quiet_thread():
        return Curve(**ctx.shared(["addition", seed, dict(vars(recipe))], run))


def _runs(ctx: ClaimContext, methods: dict[str, Recipe]) -> dict[str, list[Curve]]:
    return {name: [_addition(ctx, seed, recipe) for seed in ctx.seeds] for name, recipe in methods.items()}


def _dppo(rate: float) -> Recipe:
    return Recipe("dppo", rate, rate, steps=STEPS)


def check_same_path(ctx: ClaimContext) -> Result:
    """Final accuracy of 300 steps of addition."""
    runs = _runs(
        ctx,
        {
            "grpo": Recipe("grpo", 0, 0, steps=STEPS), "dppo": _dppo(0.5),
            "no_rescale": Recipe("no_rescale", steps=STEPS), "deterministic": Recipe("deterministic", steps=STEPS),
        },
    )  # fmt: skip
    final = {name: [float(c.smooth()[-1]) for c in curves] for name, curves in runs.items()}
    measured = {name: Measurement(values, seeds=ctx.seeds) for name, values in final.items()}
    difference = np.array(final["dppo"]) - np.array(final["grpo"])
    measured["dppo - grpo"] = Measurement(difference.tolist(), seeds=ctx.seeds)
    measured["grpo's gain"] = gain = Measurement(_gains(runs["grpo"]), seeds=ctx.seeds)
    low, high = measured["dppo - grpo"].interval()
    figure = (
        f"final accuracy {_means(final)}; dppo − grpo {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]; "
        f"grpo gained {gain.mean:+.3f}"
    )
    return Result(holds=bool(high >= 0 and min(gain.values) > 0), figure=figure, measurements=measured)


def _gains(curves: list[Curve]) -> list[float]:
    """Final accuracy − the first: where the full batch learns nothing, following it means nothing."""
    return [float(curve.smooth()[-1] - curve.accuracy[0]) for curve in curves]


def _means(values: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {np.mean(v):.3f}" for name, v in values.items())


def check_faster(ctx: ClaimContext) -> dict[str, list[float]]:
    """Tokens and seconds of the full batch over those of pruning, until both have the accuracy that stands for equal.

    The target is 95 % of the way from the start to the lower of the two final accuracies (means of the last three
    evaluations), so it is set by both runs alike and reached by both. Seconds are CPU time of one thread, which another
    program on the machine does not lengthen. "to full without zeros" is against a full batch that leaves out
    completions with A = 0, whose gradient is the same.
    """
    full = _runs(ctx, {"grpo": Recipe("grpo", 0, 0, steps=STEPS)})["grpo"]
    found: dict[str, list[float]] = {}
    for rate in RATES:
        for ours, theirs in zip(_runs(ctx, {"dppo": _dppo(rate)})["dppo"], full, strict=True):
            target = _equal_accuracy(ours, theirs)
            costs = {
                "tokens ratio": (theirs.cost(), ours.cost()),
                "seconds ratio": (np.array(theirs.cpu_seconds), np.array(ours.cpu_seconds)),
                "tokens ratio to full without zeros": (theirs.cost_without_zeros(), ours.cost()),
            }
            for name, (full_cost, our_cost) in costs.items():
                ratio = theirs.to_reach(target, full_cost) / ours.to_reach(target, our_cost)
                found.setdefault(f"{name} {rate:g}", []).append(ratio)
            found.setdefault(f"final accuracy {rate:g}", []).append(float(ours.smooth()[-1]))
    found["final accuracy full"] = [float(c.smooth()[-1]) for c in full]
    found["gain of the full batch"] = _gains(full)
    return found


def _equal_accuracy(a: Curve, b: Curve) -> float:
    start = (a.accuracy[0] + b.accuracy[0]) / 2
    return start + 0.95 * (min(a.smooth()[-1], b.smooth()[-1]) - start)


def check_equal_budget(ctx: ClaimContext) -> dict[str, list[float]]:
    """Accuracy when both have spent the tokens of the cheaper run."""
    runs = _runs(ctx, {"grpo": Recipe("grpo", 0, 0, steps=STEPS), "dppo": _dppo(0.5)})
    gains = []
    for ours, theirs in zip(runs["dppo"], runs["grpo"], strict=True):
        budget = min(ours.cost()[-1], theirs.cost()[-1])
        gains.append(ours.at_cost(budget) - theirs.at_cost(budget))
    return {"dppo - grpo at equal budget": gains, "gain of the full batch": _gains(runs["grpo"])}


def check_density(ctx: ClaimContext) -> dict[str, list[float]]:
    """2,000 sequences, rows of 4096, window 64; and packed against padded time of a two-layer Llama."""
    from dppo import bench_workloads as workloads
    from dppo.packing import pack_window, pad_batches

    found: dict[str, list[float]] = {}
    for seed in ctx.seeds:
        for law in workloads.LAWS:
            lengths = workloads.lengths_of(law, 2000, 4096, seed)
            found.setdefault(f"density {law}", []).append(pack_window(lengths, 4096, 64).density)
            found.setdefault(f"padding {law}", []).append(pad_batches(lengths, 8).density)

    def measure(seed: int) -> float:
        step = workloads.TrainingStep(workloads.lengths_of("lognormal 400", 24, 4096, seed), seed=seed)
        if abs(step.packed() - step.padded()) > 1e-4:
            raise RuntimeError("packed and padded losses differ")
        return compare(step.packed, step.padded, pairs=5, warmup=0).ratio

    found["packed speed-up"] = [ctx.cached(["speed", seed], functools.partial(measure, seed)) for seed in ctx.seeds]
    return found


def check_variance(ctx: ClaimContext) -> dict[str, list[float]]:
    """Total variance of the gradient over 200 batches of digits, pruned over full, both levels at one rate."""
    from dppo.claims_variance import gradient_variance

    found: dict[str, list[float]] = {}
    for seed in ctx.track(ctx.seeds, "200 batches a seed"):
        with _one_quiet_thread():
            measured = ctx.cached(["variance", seed], functools.partial(gradient_variance, RATES, seed))
        for rate, values in measured.items():
            found.setdefault(f"variance ratio {rate}", []).append(values["variance_ratio"])
            found.setdefault(f"ESS share {rate}", []).append(values["ess_share"])
    return found


CLAIMS = [
    Claim(
        "unbiased", "Randomly pruned and re-weighted, the expected gradient is the full batch's.",
        "abstract; section 4", check_unbiased,
        rule=[
            Rule("fp64", "<=", 1e-12, on="every"), Rule("fp32", "<=", 1e-6, on="every"),
            Rule("deterministic", ">", 0.01, on="every"), Rule("cppo", ">", 0.01, on="every"),
            Rule("greso", ">", 0.01, on="every"),
        ],
    ),
    Claim(
        "same-path", "Training with pruning follows the full batch: the final accuracy is the same.", "section 5",
        check_same_path, seeds=5,
        rule="the upper end of the 95 % interval of dppo − grpo (final accuracy, paired by seed) is >= 0, and grpo "
        "itself gains accuracy with every seed",
    ),
    Claim(
        "faster", "Pruning reaches the same accuracy with less work (the paper: 2.37 times, Qwen3-4B on MATH).",
        "abstract", check_faster, seeds=5,
        rule=[
            Rule("tokens ratio 0.5", ">=", 1.5), Rule("seconds ratio 0.5", ">=", 1.3),
            Rule("gain of the full batch", ">", 0.0, on="every"),
        ],
    ),
    Claim(
        "equal-budget", "At an equal budget of tokens pruning is at least as accurate.", "abstract", check_equal_budget,
        rule=[
            Rule("dppo - grpo at equal budget", ">=", 0.0), Rule("gain of the full batch", ">", 0.0, on="every"),
        ],
        seeds=5,
    ),
    Claim(
        "qwen3-4b-math", "On MATH with Qwen3-4B pruning is 2.37 times faster and 3.36 points more accurate on average.",
        "abstract", None, rule="speed-up >= 2.37 and mean accuracy gain >= 3.36 points over six benchmarks",
        needs="8 GPUs with 80 GB, the model and MATH",
        command="accelerate launch --num_processes 8 --module dppo train --config configs/qwen3_4b_math.yaml",
    ),
    Claim(
        "packing", "Window packing raises the density of valid tokens and the use of the machine.", "abstract",
        check_density,
        rule=[
            *(Rule(f"density {law}", ">=", 0.97, on="every")
              for law in ("lognormal 400", "lognormal 800", "uniform 64-3000")),
            Rule("packed speed-up", ">=", 1.6),
        ],
    ),
    Claim(
        "variance", "The variance stays bounded up to a rate of 0.7 and grows modestly at 0.9.", "section 4",
        check_variance, rule=Rule("variance ratio 0.7", "<=", 2.5),
    ),
    Claim(
        "loss-types", "It works with GRPO, DAPO and GSPO.", "section 5", check_loss_types,
        rule=[
            *(Rule(f"{name} {level}", "<=", 1e-12, on="every") for name in ("grpo", "dapo")
              for level in ("token", "sequence")),
            *(Rule(name, ">", 0.01, on="every") for name in BIASED),
        ],
    ),
]  # fmt: skip
