r"""Sequential rollouts: draw until a prompt has succeeded, and reach a high order of the objective with few samples.

Draw rollouts of a prompt in chunks of c, stop after the chunk in which the successes reach m, or at the cap M, and
average the scores of all successes drawn: ``g = (1/K) sum_i r_i S_i``, 0 when K = 0. Given the rewards every success
has the expected score ``grad log p``, and at least one of M comes with probability ``1 - (1-p)^M``; so ``E[g] = w_M(p)
grad p``, order M exactly, whatever c and m. For c = m = 1 the expected number of rollouts is ``w_M(p)`` as well
(derived).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from maxrl.groups import Groups

SampleFn = Callable[..., Sequence[Any]]
VerifyFn = Callable[[Sequence[Any], Sequence[Any]], Sequence[float | None] | Tensor]


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of P prompts, in the order of the prompts.

    Attributes:
        completions: list of the B completions.
        group_ids: (B,) int64, the prompt of each rollout, 0..P-1.
        rewards: (B,) float32, 0 or 1, NaN where the verifier could not score.
        n_drawn: (P,) int64, rollouts of each prompt.
        max_rollouts: the cap M, which is the order of the objective.
    """

    completions: list[Any]
    group_ids: Tensor
    rewards: Tensor
    n_drawn: Tensor
    max_rollouts: int

    @property
    def cost(self) -> int:
        """Rollouts drawn in all."""
        return int(self.n_drawn.sum())

    @property
    def successes(self) -> Tensor:
        """K of each prompt, (P,) int64."""
        won = (self.rewards == 1).long()
        return torch.zeros_like(self.n_drawn).index_add_(0, self.group_ids, won)

    def advantages(self, *, beta: float = 0.0, scale: str = "mean") -> Float[Tensor, " b"]:
        r"""Coefficients with ``(1/n_g) sum_i a_i S_i = (1/K) sum_i r_i S_i - (beta/M) sum_i S_i`` for a prompt with
        n_g rollouts.

        ``beta`` is a control variate with expectation zero (Wald: the number drawn is a stopping time), so every value
        keeps the order M; prompts without a success then have an advantage as well and must stay in the batch.
        ``scale="batch"`` makes the plain mean over the batch weigh every prompt equally, as in
        :func:`maxrl.maxrl_advantages`.

        Returns:
            (B,) float32; 0 where the reward is NaN.
        """
        if scale not in ("mean", "batch"):
            raise ValueError(f"scale = {scale!r}: choose 'mean' or 'batch'")
        groups = Groups(self.n_drawn, index=self.group_ids)
        k = groups.spread(self.successes.double())
        won = (self.rewards == 1).double()
        per_score = won / k.clamp(min=1) - beta / self.max_rollouts
        per_score = per_score.masked_fill(self.rewards.isnan(), 0.0)
        if scale == "batch":
            return (per_score * self.rewards.numel() / max(self.n_drawn.numel(), 1)).float()
        return (per_score * groups.spread(self.n_drawn.double())).float()


def rollout_until_success(
    sample_fn: SampleFn,
    verify_fn: VerifyFn,
    prompts: Sequence[Any],
    *,
    chunk: int = 8,
    max_rollouts: int = 128,
    min_successes: int = 1,
    generator: torch.Generator | None = None,
) -> RolloutBatch:
    """Draw rollouts of each prompt until ``min_successes`` have passed, at most ``max_rollouts``.

    All unfinished prompts are sampled together: one call of ``sample_fn`` and one of ``verify_fn`` per chunk.

    Args:
        sample_fn: ``sample_fn(prompts) -> completions``, one per entry; prompts come repeated. Called with
            ``generator=`` when a generator is given.
        verify_fn: ``verify_fn(prompts, completions) -> rewards``, 0 or 1 each; NaN or None for a rollout that could not
            be scored, which counts as drawn and gets no weight.
        prompts: the P prompts, of any type.
        chunk: rollouts per prompt and call; 1 draws fewest, more fills the accelerator.
        max_rollouts: cap M per prompt, the order of the objective.
        min_successes: successes after which a prompt stops.
        generator: handed to ``sample_fn``.

    Raises:
        ValueError: chunk, cap or successes below 1, more successes than the cap, a wrong number of completions or
        rewards,
            a reward other than 0, 1 and NaN.
    """
    for name, value in (("chunk", chunk), ("max_rollouts", max_rollouts), ("min_successes", min_successes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: a whole number >= 1 is needed")
    if min_successes > max_rollouts:
        raise ValueError(f"min_successes = {min_successes} exceeds max_rollouts = {max_rollouts}")
    extra = {} if generator is None else {"generator": generator}
    drawn = [0] * len(prompts)
    won = [0] * len(prompts)
    completions: list[list[Any]] = [[] for _ in prompts]
    rewards: list[list[float]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    while unfinished:
        owners = [i for i in unfinished for _ in range(min(chunk, max_rollouts - drawn[i]))]
        batch = [prompts[i] for i in owners]
        new = list(sample_fn(batch, **extra))
        scores = _scores(verify_fn(batch, new), len(batch), len(new))
        for owner, completion, score in zip(owners, new, scores, strict=True):
            completions[owner].append(completion)
            rewards[owner].append(score)
            drawn[owner] += 1
            won[owner] += score == 1
        unfinished = [i for i in unfinished if won[i] < min_successes and drawn[i] < max_rollouts]
    n_drawn = torch.tensor(drawn, dtype=torch.int64)
    return RolloutBatch(
        [c for per_prompt in completions for c in per_prompt],
        torch.repeat_interleave(torch.arange(len(prompts)), n_drawn),
        torch.tensor([r for per_prompt in rewards for r in per_prompt], dtype=torch.float32),
        n_drawn,
        max_rollouts,
    )


def _scores(rewards: Sequence[float | None] | Tensor, asked: int, sampled: int) -> list[float]:
    if sampled != asked:
        raise ValueError(f"sample_fn returned {sampled} completions for {asked} prompts: one each is needed")
    raw = rewards.tolist() if isinstance(rewards, Tensor) else list(rewards)
    scores = [math.nan if r is None else float(r) for r in raw]
    if len(scores) != asked:
        raise ValueError(f"verify_fn returned {len(scores)} rewards for {asked} rollouts: one each is needed")
    for score in scores:
        if not (score in (0.0, 1.0) or math.isnan(score)):
            raise ValueError(
                f"verify_fn returned {score}: sequential rollouts need pass/fail, 0 or 1 (NaN: could not be scored)"
            )
    return scores


def expected_rollouts(p: float, max_rollouts: int, chunk: int = 1, min_successes: int = 1) -> float:
    """Expected rollouts of a prompt with pass rate ``p``: chunks of ``chunk`` until ``min_successes`` passed, at most
    the cap.

    For ``chunk = min_successes = 1`` this is ``w_M(p)``. Exact up to rounding, O(max_rollouts / chunk * min_successes).
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p = {p}: pass rates lie in [0, 1]")
    total = 0.0
    for drawn in range(0, max_rollouts, chunk):
        fewer = sum(math.comb(drawn, j) * p**j * (1 - p) ** (drawn - j) for j in range(min(min_successes, drawn + 1)))
        total += min(chunk, max_rollouts - drawn) * fewer
    return total
