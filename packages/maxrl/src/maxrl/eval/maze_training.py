"""A small transformer that learns to walk through mazes: supervised on shortest paths, then on its own rollouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from maxrl.advantages import maxrl_advantages
from maxrl.coverage import PassAtKCurve
from maxrl.eval.maze import TOKENS, Maze, judge, make_maze
from maxrl.eval.transformer import TinyTransformer, completion_log_probs, sample

_ID = {token: i for i, token in enumerate(TOKENS)}
EOS = _ID["<eos>"]


@dataclass(frozen=True)
class Run:
    """RL with ``rollouts`` a prompt on mazes of ``size``, from the base model of ``seed``."""

    estimator: str = "maxrl"
    rollouts: int = 8
    seed: int = 0
    size: int = 9
    lr: float = 3e-4
    steps: int = 150
    prompts: int = 16
    sft_steps: int = 300

    @property
    def longest(self) -> int:
        """Tokens an answer may have: enough for every shortest path of the training mazes, ``DONE`` and ``<eos>``."""
        return 4 * self.size


def encode(text: str) -> list[int]:
    """Token ids of a maze sequence."""
    return [_ID[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    """Words of token ids, up to the end if there is one."""
    end = ids.index(EOS) if EOS in ids else len(ids)
    return " ".join(TOKENS[i] for i in ids[:end])


def _mazes(count: int, run: Run, rng: np.random.Generator) -> list[Maze]:
    found: list[Maze] = []
    while len(found) < count:
        maze = make_maze(run.size, rng)
        if len(maze.shortest_path()) + 2 <= run.longest:
            found.append(maze)
    return found


def base_model(run: Run) -> TinyTransformer:
    """A copy of the model supervised on ``sft_steps`` batches of 32 shortest paths, AdamW at 1e-3; it is trained once
    for all runs of a seed and kept."""
    return copy.deepcopy(_taught(replace(run, estimator="", rollouts=0, lr=0.0, steps=0, prompts=0)))


@lru_cache(maxsize=4)
def _taught(run: Run) -> TinyTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = TinyTransformer(len(TOKENS), run.size * (run.size + 1) + 4 + run.longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = np.random.default_rng(run.seed + 11)
    for _ in range(run.sft_steps):
        mazes = _mazes(32, run, rng)
        prompts = torch.tensor([encode(m.prompt) for m in mazes])
        answers = [encode(" ".join([*m.shortest_path(), "DONE", "<eos>"])) for m in mazes]
        width = max(map(len, answers))
        padded = torch.tensor([a + [0] * (width - len(a)) for a in answers])
        log_probs = completion_log_probs(model, prompts, padded)
        loss = -(log_probs * (padded != 0)).sum() / (padded != 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _rollouts(
    model: TinyTransformer, mazes: list[Maze], run: Run, n: int, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    prompts = torch.tensor([encode(m.prompt) for m in mazes])
    completions = sample(model, prompts, n, run.longest, g, stop=EOS)
    passed = [judge(decode(ids), mazes[i // n]) for i, ids in enumerate(completions.tolist())]
    return prompts, completions, torch.tensor(passed)


def train(run: Run, *, step: Callable[[int, int], None] | None = None) -> TinyTransformer:
    """RL from :func:`base_model`: AdamW, gradient norm at most 1, loss divided by the rollouts times the longest
    answer."""
    model = base_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    generator = torch.Generator().manual_seed(run.seed + 5)
    rng = np.random.default_rng(run.seed + 23)
    for done in range(run.steps):
        mazes = _mazes(run.prompts, run, rng)
        prompts, completions, passed = _rollouts(model, mazes, run, run.rollouts, generator)
        a = maxrl_advantages(passed, group_size=run.rollouts, estimator=run.estimator)
        live = a != 0
        optimizer.zero_grad()
        if bool(live.any()):
            chosen = completions[live]
            ended = (chosen == EOS).cumsum(1) - (chosen == EOS).long()  # 0 up to and including the first <eos>
            width = int((ended == 0).sum(1).max())
            owner = torch.arange(run.prompts).repeat_interleave(run.rollouts)[live]
            log_probs = completion_log_probs(model, prompts, chosen[:, :width], owner)
            loss = -(a[live, None] * log_probs * (ended[:, :width] == 0)).sum() / (a.numel() * run.longest)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step is not None:
            step(done + 1, run.steps)
    return model


def coverage(model: TinyTransformer, run: Run, *, mazes: int = 128, rollouts: int = 32) -> PassAtKCurve:
    """Coverage on held-out mazes from ``rollouts`` samples each."""
    held_out = _mazes(mazes, run, np.random.default_rng(10**6 + run.seed))
    passed = _rollouts(model, held_out, run, rollouts, torch.Generator().manual_seed(run.seed + 77))[2]
    return PassAtKCurve.from_counts(rollouts, passed.view(mazes, rollouts).sum(1).numpy(), [1, 8, rollouts])
