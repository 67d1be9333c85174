"""pass@k and what follows from it: coverage curves with intervals, and the paper's test-time efficiency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from maxrl.coefficients import log_miss_probability


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> NDArray[np.float64]: ...
def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> float | NDArray[np.float64]:
    r"""Unbiased estimate of pass@k from n rollouts of which c passed: ``1 - C(n-c, k)/C(n, k)`` (Chen et al., 2021).

    Args:
        n, c, k: whole numbers with ``0 <= c <= n`` and ``1 <= k <= n``, or arrays of them that broadcast together.

    Returns:
        For three ints the correctly rounded float (integer arithmetic); for arrays float64 of the broadcast shape, to
        about 1e-13 relative for n = 100,000.

    Raises:
        ValueError: numbers out of range or not whole.
    """
    if isinstance(n, int) and isinstance(c, int) and isinstance(k, int):
        _check_counts(np.array(n), np.array(c), np.array(k))
        ways = math.comb(n, k)
        return (ways - math.comb(n - c, k)) / ways
    n_, c_, k_ = np.broadcast_arrays(np.asarray(n), np.asarray(c), np.asarray(k))
    _check_counts(n_, c_, k_)
    rows = np.stack([n_.ravel(), c_.ravel(), k_.ravel()], 1).astype(np.int64)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    columns = torch.from_numpy(distinct.astype(np.float64)).T.contiguous()
    values = np.concatenate(
        [
            -torch.expm1(log_miss_probability(*part)).numpy()
            for part in columns.split(4096, dim=1)  # bounds the memory of the product form
        ]
        or [np.zeros(0)]
    )
    return values[inverse.ravel()].reshape(n_.shape)


def _check_counts(n: NDArray, c: NDArray, k: NDArray) -> None:
    for name, value in (("n", n), ("c", c), ("k", k)):
        if value.dtype.kind not in "iu" and not bool((value == np.floor(value)).all()):
            raise ValueError(f"{name} must be a whole number")
    if not bool((n >= 1).all()):
        raise ValueError("n must be at least 1")
    if not bool(((c >= 0) & (c <= n)).all()):
        raise ValueError("c, the number of rollouts that passed, must lie in 0..n")
    if not bool(((k >= 1) & (k <= n)).all()):
        raise ValueError(f"k must lie in 1..n (here n = {int(n.min())}): draw more rollouts or lower k")


def majority_at_k(
    answers: Sequence[Sequence[Hashable]], k: int, reference: Sequence[Hashable] | None = None
) -> list[Hashable] | float:
    """The most frequent of each prompt's first k answers (ties: the one that came first).

    Args:
        answers: per prompt the answers of its rollouts, at least k of them.
        k: answers that vote.
        reference: the right answers; then the share of prompts whose majority is right is returned.
    """
    if k < 1 or any(len(a) < k for a in answers):
        raise ValueError(f"k = {k}: it must lie in 1..the number of answers of every prompt")
    # Counter keeps the order of first appearance, and most_common is stable.
    votes: list[Hashable] = [Counter(a[:k]).most_common(1)[0][0] for a in answers]
    if reference is None:
        return votes
    if len(reference) != len(votes):
        raise ValueError(f"{len(reference)} reference answers for {len(votes)} prompts")
    return float(np.mean([v == r for v, r in zip(votes, reference, strict=True)]))


@dataclass(frozen=True)
class PassAtKCurve:
    """Coverage against the number of attempts, averaged over prompts.

    Attributes:
        ks: increasing numbers of attempts.
        per_prompt: (P, len(ks)) float64, pass@k of each prompt.
    """

    ks: tuple[int, ...]
    per_prompt: NDArray[np.float64]

    @classmethod
    def from_counts(cls, n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> PassAtKCurve:
        """From n rollouts (one number, or one per prompt) of which ``c`` (P,) passed; every k must be at most n."""
        order = cls._sorted(ks)
        counts = np.atleast_1d(np.asarray(c))
        if counts.size == 0:
            raise ValueError("no prompts: a curve needs at least one")
        n_ = np.broadcast_to(np.asarray(n), counts.shape)
        return cls(order, pass_at_k(n_[:, None], counts[:, None], np.array(order)[None, :]))

    @classmethod
    def from_probabilities(cls, p: ArrayLike, ks: Sequence[int]) -> PassAtKCurve:
        """From exact pass rates ``p`` (P,): ``1 - (1-p)^k``, no sampling noise."""
        order = cls._sorted(ks)
        p_ = np.atleast_1d(np.asarray(p, dtype=np.float64))
        if p_.size == 0 or not bool(((p_ >= 0) & (p_ <= 1)).all()):
            raise ValueError("p must hold at least one pass rate, each in [0, 1]")
        with np.errstate(divide="ignore"):
            return cls(order, -np.expm1(np.array(order)[None, :] * np.log1p(-p_)[:, None]))

    @staticmethod
    def _sorted(ks: Sequence[int]) -> tuple[int, ...]:
        order = tuple(sorted({int(k) for k in ks}))
        if not order or order[0] < 1:
            raise ValueError(f"ks = {list(ks)}: at least one k, each >= 1")
        return order

    @property
    def values(self) -> NDArray[np.float64]:
        """Mean coverage at each k, (len(ks),)."""
        return self.per_prompt.mean(0)

    def interval(
        self, level: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Percentile bootstrap over prompts: lower and upper end at each k."""
        means = self._bootstrap(resamples, np.random.default_rng(seed))
        tail = (1 - level) / 2
        return np.quantile(means, tail, axis=0), np.quantile(means, 1 - tail, axis=0)

    def _bootstrap(self, resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
        prompts = self.per_prompt.shape[0]
        shares = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples) / prompts
        return shares @ self.per_prompt

    def k_to_reach(self, coverage: float) -> float | None:
        """Attempts at which the mean curve reaches ``coverage``, interpolated linearly in log k; None when it never
        does.

        The smallest k of the curve is returned when that already suffices.
        """
        return _k_to_reach(self.ks, self.values, coverage)

    @staticmethod
    def speedup(a: PassAtKCurve, b: PassAtKCurve) -> float | None:
        """Test-time efficiency of ``a`` over ``b`` (paper, Fig. 5): ``k_b / k_a`` at the coverage b reaches at its
        largest k.

        More than 1: a needs fewer attempts. None when a never reaches that coverage. k_b is where b itself reaches it,
        which is its largest k unless the curve is flat before.
        """
        return _speedup(a.ks, a.values, b.ks, b.values)

    @staticmethod
    def speedup_interval(
        a: PassAtKCurve, b: PassAtKCurve, level: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> tuple[float, float] | None:
        """Bootstrap interval of :meth:`speedup`, prompts resampled in pairs when both curves have the same prompts.

        A resample in which a never reaches b's coverage counts as 0. None when that is so for every resample.
        """
        rng = np.random.default_rng(seed)
        paired = a.per_prompt.shape[0] == b.per_prompt.shape[0]
        means_a = a._bootstrap(resamples, np.random.default_rng(seed))
        means_b = b._bootstrap(resamples, np.random.default_rng(seed) if paired else rng.spawn(1)[0])
        ratios = [_speedup(a.ks, x, b.ks, y) or 0.0 for x, y in zip(means_a, means_b, strict=True)]
        if not any(ratios):
            return None
        tail = (1 - level) / 2
        low, high = np.quantile(ratios, [tail, 1 - tail])
        return float(low), float(high)

    def to_dict(self) -> dict[str, object]:
        """JSON-able: ks, mean, and the per-prompt values."""
        return {"ks": list(self.ks), "mean": self.values.tolist(), "per_prompt": self.per_prompt.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> PassAtKCurve:
        """Inverse of :meth:`to_dict`; ValueError when the fields do not fit together."""
        try:
            ks = cls._sorted(data["ks"])  # type: ignore[arg-type]
            per_prompt = np.asarray(data["per_prompt"], dtype=np.float64)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a coverage curve: {error!r}; it needs 'ks' and 'per_prompt'") from None
        if per_prompt.ndim != 2 or per_prompt.shape[1] != len(ks) or per_prompt.shape[0] == 0:
            raise ValueError(f"not a coverage curve: per_prompt has shape {per_prompt.shape} for {len(ks)} values of k")
        if not bool(((per_prompt >= 0) & (per_prompt <= 1)).all()):
            raise ValueError("not a coverage curve: per_prompt holds values outside [0, 1]")
        return cls(ks, per_prompt)


def _k_to_reach(ks: Sequence[int], values: NDArray[np.float64], coverage: float) -> float | None:
    reached = np.flatnonzero(values >= coverage)
    if reached.size == 0:
        return None
    i = int(reached[0])
    if i == 0:
        return float(ks[0])
    low, high = values[i - 1], values[i]
    share = (coverage - low) / (high - low)
    return float(math.exp(math.log(ks[i - 1]) + share * (math.log(ks[i]) - math.log(ks[i - 1]))))


def _speedup(ks_a: Sequence[int], a: NDArray[np.float64], ks_b: Sequence[int], b: NDArray[np.float64]) -> float | None:
    goal = float(b[-1])
    k_a, k_b = _k_to_reach(ks_a, a, goal), _k_to_reach(ks_b, b, goal)
    return None if k_a is None or k_b is None else k_b / k_a
