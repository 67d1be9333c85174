"""What others do instead: drop completions or prompts without re-weighting. Biased; here to be compared with.

CPPO (arXiv 2503.22342) keeps the completions of largest |A|. GRESO (arXiv 2506.02177) skips prompts that were all
right or all wrong at their last visits, with a probability that grows with the streak. DAPO's dynamic sampling drops
groups without variance and samples others instead. All are `Design`s of `dppo.audit` too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from dppo.audit import Component, bernoulli
from dppo.config import PruningConfig, check_rate
from dppo.draws import MaskGenerator
from dppo.keys import int_ids
from dppo.pruning import PruneResult, distinct, stratify


@dataclass(frozen=True)
class Cppo:
    """Completion pruning policy optimisation.

    Args:
        rate: share removed; ⌈(1−rate)·B⌉ completions of largest |A| stay, with weight 1.
        allocation: fill the freed places with further prompts: `prompts_per_batch` grows by 1/(1−rate).
    """

    rate: float = 0.5
    allocation: bool = False

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)

    def prompts_per_batch(self, prompts: int) -> int:
        """How many prompts a batch holds at equal update cost."""
        return math.floor(prompts / (1 - self.rate)) if self.allocation else prompts

    def keep(self, advantages: Float[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """The completions that stay."""
        count = math.ceil((1 - self.rate) * len(advantages) - 1e-9)
        keep = torch.zeros(len(advantages), dtype=torch.bool, device=advantages.device)
        keep[torch.topk(advantages.abs(), count).indices] = True
        return keep

    def prune(self, advantages: Float[Tensor, " batch"]) -> PruneResult:
        """The same as a PruneResult; its weights are 1, and not the inverse of any probability."""
        keep = self.keep(advantages)
        return PruneResult(keep, keep.float(), (~keep).float(), torch.zeros_like(keep))

    def components(self, batch: Mapping[str, Any]) -> list[Component]:
        """One outcome."""
        keep = self.keep(batch["advantages"])
        return [Component(torch.arange(len(keep)), torch.ones(1).double(), keep.double()[None])]


@dataclass
class Greso:
    """GRPO with efficient selective rollout: skip before generation, no re-weighting.

    A prompt whose latest c visits were all right (mean reward >= `easy`) or all wrong (<= `hard`) is skipped with
    probability 1 − max(p^c, floor), p being p_easy or p_hard. After each batch each p moves by ±step, down when its
    kind's share of the generated groups exceeds its target (a third of `target` for easy, two thirds for hard).
    """

    p_easy: float = 0.5
    p_hard: float = 0.5
    floor: float = 0.01
    easy: float = 0.98
    hard: float = 0.11
    step: float = 0.01
    bounds: tuple[float, float] = (0.05, 0.95)
    target: float = 0.25
    streaks: dict[int, tuple[str, int]] = field(default_factory=dict)

    def skip_probability(self, ids: Any) -> Float64[np.ndarray, " batch"]:
        """1 − max(p^c, floor) of each prompt; 0 for unseen ones and broken streaks."""
        return np.array([self._skip(key) for key in int_ids(ids).tolist()])

    def _skip(self, key: int) -> float:
        kind, count = self.streaks.get(key, ("", 0))
        if not count:
            return 0.0
        return 1 - max((self.p_easy if kind == "easy" else self.p_hard) ** count, self.floor)

    def prune(self, ids: Any, generator: MaskGenerator) -> PruneResult:
        """Which prompts to generate for; weight 1."""
        prob = torch.from_numpy(self.skip_probability(ids))
        keep = generator.of("prompts").uniform(distinct(int_ids(ids))) >= prob
        return PruneResult(keep, keep.float(), prob.float(), torch.zeros_like(keep))

    def update(self, ids: Any, mean_reward: Sequence[float]) -> None:
        """Records one batch of generated groups."""
        share = {"easy": 0.0, "hard": 0.0}
        rewards = list(mean_reward)
        for key, reward in zip(int_ids(ids).tolist(), rewards, strict=True):
            kind = "easy" if reward >= self.easy else "hard" if reward <= self.hard else ""
            before = self.streaks.get(key, ("", 0))
            self.streaks[key] = (kind, before[1] + 1 if before[0] == kind else 1) if kind else ("", 0)
            if kind:
                share[kind] += 1 / len(rewards)
        self.p_easy = self._moved(self.p_easy, share["easy"] > self.target / 3)
        self.p_hard = self._moved(self.p_hard, share["hard"] > 2 * self.target / 3)

    def _moved(self, p: float, down: bool) -> float:
        return float(np.clip(p - self.step if down else p + self.step, *self.bounds))

    def components(self, batch: Mapping[str, Any]) -> list[Component]:
        """One skip decision a group; `batch["prompt_ids"]` are the groups' ids, in the order of the sorted groups."""
        strata = stratify(batch["advantages"], batch["groups"], PruningConfig(free_zeros=False))
        result = []
        for index, prob in enumerate(self.skip_probability(batch["prompt_ids"])):
            members = torch.nonzero(strata.group == index).flatten()
            if prob:
                part = bernoulli(members, float(prob), reweight=False)
                result.append(Component(part.members, part.probability, part.factor, saves_rollouts=True))
        return result


def dapo_keep(rewards: Float[Tensor, " batch"], group_size: int) -> Bool[Tensor, " batch"]:
    """DAPO's dynamic sampling: groups whose rewards are not all equal (for 0/1 rewards: 0 < accuracy < 1)."""
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"group_size={group_size} does not divide the batch of {len(rewards)} completions")
    grouped = rewards.reshape(-1, group_size)
    return (grouped != grouped[:, :1]).any(1).repeat_interleave(group_size)
