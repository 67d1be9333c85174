"""One small GRPO loop in which every pruning is run alike, counted in tokens and seconds.

Each step pulls prompts, samples N answers to each, computes advantages on the full groups, decides which completions to
update on, and takes one on-policy step on −(1/Z) Σ w A log π. Z counts every completion of the prompts pulled, pruned
or not. Cost is tokens generated + 3·tokens updated (a forward pass, and a backward pass of twice its work).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dppo.baselines import Cppo, Greso
from dppo.config import PruningConfig
from dppo.draws import MaskGenerator
from dppo.losses import Surrogate
from dppo.prompts import PromptHistory, pull_block
from dppo.pruning import prune_completions


class Task(Protocol):
    """What the training harness needs."""

    name: str
    n_prompts: int
    answer_length: int

    def policy(self, seed: int) -> nn.Module:
        """A policy after its supervised warm-up."""
        ...

    def sample(
        self, policy: nn.Module, prompts: Int64[Tensor, " batch"], size: int, rng: torch.Generator
    ) -> Int64[Tensor, "batch size length"]:
        """`size` answers to each prompt."""
        ...

    def rewards(
        self, prompts: Int64[Tensor, " batch"], answers: Int64[Tensor, "batch size length"]
    ) -> Float[Tensor, "batch size"]:
        """1 for a right answer, else 0."""
        ...

    def logps(
        self, policy: nn.Module, prompts: Int64[Tensor, " rows"], answers: Int64[Tensor, "rows length"]
    ) -> Float[Tensor, "rows length"]:
        """Log-probability of each answer token."""
        ...

    def accuracy(self, policy: nn.Module) -> float:
        """Probability of a right answer on held-out prompts, exact (no sampling)."""
        ...


Method = Literal["grpo", "dppo", "no_rescale", "deterministic", "cppo", "greso"]
METHODS = ("grpo", "dppo", "no_rescale", "deterministic", "cppo", "greso")


@dataclass(frozen=True)
class Recipe:
    """How a run is trained.

    Args:
        method: "grpo": every completion updated. "dppo": unbiased pruning at both levels. "no_rescale": the same masks,
            weights 1. "deterministic": lowest first at both levels. "cppo": largest |A| kept, weights 1. "greso":
            prompts skipped by streaks, weights 1.
        prompt_rate, completion_rate: r_q and r_o (for "cppo" r_o is its rate; "grpo" and "greso" have none).
        steps, prompts, samples: optimizer steps, prompts kept a step, answers N a prompt.
        optimizer: "adamw" or "sgd"; lr; clip: largest gradient norm, or None.
        evaluate_every: steps between evaluations.
    """

    method: Method = "dppo"
    prompt_rate: float = 0.5
    completion_rate: float = 0.5
    steps: int = 300
    prompts: int = 32
    samples: int = 16
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    clip: float | None = 1.0
    evaluate_every: int = 10

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}: must be one of {', '.join(METHODS)}")


@dataclass
class Curve:
    """What a run did, one entry an evaluation.

    Attributes:
        step, accuracy: held-out probability of a right answer after so many steps.
        generated, updated: tokens so far. seconds, cpu_seconds: training time so far, without evaluations.
        full_generated: tokens a run without pruning would have generated for the prompts pulled so far.
        nonzero: tokens generated so far in completions with A ≠ 0.
    """

    step: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    full_generated: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    nonzero: list[int] = field(default_factory=list)

    def cost(self) -> Float[np.ndarray, " evaluations"]:
        """generated + 3·updated."""
        return np.array(self.generated) + 3 * np.array(self.updated)

    def cost_without_zeros(self) -> Float[np.ndarray, " evaluations"]:
        """The same for a run that leaves out A = 0 and nothing else: generated + 3·nonzero."""
        return np.array(self.generated) + 3 * np.array(self.nonzero)

    def smooth(self, width: int = 3) -> Float[np.ndarray, " evaluations"]:
        """Accuracy as a running mean over the last `width` evaluations."""
        values = np.array(self.accuracy)
        return np.array([values[max(0, i + 1 - width) : i + 1].mean() for i in range(len(values))])

    def to_reach(self, target: float, cost: np.ndarray) -> float:
        """Cost at which the smoothed accuracy first reaches the target, by linear interpolation; inf if never."""
        values = self.smooth()
        above = np.flatnonzero(values >= target)
        if not len(above):
            return float("inf")
        i = int(above[0])
        if i == 0:
            return float(cost[0])
        share = (target - values[i - 1]) / (values[i] - values[i - 1])
        return float(cost[i - 1] + share * (cost[i] - cost[i - 1]))

    def at_cost(self, budget: float) -> float:
        """Smoothed accuracy when the cost reaches the budget (the last one if it never does)."""
        return float(np.interp(budget, self.cost(), self.smooth()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class PromptSource:
    """Prompts in the order of epochs, with the prompt level of the method."""

    def __init__(self, n: int, recipe: Recipe, seed: int) -> None:
        self.n, self.recipe, self.seed = n, recipe, seed
        self.history = PromptHistory(n, rate=recipe.prompt_rate)
        self.greso = Greso()
        self.epoch, self.offset = 0, 0
        self._start()

    def _start(self) -> None:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.order = torch.randperm(self.n, generator=rng)
        self.history.start_epoch()
        prunes = self.recipe.method in ("dppo", "no_rescale", "deterministic") and self.recipe.prompt_rate > 0
        self.low = self.history.low(self.order) if prunes else np.zeros(self.n, dtype=bool)
        source = MaskGenerator(self.seed, self.epoch, "prompts")
        self.uniform = source.uniform(self.order).numpy()
        if self.recipe.method == "deterministic":
            self.uniform = np.nan_to_num(self.history.scores(self.order), nan=np.inf)

    def next(self) -> tuple[Tensor, Tensor, int]:
        """(prompts kept, weight of each, number pulled)."""
        size = self.recipe.prompts
        while True:
            if self.recipe.method == "greso":
                block = self._skip_by_streaks(size)
            else:
                block = self._block(size)
            if block is not None:
                return block
            self.epoch, self.offset = self.epoch + 1, 0
            self._start()

    def _block(self, size: int) -> tuple[Tensor, Tensor, int] | None:
        block = pull_block(self.low, self.uniform, self.offset, size, self.recipe.prompt_rate)
        if block is None:
            return None
        self.offset += block.pulled
        weight = torch.from_numpy(block.weight)
        if self.recipe.method == "deterministic":
            low = torch.from_numpy(self.low[block.kept])
            weight = torch.where(low, 1 / (1 - self.recipe.prompt_rate), 1.0).double()
        return self.order[block.kept], weight, block.pulled

    def _skip_by_streaks(self, size: int) -> tuple[Tensor, Tensor, int] | None:
        rest = self.order[self.offset :]
        keep = self.greso.prune(rest, MaskGenerator(self.seed, self.epoch)).keep
        kept = torch.nonzero(keep).flatten()[:size]
        if len(kept) < size:
            return None
        pulled = int(kept[-1]) + 1
        self.offset += pulled
        return rest[kept], torch.ones(size).double(), pulled

    def record(self, prompts: Tensor, advantages: Tensor, rewards: Tensor, step: int) -> None:
        """What a step found out, for later epochs."""
        self.history.update(prompts, advantages.abs().mean(1), step)
        if self.recipe.method == "greso":
            self.greso.update(prompts, rewards.mean(1).tolist())


def grpo_advantages(rewards: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
    """(r − mean)/std with ddof 0; exactly 0 where a group's rewards are all equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, keepdim=True, correction=0)
    return torch.where(std > 0, centred / std.clamp(min=1e-12), 0.0)


