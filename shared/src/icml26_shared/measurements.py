"""Measured values with bootstrap intervals, and rules that decide on them.

A :class:`Rule` renders its own text and computes its own verdict, so what a report says was required and what was
checked are the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

__all__ = ["Measurement", "Rule", "holds_if", "paired"]

On = Literal["mean", "interval", "every"]
_SIGNS = {">=": "≥", ">": ">", "<=": "≤", "<": "<"}
_SAME = 1e-9
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Measurement:
    """Values measured over seeds, samples or repetitions.

    Args:
        values: the measured values, at least one. NaN and infinities are kept: a run that diverged is a result, and no
            rule holds on it.
        unit: unit of the values, e.g. ``"s"``; empty for a share or a ratio.
        seeds: seeds the values come from.
    """

    values: tuple[float, ...]
    unit: str = ""
    seeds: tuple[int, ...] = ()

    def __init__(self, values: Sequence[float] | float, unit: str = "", seeds: Sequence[int] = ()) -> None:
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        if flat.size == 0:
            raise ValueError("a measurement needs at least one value, got none")
        object.__setattr__(self, "values", tuple(flat.tolist()))
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in seeds))

    @property
    def mean(self) -> float:
        """Arithmetic mean of the values."""
        return math.fsum(self.values) / len(self.values) if all(map(math.isfinite, self.values)) else math.nan

    def interval(
        self,
        level: float = 0.95,
        n: int = 10_000,
        seed: int = 0,
        statistic: Callable[..., Any] = np.mean,
    ) -> tuple[float, float]:
        """Percentile bootstrap interval.

        ``n`` resamples of the values, with replacement and of the same size, give ``n`` values of the statistic; the
        interval runs from their ``(1 - level)/2`` to their ``(1 + level)/2`` quantile, interpolated linearly (Efron and
        Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3). With one value, both ends are that value.

        Args:
            level: nominal coverage, in (0, 1).
            n: number of resamples.
            seed: seed of the resampling; the same seed gives the same interval.
            statistic: function of an array and ``axis=``, e.g. ``numpy.median``.

        Returns:
            Lower and upper end; NaN twice when a value is not finite.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        if n < 1:
            raise ValueError(f"n must be at least 1 resample, got {n}")
        if not all(map(math.isfinite, self.values)):
            return math.nan, math.nan
        return _bootstrap(self.values, level, n, seed, statistic)

    def to_json(self) -> dict[str, Any]:
        """Values, mean, 95 % interval, unit and seeds."""
        low, high = self.interval()
        return {
            "mean": self.mean,
            "interval": [low, high],
            "level": 0.95,
            "values": list(self.values),
            "unit": self.unit,
            "seeds": list(self.seeds),
        }

    def __str__(self) -> str:
        low, high = self.interval()
        unit = f" {self.unit}" if self.unit else ""
        if len(self.values) == 1:
            return f"{_figure(self.mean)}{unit}"
        return f"{_figure(self.mean)}{unit} [{_figure(low)}, {_figure(high)}]"


def paired(a: Measurement, b: Measurement) -> Measurement:
    """Differences ``a - b``, value by value: its interval is the paired bootstrap interval.

    Raises:
        ValueError: unequal numbers of values, unequal seeds or units.
    """
    return _combine(a, b, lambda x, y: x - y, "paired differences")


def holds_if(measurement: Measurement, op: str, threshold: float, on: On = "mean", level: float = 0.95) -> bool:
    """Whether a measurement meets a threshold.

    Args:
        op: ``">="``, ``">"``, ``"<="`` or ``"<"``.
        on: ``"mean"``: the mean meets it. ``"interval"``: so does the far end of the bootstrap interval (the lower end
            for ``>=`` and ``>``, the upper end for ``<=`` and ``<``). ``"every"``: so does each value.

    Numbers closer than 1e-9 (relative; absolute below 1) count as equal, so rounding decides nothing. A value that is
    not finite makes it False.
    """
    if on == "mean":
        return _compare(measurement.mean, op, threshold)
    if on == "interval":
        low, high = measurement.interval(level)
        return _compare(low if op.startswith(">") else high, op, threshold)
    if on == "every":
        return all(_compare(value, op, threshold) for value in measurement.values)
    raise ValueError(f"on must be 'mean', 'interval' or 'every', got {on!r}")


