"""The one set of options of dynamic pruning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

MAX_RATE = 0.95
MODES = ("bernoulli", "fixed", "systematic", "deterministic")
SCORES = ("abs_advantage", "abs_advantage_x_len")

Score = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class PruningConfig:
    """Options of completion-level and prompt-level pruning.

    Args:
        prompt_rate: r_q, the probability with which a prompt of low history is skipped; in [0, 0.95].
        completion_rate: r_o, the probability with which a completion of low advantage is skipped; in [0, 0.95].
        mode: how the kept ones are drawn. "bernoulli": each low item independently. "fixed": exactly floor(r·n_low) low
            items of a stratum (a group; the low prompts of a batch), uniformly. "systematic": probability-proportional
            inclusion at the same expected budget. All three are unbiased. "deterministic": the floor(r·n_low) lowest
            are removed and the other low ones weighted by 1/(1−r); **biased**, for ablations, and warns.
        free_zeros: remove completions whose advantage is exactly 0, for nothing: without a KL or entropy term they
            have no gradient. Switch it off (the trainer does) where such terms exist.
        anneal: δ in (0, 1]: no pruning in the last 1−δ share of the steps. 1 prunes to the end.
        threshold: when the prompt threshold τ is recomputed: at each "epoch" start or for each "batch".
        resample_each_epoch: draw a new mask for each inner update on the same rollouts. With one mask for all inner
            updates only the first of them is unbiased, since later parameters depend on the mask.
        score: what is compared with its group's mean: |A|, |A|·length, or a callable (advantages, lengths) -> scores.
        min_keep_per_group: at least this many completions with a non-zero term of a group are kept; the weights use
            the true inclusion probabilities of that conditioned draw. Modes "bernoulli" and "fixed" only.
        budget: with mode "systematic", whether the kept share 1−r is counted in "items" or in "tokens".

    Raises:
        ValueError: an option outside its range (a rate of 1 on a non-zero term would break unbiasedness).
    """

    prompt_rate: float = 0.5
    completion_rate: float = 0.5
    mode: Literal["bernoulli", "fixed", "systematic", "deterministic"] = "bernoulli"
    free_zeros: bool = True
    anneal: float = 1.0
    threshold: Literal["epoch", "batch"] = "epoch"
    resample_each_epoch: bool = True
    score: Literal["abs_advantage", "abs_advantage_x_len"] | Score = "abs_advantage"
    min_keep_per_group: int = 0
    budget: Literal["items", "tokens"] = "items"

    def __post_init__(self) -> None:
        check_rate("prompt_rate", self.prompt_rate)
        check_rate("completion_rate", self.completion_rate)
        _check_choice("mode", self.mode, MODES)
        _check_choice("threshold", self.threshold, ("epoch", "batch"))
        _check_choice("budget", self.budget, ("items", "tokens"))
        if not callable(self.score):
            _check_choice("score", self.score, SCORES)
        if not 0 < self.anneal <= 1:
            raise ValueError(f"anneal={self.anneal!r}: the share of steps that are pruned must be in (0, 1]")
        if not isinstance(self.min_keep_per_group, int) or self.min_keep_per_group < 0:
            raise ValueError(f"min_keep_per_group={self.min_keep_per_group!r}: an integer >= 0 is needed")
        if self.min_keep_per_group and self.mode not in ("bernoulli", "fixed"):
            raise ValueError(
                f"min_keep_per_group={self.min_keep_per_group} with mode={self.mode!r}: the inclusion probabilities of "
                "that draw are not known exactly; use mode='bernoulli' or mode='fixed'"
            )

    def is_active(self, progress: float) -> bool:
        """Whether pruning is on at `progress`, the share of training done, in [0, 1]."""
        return self.anneal >= 1 or progress < self.anneal


def check_rate(name: str, rate: float) -> None:
    """Raises ValueError unless 0 <= rate <= 0.95."""
    if not 0 <= rate <= MAX_RATE:  # NaN fails too
        raise ValueError(
            f"{name}={rate!r}: a pruning probability must be in [0, {MAX_RATE}]; at 1 an item could never be kept "
            "and no weight makes up for it (support condition)"
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
