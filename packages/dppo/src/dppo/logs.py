"""Rollout logs of any trainer: reading them, and replaying pruning on them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from dppo.baselines import Cppo, Greso
from dppo.config import PruningConfig
from dppo.draws import MaskGenerator
from dppo.learning import grpo_advantages
from dppo.prompts import PromptHistory
from dppo.pruning import effective_sample_size, prune_completions, stratify

MAX_LENGTH = 10**9  # tokens of one completion; more is a mistake
MAX_NUMBER = 1e100  # of a reward or advantage, whose squares are summed


class LogError(ValueError):
    """A line of a log that cannot be used."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion of a log. Attributes: line: where it stands; the others as the log has them."""

    line: int
    prompt_id: str | int
    reward: float
    length: int
    advantage: float | None
    step: int | None


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
    each other, cut to the most common group size where a prompt was visited twice in a row. Where the rows of a group
    have no "advantage", it is (r − mean)/std with ddof 0. Optional fields may be null.

    Args:
        path: JSONL in UTF-8, or the same gzipped.

    Raises:
        FileNotFoundError: no such file.
        LogError: says the line, what is wrong with it and what is expected.
    """
    rows = [_row(f"{path}, line {number}", number, line) for number, line in read_lines(Path(path))]
    if not rows:
        raise LogError(f"{path} has no rows; expected JSONL with prompt_id, reward and length")
    return [_group(path, members) for members in _grouped(rows)]


def read_lengths(path: str | Path) -> np.ndarray:
    """Token counts: one whole number a line, or JSONL rows with "length"; plain or gzipped.

    Raises:
        FileNotFoundError, LogError.
    """
    result = []
    for number, line in read_lines(Path(path)):
        where = f"{path}, line {number}"
        value: Any = _parse(where, line).get("length") if line.startswith("{") else line
        try:
            count = int(str(value))
        except ValueError:
            raise LogError(f"{where}: {_short(value)} is not a whole number of tokens") from None
        if not 0 <= count <= MAX_LENGTH:
            raise LogError(f"{where}: a length of {_short(count)}; lengths are >= 0 and at most {MAX_LENGTH:,}")
        result.append(count)
    return np.array(result, dtype=np.int64)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are not blank, without byte order mark and line ends of any kind."""
    read = 0
    try:
        with _open(path) as file:
            for line in file:
                read += 1
                if line.strip():
                    yield read, line.strip()
    except UnicodeDecodeError as error:
        raise LogError(f"{path}, after line {read}: not text in UTF-8 ({error.reason})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LogError(f"{path}, after line {read}: the gzip file is damaged ({error})") from None


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8-sig") if zipped else path.open(encoding="utf-8-sig")


def _parse(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise LogError(f"{where}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise LogError(f"{where}: not JSON that can be read ({error})") from None
    if not isinstance(row, dict):
        raise LogError(f"{where}: expected an object, got {type(row).__name__}")
    return row


def _row(where: str, number: int, line: str) -> Row:
    row = _parse(where, line)
    for name in ("prompt_id", "reward", "length"):
        if name not in row:
            raise LogError(f"{where}: no {name!r}; a row needs prompt_id, reward and length")
    prompt, length, step = row["prompt_id"], row["length"], row.get("step")
    if isinstance(prompt, bool) or not isinstance(prompt, (str, int)):
        raise LogError(f"{where}: prompt_id must be a text or an integer, got {_short(prompt)}")
    for name in ("reward", "advantage"):
        value = row.get(name)
        if value is None and name == "advantage":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MAX_NUMBER:
            raise LogError(f"{where}: {name} must be a finite number below {MAX_NUMBER:g}, got {_short(value)}")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_LENGTH:
        raise LogError(f"{where}: length must be a whole number from 0 to {MAX_LENGTH:,}, got {_short(length)}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 2**63):
        raise LogError(f"{where}: step must be an integer of 64 bits, got {_short(step)}")
    return Row(number, prompt, row["reward"], length, row.get("advantage"), step)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _grouped(rows: list[Row]) -> list[list[Row]]:
    if all(row.step is not None for row in rows):
        by_key: dict[Any, list[Row]] = {}
        for row in rows:
            by_key.setdefault((row.step, row.prompt_id), []).append(row)
        runs = list(by_key.values())
    else:
        runs = []
        for row in rows:
            if runs and runs[-1][0].prompt_id == row.prompt_id:
                runs[-1].append(row)
            else:
                runs.append([row])
    sizes = Counter(len(run) for run in runs)
    usual = max(sizes, key=lambda size: (sizes[size], -size))
    cut = []
    for run in runs:
        whole = len(run) > usual and len(run) % usual == 0
        cut += [run[i : i + usual] for i in range(0, len(run), usual)] if whole else [run]
    return cut


def _group(path: str | Path, members: list[Row]) -> Group:
    rewards = torch.tensor([m.reward for m in members], dtype=torch.float64)
    given = [m.advantage for m in members if m.advantage is not None]
    if given and len(given) < len(members):
        bare = next(m for m in members if m.advantage is None)
        raise LogError(
            f"{path}, line {bare.line}: no advantage, which other rows of the group of prompt "
            f"{_short(bare.prompt_id)} have; all rows of a group or none"
        )
    advantages = torch.tensor(given, dtype=torch.float64) if given else grpo_advantages(rewards[None])[0]
    lengths = torch.tensor([m.length for m in members])
    return Group(members[0].prompt_id, members[0].step, rewards, lengths, advantages)


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
        ess, batches: sum of the drawn batches' effective sample sizes over the number of completions with an advantage,
            and the number of batches that have any.
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
            "tokens": self.tokens, "signal": self.signal, "generated_share": self.generated / max(self.tokens, 1),
            "updated_share": self.updated / max(self.tokens, 1), "speedup_tokens": full / spent if spent else None,
            "variance_inflation": 1 + self.added / self.energy if self.energy else None,
            "ess_share": self.ess / self.batches if self.batches else None,
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
    alive_count = int((~drawn.free).sum())
    if alive_count:
        result.ess += effective_sample_size(drawn.weight) / alive_count
        result.batches += 1
    result.signal += float(mass.sum())
    result.drift += float(push.sum())
    kept_cppo = Cppo(cfg.completion_rate).keep(advantages)
    stays = (1 - skip)[index]
    result.lost_cppo += float(mass[~kept_cppo].sum())
    result.drift_cppo += float(push[kept_cppo].sum())
    result.lost_greso += float(((1 - stays) * mass).sum())
    result.drift_greso += float((stays * push).sum())
