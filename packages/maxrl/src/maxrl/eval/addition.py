"""Addition: ``BOS a a + b b =`` is answered by the three digits of the sum, the leading one first.

There is one right answer, so p(x) is its probability by teacher forcing: NLL and pass@k are exact. A small transformer
is first taught by supervision until it is right now and then, and then trained on its own rollouts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml26_shared.checkpoint import load_state, save_state
from maxrl.advantages import maxrl_advantages
from maxrl.baselines import differential_smoothing
from maxrl.eval.transformer import TinyTransformer, completion_log_distributions, completion_log_probs, sample

BOS, PLUS, EQUALS, VOCABULARY = 10, 11, 12, 13
ANSWER = 3
TEST_PROMPTS = 1000


def encode(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (n, 7) and answers (n, 3) of ``pairs`` (n, 2), numbers below 100."""
    a, b = pairs[:, 0], pairs[:, 1]
    total = a + b
    mark = torch.full_like(a, BOS)
    prompt = torch.stack(
        [mark, a // 10, a % 10, torch.full_like(a, PLUS), b // 10, b % 10, torch.full_like(a, EQUALS)], 1
    )
    return prompt, torch.stack([total // 100, total // 10 % 10, total % 10], 1)


def split(scarce: int | None = None) -> tuple[Tensor, Tensor]:
    """All pairs below 100, shuffled once: (train, 1000 for testing). ``scarce`` keeps that many training pairs."""
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    pairs = torch.stack([order // 100, order % 100], 1)
    train = pairs[TEST_PROMPTS:]
    return train[:scarce] if scarce is not None else train, pairs[:TEST_PROMPTS]


@dataclass(frozen=True)
class Run:
    """RL from the base model of ``seed``: ``prompts`` x ``rollouts`` each step, AdamW, gradient norm at most 1. The
    base model is taught until its pass@1 reaches ``base_pass``. ``order`` is the estimator's, ``entropy_bonus`` weighs
    the mean entropy of the sampled tokens in the objective, ``smoothing`` is the gamma of differential smoothing."""

    estimator: str = "maxrl"
    lr: float = 1e-3
    seed: int = 0
    scarce: int | None = None
    steps: int = 300
    prompts: int = 32
    rollouts: int = 16
    base_pass: float = 0.07
    order: int | None = None
    entropy_bonus: float = 0.0
    smoothing: float = 0.0


def base_model(seed: int, base_pass: float = 0.07) -> TinyTransformer:
    """A copy of the supervised model of ``seed``, which is trained once and kept."""
    return copy.deepcopy(_taught(seed, base_pass))


@lru_cache(maxsize=8)
def _taught(seed: int, base_pass: float) -> TinyTransformer:
    """The supervised model: 64 prompts a step at 1e-3 from the weights of ``seed``, stopped when pass@1 on 500 training
    pairs reaches ``base_pass`` (looked at every 10 steps, 2000 at most)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyTransformer(VOCABULARY, 7 + ANSWER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, _ = split()
    generator = torch.Generator().manual_seed(seed + 17)
    for step in range(2000):
        if step % 10 == 0 and float(likelihoods(model, train[:500]).exp().mean()) >= base_pass:
            break
        prompts, answers = encode(train[torch.randint(0, len(train), (64,), generator=generator)])
        loss = -completion_log_probs(model, prompts, answers).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def likelihoods(model: TinyTransformer, pairs: Tensor) -> Tensor:
    """Log p(x) of the right answer of each pair, (n,) float64."""
    prompts, answers = encode(pairs)
    return completion_log_probs(model, prompts, answers).double().sum(1)


def metrics(log_p: Tensor, ks: tuple[int, ...] = (1, 8, 64, 256)) -> dict[str, float]:
    """``nll`` in nats and ``pass@k``, means over prompts."""
    p = log_p.exp()
    return {"nll": float(-log_p.mean()), **{f"pass@{k}": float(-torch.expm1(k * torch.log1p(-p)).mean()) for k in ks}}


def train(
    run: Run,
    *,
    checkpoint: Path | None = None,
    every: int = 50,
    step: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Train and measure: ``{"test": metrics, "train": metrics, "base": metrics, "log_p": [...], "hit_share": [...]}``.

    ``hit_share`` is, per step, the share of prompts with at least one success. With ``checkpoint`` (a folder) the state
    is saved every ``every`` steps and a run that was stopped continues from there to the same result.
    """
    pairs, test = split(run.scarce)
    model = base_model(run.seed, run.base_pass)
    base = metrics(likelihoods(model, test))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    generator = torch.Generator().manual_seed(run.seed + 29)
    hits: list[float] = []
    if checkpoint is not None and checkpoint.exists():
        state = load_state(checkpoint)
        if state["run"] != asdict(run):
            raise ValueError(f"{checkpoint} belongs to another run: {state['run']}; remove it or use another folder")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        hits = list(state["hits"])
    while len(hits) < run.steps:
        hits.append(_step(run, model, optimizer, pairs, generator))
        if step is not None:
            step(len(hits), run.steps)
        if checkpoint is not None and len(hits) % every == 0:
            state = {"run": asdict(run), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_state(checkpoint, {**state, "generator": generator.get_state(), "hits": hits})
    log_p = likelihoods(model, test)
    return {
        "base": base,
        "test": metrics(log_p),
        "train": metrics(likelihoods(model, pairs)),
        "log_p": [round(x, 6) for x in log_p.tolist()],
        "hit_share": hits,
    }


def _step(
    run: Run, model: TinyTransformer, optimizer: torch.optim.Optimizer, pairs: Tensor, generator: torch.Generator
) -> float:
    chosen = pairs[torch.randint(0, len(pairs), (run.prompts,), generator=generator)]
    prompts, answers = encode(chosen)
    completions = sample(model, prompts, run.rollouts, ANSWER, generator)
    rewards = (completions == answers.repeat_interleave(run.rollouts, 0)).all(1)
    a = maxrl_advantages(rewards, group_size=run.rollouts, estimator=run.estimator, order=run.order)
    optimizer.zero_grad()
    # Equal completions of a prompt have equal scores: each is computed once, with the sum of its advantages.
    group = torch.arange(run.prompts).repeat_interleave(run.rollouts)
    key = group * VOCABULARY**3 + completions @ torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    distinct, inverse, copies = torch.unique(key, return_inverse=True, return_counts=True)
    first = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(key.numel()))
    total = torch.zeros(distinct.numel()).index_add_(0, inverse, a)
    everything = bool(run.smoothing or run.entropy_bonus)
    rows = first if everything else first[total != 0]
    if rows.numel():
        distributions = completion_log_distributions(model, prompts, completions[rows], group[rows])
        log_probs = distributions.gather(2, completions[rows][:, :, None]).squeeze(2)
        if run.smoothing:
            total = total + copies * differential_smoothing(rewards[rows], log_probs.mean(1), run.smoothing)
        weights = total if everything else total[total != 0]
        loss = -(weights * log_probs.sum(1)).sum() / (a.numel() * ANSWER)
        if run.entropy_bonus:
            negative_entropy = (distributions.exp() * distributions).sum((1, 2))
            loss = loss + run.entropy_bonus * (copies * negative_entropy).sum() / (a.numel() * ANSWER)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(rewards.view(-1, run.rollouts).any(1).float().mean())