@dataclass(frozen=True)
class Rule:
    """What must be true of the measurements for a claim to hold.

    ``Rule("recall", ">=", 0.95)`` reads "recall ≥ 0.95"; ``Rule("auto", ">=", 0.95, times="dense")`` reads
    "auto ≥ 0.95 × dense"; ``Rule("l2", ">=", 0.05, plus="cosine")`` reads "l2 ≥ cosine + 0.05".

    Args:
        metric: name of the measurement that is judged.
        op: ``">="``, ``">"``, ``"<="`` or ``"<"``.
        threshold: the number, in the unit of the metric (with ``times`` a factor).
        times: name of a measurement; the bound is ``threshold`` times it.
        plus: name of a measurement; the bound is it plus ``threshold``.
        on: what is compared, see :func:`holds_if`. With ``times`` or ``plus``, ``"interval"`` and ``"every"`` go over
            the paired values, so both measurements need the same seeds or samples.
        level: level of the interval.
    """

    metric: str
    op: str
    threshold: float
    times: str | None = None
    plus: str | None = None
    on: On = "mean"
    level: float = 0.95

    def __post_init__(self) -> None:
        _check_operator(self.op)
        if not math.isfinite(self.threshold):
            raise ValueError(f"the threshold of a rule must be finite, got {self.threshold}")
        if self.times is not None and self.plus is not None:
            raise ValueError("a rule has times or plus, not both")
        if self.on not in ("mean", "interval", "every"):
            raise ValueError(f"on must be 'mean', 'interval' or 'every', got {self.on!r}")

    @property
    def text(self) -> str:
        """The rule in words."""
        bound = f"{self.threshold:g}"
        if self.times is not None:
            bound = self.times if self.threshold == 1 else f"{bound} × {self.times}"
        if self.plus is not None:
            sign = "−" if self.threshold < 0 else "+"
            bound = self.plus if self.threshold == 0 else f"{self.plus} {sign} {abs(self.threshold):g}"
        where = {
            "mean": "",
            "interval": f" (with its whole {100 * self.level:g} % interval)",
            "every": " (every value)",
        }[self.on]
        return f"{self.metric} {_SIGNS[self.op]} {bound}{where}"

    def holds(self, measurements: Mapping[str, Measurement]) -> bool:
        """Whether the rule holds on these measurements.

        Raises:
            ValueError: a measurement it names is not there, or pairs do not match.
        """
        metric = self._named(measurements, self.metric)
        other = self.times or self.plus
        if other is None:
            return holds_if(metric, self.op, self.threshold, self.on, self.level)
        reference = self._named(measurements, other)
        if self.on == "mean":
            return _compare(metric.mean, self.op, self._bound(reference.mean))
        difference = _combine(metric, reference, lambda x, y: x - self._bound(y), self.text)
        return holds_if(difference, self.op, 0.0, self.on, self.level)

    def __str__(self) -> str:
        return self.text

    def _bound(self, reference: float) -> float:
        return self.threshold * reference if self.times is not None else reference + self.threshold

    def _named(self, measurements: Mapping[str, Measurement], name: str) -> Measurement:
        if name not in measurements:
            raise ValueError(f"the rule {self.text!r} needs the measurement {name!r}; measured: {sorted(measurements)}")
        return measurements[name]


@lru_cache(maxsize=256)  # a report asks for the same interval again and again
def _bootstrap(
    values: tuple[float, ...], level: float, n: int, seed: int, statistic: Callable[..., Any]
) -> tuple[float, float]:
    sample = np.asarray(values)
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // sample.size)  # keeps the resamples of many values out of memory
    found = [
        np.asarray(statistic(sample[rng.integers(sample.size, size=(min(rows, n - start), sample.size))], axis=1))
        for start in range(0, n, rows)
    ]
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _check_operator(op: str) -> None:
    if op not in _SIGNS:
        raise ValueError(f"op must be one of {list(_SIGNS)}, got {op!r}")


def _compare(value: float, op: str, threshold: float) -> bool:
    _check_operator(op)
    if not (math.isfinite(value) and math.isfinite(threshold)):
        return False
    if abs(value - threshold) <= _SAME * max(1.0, abs(threshold)):
        return op in (">=", "<=")
    return value > threshold if op.startswith(">") else value < threshold


def _combine(a: Measurement, b: Measurement, join: Callable[[float, float], float], what: str) -> Measurement:
    if len(a.values) != len(b.values):
        raise ValueError(f"{what} needs values in pairs, got {len(a.values)} and {len(b.values)}")
    if a.seeds and b.seeds and a.seeds != b.seeds:
        raise ValueError(f"{what} needs the same seeds on both sides, got {a.seeds} and {b.seeds}")
    if a.unit != b.unit:
        raise ValueError(f"{what} needs one unit, got {a.unit!r} and {b.unit!r}")
    values = [join(x, y) for x, y in zip(a.values, b.values, strict=True)]
    return Measurement(values, a.unit, a.seeds or b.seeds)


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:.4g}"
