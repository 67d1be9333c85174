"""Rollout logs of any trainer: reading them, and replaying pruning on them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.baselines import Cppo, Greso
from dppo.config import PruningConfig
from dppo.draws import MaskGenerator
from dppo.learning import grpo_advantages
from dppo.prompts import PromptHistory
from dppo.pruning import effective_sample_size, prune_completions, stratify


class LogError(ValueError):
    """A line of a log that cannot be used."""


@dataclass(frozen=True)
class Group:
    """One group of completions.

    Attributes:
        prompt: id, as the log has it. step: or None. rewards, lengths, advantages: (G,).
    """

    prompt: str | int
    step: int | None
    rewards: Tensor
    lengths: Tensor
    advantages: Tensor


def read_groups(path: str | Path) -> list[Group]:
    """The groups of a log, in order.

    Rows of one prompt and one step are a group, wherever they stand; without "step", rows of one prompt that follow
    each other, cut to the most common group size where a prompt was visited twice in a row. Missing
    advantages are (r − mean)/std with ddof 0.

    Raises:
        FileNotFoundError: no such file.
        LogError: says the line, what is wrong with it and what is expected.
    """
    rows = list(_rows(Path(path)))
    if not rows:
        raise LogError(f"{path} has no rows; expected JSONL with prompt_id, reward and length")
    return [_group(members) for members in _grouped(rows)]


def read_lengths(path: str | Path) -> np.ndarray:
    """Token counts: one whole number a line, or JSONL rows with "length".

    Raises:
        FileNotFoundError, LogError.
    """
    result = []
    for number, line in _lines(Path(path)):
        value: Any = line
        if line.startswith("{"):
            value = _parse(path, number, line).get("length")
        try:
            count = int(str(value))
        except ValueError:
            raise LogError(f"{path}, line {number}: {str(value)[:40]!r} is not a whole number of tokens") from None
        if count < 0:
            raise LogError(f"{path}, line {number}: a length of {count}; lengths are >= 0")
        result.append(count)
    return np.array(result, dtype=np.int64)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.strip()


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise LogError(f"{path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise LogError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
    return row


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        row = _parse(path, number, line)
        where = f"{path}, line {number}"
        for name in ("prompt_id", "reward", "length"):
            if name not in row:
                raise LogError(f"{where}: no {name!r}; a row needs prompt_id, reward and length")
        if not isinstance(row["prompt_id"], (str, int)):
            raise LogError(f"{where}: prompt_id must be a text or an integer, got {row['prompt_id']!r}")
        for name in ("reward", "advantage"):
            value = row.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise LogError(f"{where}: {name} must be a finite number, got {value!r}")
        if isinstance(row["length"], bool) or not isinstance(row["length"], int) or row["length"] < 0:
            raise LogError(f"{where}: length must be a whole number >= 0, got {row['length']!r}")
        if row.get("step") is not None and (isinstance(row["step"], bool) or not isinstance(row["step"], int)):
            raise LogError(f"{where}: step must be an integer, got {row['step']!r}")
        yield row


def _grouped(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    if all("step" in row for row in rows):
        by_key: dict[Any, list[dict[str, Any]]] = {}
        for row in rows:
            by_key.setdefault((row["step"], row["prompt_id"]), []).append(row)
        runs = list(by_key.values())
    else:
        runs = []
        for row in rows:
            if runs and runs[-1][0]["prompt_id"] == row["prompt_id"]:
                runs[-1].append(row)
            else:
                runs.append([row])
    sizes = [len(run) for run in runs]
    usual = max(set(sizes), key=lambda size: (sizes.count(size), -size))
    cut = []
    for run in runs:
        whole = len(run) > usual and len(run) % usual == 0
        cut += [run[i : i + usual] for i in range(0, len(run), usual)] if whole else [run]
    return cut


def _group(members: list[dict[str, Any]]) -> Group:
    rewards = torch.tensor([float(m["reward"]) for m in members], dtype=torch.float64)
    if all("advantage" in m for m in members):
        advantages = torch.tensor([float(m["advantage"]) for m in members], dtype=torch.float64)
    else:
        advantages = grpo_advantages(rewards[None])[0]
    lengths = torch.tensor([m["length"] for m in members])
    return Group(members[0]["prompt_id"], members[0].get("step"), rewards, lengths, advantages)


def batches(groups: list[Group], prompts: int) -> Iterator[list[Group]]:
    """Groups of one step together; without steps, `prompts` groups at a time."""
    if groups and all(g.step is not None for g in groups):
        by_step: dict[int, list[Group]] = {}
        for group in groups:
            by_step.setdefault(int(group.step or 0), []).append(group)
        yield from (by_step[step] for step in sorted(by_step))
        return
    yield from (groups[i : i + prompts] for i in range(0, len(groups), prompts))


@dataclass
class Replay:
    """What pruning would have done to a logged run; sums over its batches.

    A completion's gradient is stood for by s = |A|·√length (tokens with uncorrelated scores), its signal by |A|·length.

    Attributes:
        groups, dead_groups, completions, tokens: of the log.
        generated, updated: tokens expected to be generated and updated on with dynamic pruning.
        energy, added: Σ s², and Σ (1/π − 1)·s² (what Bernoulli pruning adds).
        ess, batches: sum of the drawn batches' effective sample sizes over their sizes, and their number.
        signal, drift: Σ |A|·length, and Σ A·length; lost and drift_after by method: the signal dropped in expectation,
            and Σ A·length after dropping, neither made up for by weights.
    """

    groups: int = 0
    dead_groups: int = 0
    completions: int = 0
    tokens: int = 0
    generated: float = 0.0
    updated: float = 0.0
    energy: float = 0.0
    added: float = 0.0
    ess: float = 0.0
    batches: int = 0
    signal: float = 0.0
    drift: float = 0.0
    lost_cppo: float = 0.0
    lost_greso: float = 0.0
    drift_cppo: float = 0.0
    drift_greso: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Ratios a person can read."""
        full, spent = 4 * self.tokens, self.generated + 3 * self.updated
        signal = self.signal or float("nan")
        return {
            "groups": self.groups, "dead_groups": self.dead_groups, "completions": self.completions,
            "tokens": self.tokens, "generated_share": self.generated / max(self.tokens, 1),
            "updated_share": self.updated / max(self.tokens, 1), "speedup_tokens": full / spent if spent else None,
            "variance_inflation": 1 + self.added / self.energy if self.energy else None,
            "ess_share": self.ess / max(self.batches, 1),
            "bias": {
                "dppo": {"signal_lost": 0.0, "drift": self.drift / signal},
                "cppo": {"signal_lost": self.lost_cppo / signal, "drift": self.drift_cppo / signal},
                "greso": {"signal_lost": self.lost_greso / signal, "drift": self.drift_greso / signal},
            },
        }  # fmt: skip