def _completions(recipe: Recipe, advantages: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """(keep, weight) of the flat batch, at the completion level."""
    flat, everyone = advantages.flatten(), torch.ones(advantages.numel(), dtype=torch.bool)
    if recipe.method in ("grpo", "greso"):
        return everyone, everyone.double()
    if recipe.method == "cppo":
        result = Cppo(recipe.completion_rate).prune(flat)
        return result.keep, result.weight.double()
    mode: Any = "deterministic" if recipe.method == "deterministic" else "bernoulli"
    cfg = PruningConfig(completion_rate=recipe.completion_rate, mode=mode)
    result = prune_completions(flat, recipe.samples, cfg, generator=MaskGenerator(seed, step))
    return result.keep, result.weight.double()


def train(
    task: Task, recipe: Recipe, seed: int, policy: nn.Module, *, on_step: Callable[[], None] | None = None
) -> Curve:
    """Trains `policy` in place.

    Args:
        task: the prompts and the verifier. recipe: see `Recipe`. seed: of prompts, answers and masks.
        policy: after its warm-up; the same for methods that are compared.
        on_step: called after each step (a progress bar).
    """
    curve = Curve()
    for _ in steps(task, recipe, seed, policy, curve):
        if on_step is not None:
            on_step()
    return curve


def steps(task: Task, recipe: Recipe, seed: int, policy: nn.Module, curve: Curve) -> Iterator[int]:
    """The training loop as a generator, one yield a step; fills the curve."""
    source, rng = PromptSource(task.n_prompts, recipe, seed), torch.Generator().manual_seed(seed)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[recipe.optimizer](policy.parameters(), lr=recipe.lr)
    totals = {"generated": 0, "updated": 0, "full_generated": 0, "nonzero": 0}
    seconds = cpu = 0.0
    _evaluate(task, policy, curve, 0, totals, seconds, cpu)
    surrogate = Surrogate("dapo")
    for step in range(recipe.steps):
        wall, processor = time.perf_counter(), time.process_time()
        prompts, prompt_weight, pulled = source.next()
        answers = task.sample(policy, prompts, recipe.samples, rng)
        rewards = task.rewards(prompts, answers)
        advantages = grpo_advantages(rewards)
        keep, weight = _completions(recipe, advantages, seed, step)
        if recipe.method != "no_rescale":
            weight = weight * prompt_weight.repeat_interleave(recipe.samples)
        else:
            weight = keep.double()
        source.record(prompts, advantages, rewards, step)
        rows = torch.nonzero(keep).flatten()
        if len(rows):
            flat = answers.reshape(-1, task.answer_length)[rows]
            logps = task.logps(policy, prompts.repeat_interleave(recipe.samples)[rows], flat)
            full = pulled if recipe.method in ("dppo", "deterministic") else len(prompts)
            loss = surrogate.loss(
                logps, advantages.flatten()[rows], torch.ones_like(logps), weight=weight[rows],
                normalizer=float(full * recipe.samples * task.answer_length),
            )  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(policy.parameters(), recipe.clip)
            optimizer.step()
        seconds, cpu = seconds + time.perf_counter() - wall, cpu + time.process_time() - processor
        totals["generated"] += answers.numel()
        totals["updated"] += len(rows) * task.answer_length
        totals["full_generated"] += pulled * recipe.samples * task.answer_length
        totals["nonzero"] += int((advantages != 0).sum()) * task.answer_length
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            _evaluate(task, policy, curve, step + 1, totals, seconds, cpu)
        yield step


def _evaluate(
    task: Task, policy: nn.Module, curve: Curve, step: int, totals: dict[str, int], seconds: float, cpu: float
) -> None:
    curve.step.append(step)
    curve.accuracy.append(task.accuracy(policy))
    curve.generated.append(totals["generated"])
    curve.updated.append(totals["updated"])
    curve.full_generated.append(totals["full_generated"])
    curve.nonzero.append(totals["nonzero"])
    curve.seconds.append(seconds)
    curve.cpu_seconds.append(cpu)
