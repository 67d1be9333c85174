"""Prompt-level pruning: skip prompts whose groups had little to teach when they were last seen.

History score H_q = mean |A_i| of the full group of prompt q at its last visit (or an exponential average of visits).
τ = mean of H over the prompts seen so far. P_q = r_q if q was seen and H_q < τ, else 0: decided before generation, from
earlier steps only, so the estimate stays unbiased and rollouts are saved too. A skipped prompt keeps its H and comes
back after 1/(1−r_q) epochs on average.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from dppo.config import PruningConfig, check_rate
from dppo.designs import floor_count, rank_in_stratum, remove_count
from dppo.draws import MaskGenerator, as_generator
from dppo.keys import hash_and_check, int_ids, is_int64, text_of
from dppo.pruning import PruneResult, distinct, systematic_keep, warn_deterministic

Ids = Tensor | np.ndarray | Sequence[Any]


class PromptHistory:
    """What each prompt taught at its last visit.

    Args:
        n: number of prompts, for ids 0 .. n−1 in dense arrays; None (default) keys by any integer or by the text
            of the prompt (a 64-bit hash, guarded against collisions by a second one).
        rate: r_q used by `prob` when none is given.
        decay: ρ in H ← ρ·H + (1−ρ)·new. 0 (default) keeps the last value.
        threshold: "epoch": τ is frozen by `start_epoch()` (live before its first call). "batch": always live.

    Raises:
        ValueError: options out of range, ids outside 0 .. n−1, scores that are negative or not finite.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        rate: float = 0.5,
        decay: float = 0.0,
        threshold: Literal["epoch", "batch"] = "epoch",
    ) -> None:
        check_rate("rate", rate)
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay!r}: must be in [0, 1)")
        if threshold not in ("epoch", "batch"):
            raise ValueError(f"threshold={threshold!r}: must be 'epoch' or 'batch'")
        if n is not None and n < 1:
            raise ValueError(f"n={n}: the number of prompts must be at least 1, or None for keys")
        self.n, self.rate, self.decay, self.mode = n, rate, decay, threshold
        self._rows: dict[tuple[int, int], int] = {}  # by (key, check): equal keys of different texts stay apart
        self._keys = np.zeros(0, np.int64)
        self._checks = np.zeros(0, np.int64)
        self._score = np.zeros(0)
        self._length = np.zeros(0)
        self._step = np.zeros(0, np.int64)
        self._frozen: float | None = None
        self._just_loaded = False

    def __len__(self) -> int:
        """Number of prompts seen."""
        return len(self._rows)

    @property
    def collisions(self) -> int:
        """How many prompts share their 64-bit id with another one met before (each keeps a history of its own)."""
        return len(self) - len(np.unique(self._keys[: len(self)]))

    @property
    def threshold(self) -> float:
        """τ: mean H over the prompts seen (as frozen by `start_epoch` with threshold="epoch"); NaN before any."""
        if self.mode == "epoch" and self._frozen is not None:
            return self._frozen
        return float(self._score[: len(self)].mean()) if len(self) else float("nan")

    def start_epoch(self) -> None:
        """Recomputes and freezes τ."""
        self._frozen = None
        self._frozen = self.threshold

    def scores(self, ids: Ids) -> Float64[np.ndarray, " batch"]:
        """H of each prompt, NaN where never seen."""
        return self._lookup(ids, self._score)

    def lengths(self, ids: Ids) -> Float64[np.ndarray, " batch"]:
        """Mean completion tokens at the last visit, NaN where unknown."""
        return self._lookup(ids, self._length)

    def low(self, ids: Ids) -> Bool[np.ndarray, " batch"]:
        """Which prompts were seen and have H < τ (strictly, by more than 1e-9·τ)."""
        with np.errstate(invalid="ignore"):
            return self.scores(ids) < self.threshold * (1 - 1e-9)

    def prob(self, ids: Ids, *, rate: float | None = None) -> Float64[Tensor, " batch"]:
        """P_q: `rate` (default: the history's) where low, else 0; unseen prompts are never pruned."""
        rate = self.rate if rate is None else rate
        check_rate("rate", rate)
        self._warn_if_foreign(ids)
        return torch.from_numpy(np.where(self.low(ids), rate, 0.0))

    def update(self, ids: Ids, mean_abs_adv: Any, step: int, *, lengths: Any = None) -> None:
        """Records the visits of one step.

        Args:
            ids: one a group.
            mean_abs_adv: mean |A| of the full group. The values of duplicates within one call are averaged, so
                the outcome does not depend on their order.
            step: of the visit; newer replaces older in `merge`.
            lengths: mean completion tokens of the group (optional).
        """
        values = _float_array(mean_abs_adv)
        tokens = np.full(values.shape, np.nan) if lengths is None else _float_array(lengths)
        rows = self._find(ids, create=True)
        if not len(rows) == len(values) == len(tokens):
            raise ValueError(f"{len(rows)} ids, {len(values)} scores and {len(tokens)} lengths; one each is needed")
        if not np.all(np.isfinite(values) & (values >= 0)):
            bad = int(np.argmin(np.isfinite(values) & (values >= 0)))
            raise ValueError(
                f"mean |advantage| of prompt {bad} of the batch is {values[bad]}; finite and >= 0 is needed"
            )
        unique, inverse, count = np.unique(rows, return_inverse=True, return_counts=True)
        fresh = np.bincount(inverse, values, len(unique)) / count
        old = self._score[unique]
        self._score[unique] = np.where(np.isnan(old), fresh, self.decay * old + (1 - self.decay) * fresh)
        self._length[unique] = np.bincount(inverse, tokens, len(unique)) / count
        self._step[unique] = step

    def merge(self, other: PromptHistory) -> None:
        """Takes over from another process every prompt it visited later; equal steps are averaged."""
        if other.n != self.n:
            raise ValueError(f"histories of different key spaces cannot be merged: n={self.n} and n={other.n}")
        count = len(other)
        mine = np.array(
            [
                self._row(int(k), int(c), create=True)
                for k, c in zip(other._keys[:count], other._checks[:count], strict=True)
            ],
            dtype=np.int64,
        )
        newer, same = other._step[:count] > self._step[mine], other._step[:count] == self._step[mine]
        for name in ("_score", "_length"):
            ours, theirs = getattr(self, name), getattr(other, name)[:count]
            ours[mine] = np.where(newer, theirs, np.where(same, (ours[mine] + theirs) / 2, ours[mine]))
        self._step[mine] = np.maximum(self._step[mine], other._step[:count])

    def state_dict(self) -> dict[str, Shaped[np.ndarray, ...]]:
        """Arrays to save (all numpy, no objects); `load_state_dict` gives back the same history."""
        count = len(self)
        return {
            "keys": self._keys[:count].copy(),
            "checks": self._checks[:count].copy(),
            "score": self._score[:count].copy(),
            "length": self._length[:count].copy(),
            "step": self._step[:count].copy(),
            "frozen": np.array(np.nan if self._frozen is None else self._frozen),
            "is_frozen": np.array(self._frozen is not None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the content. Warns at the next `prob` if more than half of the ids asked for are unknown."""
        self._keys = np.array(state["keys"], dtype=np.int64)
        if self.n is not None and len(self._keys) and not (self._keys.min() >= 0 and self._keys.max() < self.n):
            raise ValueError(f"the saved history has ids outside 0..{self.n - 1}")
        self._checks = np.array(state["checks"], dtype=np.int64)
        self._score = np.array(state["score"], dtype=np.float64)
        self._length = np.array(state["length"], dtype=np.float64)
        self._step = np.array(state["step"], dtype=np.int64)
        pairs = zip(self._keys.tolist(), self._checks.tolist(), strict=True)
        self._rows = {pair: row for row, pair in enumerate(pairs)}
        self._frozen = float(state["frozen"]) if bool(state["is_frozen"]) else None
        self._just_loaded = True

    def check_dataset(self, ids: Ids) -> None:
        """Warns if more than half of the prompts of this history are not in the data set with these ids."""
        self._just_loaded = False
        if not len(self):
            return
        rows = self._find(ids, create=False)
        missing = 1 - len(np.unique(rows[rows >= 0])) / len(self)
        if missing > 0.5:
            _warn_foreign(f"{missing:.0%} of the prompts of the history are not in this data set")

    def _warn_if_foreign(self, ids: Ids) -> None:
        if not self._just_loaded or not len(self):
            return
        self._just_loaded = False
        unknown = float(np.mean(self._find(ids, create=False) < 0))
        if unknown > 0.5:
            _warn_foreign(f"{unknown:.0%} of the prompts asked for are not in the loaded history")

    def _lookup(self, ids: Ids, values: np.ndarray) -> np.ndarray:
        rows = self._find(ids, create=False)
        result = np.full(len(rows), np.nan)
        result[rows >= 0] = values[rows[rows >= 0]]
        return result

    def _find(self, ids: Ids, *, create: bool) -> np.ndarray:
        if isinstance(ids, (Tensor, np.ndarray)) and not (isinstance(ids, np.ndarray) and ids.dtype.kind in "OU"):
            pairs = [(key, 0) for key in int_ids(ids).tolist()]
        else:
            pairs = [(int(i), 0) if is_int64(i) else hash_and_check(text_of(i)) for i in ids]
        return np.array([self._row(key, check, create=create) for key, check in pairs], dtype=np.int64)

    def _row(self, key: int, check: int, *, create: bool) -> int:
        """Row of a prompt, -1 if unknown."""
        if self.n is not None and not 0 <= key < self.n:
            raise ValueError(f"prompt id {key} is outside 0..{self.n - 1}; use PromptHistory(n=None) for arbitrary ids")
        row = self._rows.get((key, check), -1)
        return self._append(key, check) if row < 0 and create else row

    def _append(self, key: int, check: int) -> int:
        row = len(self._rows)
        if row == len(self._keys):
            more = max(1024, row)
            for name, fill in (("_keys", 0), ("_checks", 0), ("_score", np.nan), ("_length", np.nan), ("_step", -1)):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.full(more, fill, dtype=old.dtype)]))
        self._keys[row], self._checks[row], self._score[row], self._length[row], self._step[row] = (
            key, check, np.nan, np.nan, -1,
        )  # fmt: skip
        self._rows[key, check] = row
        return row


def _float_array(values: Any) -> Float64[np.ndarray, " batch"]:
    if isinstance(values, Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _warn_foreign(what: str) -> None:
    warnings.warn(
        f"{what}; it seems to come from another data set. Unknown prompts are never pruned; start a new history if "
        "this is not intended",
        UserWarning,
        stacklevel=4,
    )


def prune_prompts(
    ids: Ids,
    history: PromptHistory,
    cfg: PruningConfig | None = None,
    generator: MaskGenerator | torch.Generator | int = 0,
    *,
    progress: float = 0.0,
) -> PruneResult:
    """Draws which prompts of a batch are generated for at all. Call before generation.

    Args:
        ids: one a prompt: integers, or the prompts' texts.
        history: of earlier steps; it is not changed.
        cfg: options; `prompt_rate`, `mode` and `anneal` are used. The stratum of "fixed" is the batch's low prompts.
        generator: `MaskGenerator(seed, step)`, a seed, or a torch.Generator.
        progress: share of training done.

    Returns:
        PruneResult over the prompts; multiply its weights into those of the prompts' completions.
    """
    cfg = cfg or PruningConfig()
    generator = as_generator(generator).of("prompts")
    rate = cfg.prompt_rate if cfg.is_active(progress) else 0.0
    prob = history.prob(ids, rate=rate)
    low, keys = prob > 0, int_ids(ids)
    stratum = torch.zeros(len(low), dtype=torch.int64)
    weight = 1 / (1 - prob)
    if cfg.mode == "bernoulli":
        keep = generator.uniform(distinct(keys)) >= prob
    elif cfg.mode == "systematic":
        keep = systematic_keep(1 - prob, distinct(keys), generator)
    else:
        n_low = low.sum()
        removed = floor_count(rate, n_low)
        if cfg.mode == "deterministic":
            warn_deterministic()
            scores = torch.from_numpy(np.nan_to_num(history.scores(ids)))
            keep = ~low | (rank_in_stratum(scores, low, stratum) >= removed)
            prob = (~keep).double()
        else:
            keep = remove_count(generator.uniform(distinct(keys)), low, stratum, removed[None])
            prob = torch.where(low, removed / n_low.clamp(min=1), 0.0).double()
            weight = 1 / (1 - prob)
    return PruneResult(
        keep=keep,
        weight=torch.where(keep, weight, 0.0).float(),
        prob=prob.float(),
        free=torch.zeros_like(keep),
    )


@dataclass(frozen=True)
class PromptBlock:
    """The prompts of one generation batch, drawn out of a longer stretch of the epoch's order.

    Attributes:
        kept: positions (within the epoch's order) of the prompts to generate for, in order.
        weight: 1/(1−P) of each of them.
        pulled: number of prompts of the stretch, kept and pruned: what Z counts.
        low: positions of the low prompts of the stretch, kept or pruned.
    """

    kept: np.ndarray
    weight: np.ndarray
    pulled: int
    low: np.ndarray


def pull_block(
    low: Bool[np.ndarray, " epoch"],
    uniform: Float64[np.ndarray, " epoch"],
    start: int,
    target: int,
    rate: float,
) -> PromptBlock | None:
    """Replenishment without bias: pulls prompts until exactly `target` of them are kept.

    How far to pull must not depend on the mask. Drawing prompt after prompt until `target` are kept and dividing by
    the number pulled is biased: with one prompt wanted, P = 1/2 and all terms 1, it gives E[2/n] = 2·ln 2 ≈ 1.39
    instead of 1. Here the stretch is the shortest with n − floor(r·n_low) = target, which depends on history only;
    then exactly d = floor(r·n_low) low prompts are removed uniformly, weight n_low/(n_low − d).

    Args:
        low: which prompts of the epoch's order are low.
        uniform: one number a prompt, out of (seed, step, id).
        start: first position of the stretch.
        target: number of prompts to keep.
        rate: r_q.

    Returns:
        The block, or None when the rest of the epoch does not fill one.
    """
    ahead = np.cumsum(low[start:])
    kept_count = np.arange(1, len(ahead) + 1) - np.floor(rate * ahead + 1e-9).astype(np.int64)
    pulled = int(np.searchsorted(kept_count, target)) + 1  # kept_count grows by 0 or 1, so it meets every target
    if pulled > len(ahead):
        return None
    candidates = start + np.flatnonzero(low[start : start + pulled])
    removed = pulled - target
    order = candidates[np.argsort(uniform[candidates], kind="stable")]
    gone = order[:removed]
    kept = np.setdiff1d(np.arange(start, start + pulled), gone)
    low_weight = len(candidates) / (len(candidates) - removed) if removed else 1.0
    return PromptBlock(kept, np.where(low[kept], low_weight, 1.0), pulled, candidates)