def replay(groups: list[Group], cfg: PruningConfig, *, prompts: int = 32, seed: int = 0) -> Replay:
    """Runs both levels of dynamic pruning, CPPO and GRESO over a log, each from what its own past would have told it.

    Args:
        groups: of `read_groups`. cfg: the pruning. prompts: groups a batch where the log has no steps. seed: of the
            masks drawn for the effective sample size.
    """
    result, history, greso = Replay(), PromptHistory(rate=cfg.prompt_rate, threshold="batch"), Greso()
    for step, batch in enumerate(batches(groups, prompts)):
        ids = [g.prompt if isinstance(g.prompt, int) else str(g.prompt) for g in batch]
        prompt_prob = history.prob(ids)
        skip = torch.from_numpy(greso.skip_probability(ids))
        _count(result, batch, prompt_prob, skip, cfg, MaskGenerator(seed, step))
        history.update(ids, [float(g.advantages.abs().mean()) for g in batch], step)
        greso.update(ids, [float(g.rewards.mean()) for g in batch])
    return result


def _count(
    result: Replay, batch: list[Group], prompt_prob: Tensor, skip: Tensor, cfg: PruningConfig, generator: MaskGenerator
) -> None:
    sizes = torch.tensor([len(g.rewards) for g in batch])
    index = torch.arange(len(batch)).repeat_interleave(sizes)
    advantages = torch.cat([g.advantages for g in batch])
    lengths = torch.cat([g.lengths for g in batch])
    strata = stratify(advantages, index, cfg, lengths=lengths)
    drawn = prune_completions(advantages, index, cfg, generator=generator, lengths=lengths)
    keep = (1 - prompt_prob)[index] * torch.where(
        strata.free, 0.0, torch.where(strata.low, 1 - cfg.completion_rate, 1.0)
    )
    tokens, mass = lengths.double(), advantages.abs() * lengths
    push = advantages * lengths
    energy = advantages.square() * tokens
    alive = keep > 0
    result.groups += len(batch)
    result.dead_groups += sum(int((g.advantages == 0).all()) for g in batch)
    result.completions += len(advantages)
    result.tokens += int(lengths.sum())
    result.generated += float(((1 - prompt_prob)[index] * tokens).sum())
    result.updated += float((keep * tokens).sum())
    result.energy += float(energy.sum())
    result.added += float(((1 / keep[alive] - 1) * energy[alive]).sum())
    result.ess += effective_sample_size(drawn.weight) / max(int((~drawn.free).sum()), 1)
    result.batches += 1
    result.signal += float(mass.sum())
    result.drift += float(push.sum())
    kept_cppo = Cppo(cfg.completion_rate).keep(advantages)
    stays = (1 - skip)[index]
    result.lost_cppo += float(mass[~kept_cppo].sum())
    result.drift_cppo += float(push[kept_cppo].sum())
    result.lost_greso += float(((1 - stays) * mass).sum())
    result.drift_greso += float((stays * push).sum())
