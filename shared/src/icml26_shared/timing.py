"""Time of two callables in turns, and time against size; public names are also in :mod:`icml26_shared.bench`."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Comparison", "Growth", "compare", "growth"]

_SHORTEST = 2e-3
_MOST_CALLS = 1_000_000


@dataclass(frozen=True)
class Comparison:
    """Times of two callables, measured in turns.

    Attributes:
        ours: seconds a call, one value a pair.
        peer: the same of the other side.
        calls: calls that each value is the average of.
    """

    ours: tuple[float, ...]
    peer: tuple[float, ...]
    calls: int = 1

    @property
    def ratios(self) -> tuple[float, ...]:
        """Peer's time over ours, pair by pair: above 1, ours is faster."""
        return tuple(theirs / ours for ours, theirs in zip(self.ours, self.peer, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return float(np.median(self.ratios))

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile of the ratios."""
        low, high = np.quantile(self.ratios, [0.25, 0.75])
        return float(low), float(high)

    @property
    def ours_s(self) -> float:
        """Median of our times, in seconds a call."""
        return float(np.median(self.ours))

    @property
    def peer_s(self) -> float:
        """Median of the peer's times, in seconds a call."""
        return float(np.median(self.peer))

    def to_json(self) -> dict[str, Any]:
        """Medians, spread, and the values they come from."""
        return {
            "ratio": self.ratio,
            "spread": list(self.spread),
            "ours_s": self.ours_s,
            "peer_s": self.peer_s,
            "calls": self.calls,
            "ours": list(self.ours),
            "peer": list(self.peer),
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Comparison:
        """The comparison that :meth:`to_json` wrote."""
        return cls(tuple(kept["ours"]), tuple(kept["peer"]), kept["calls"])


def compare(
    ours: Callable[..., Any],
    peer: Callable[..., Any],
    *,
    pairs: int = 20,
    warmup: int = 3,
    setup: Callable[[], Any] | None = None,
) -> Comparison:
    """Time two callables in turns: A B, B A, A B, ...

    Both sides of a pair see the same state of the machine, and swapping the order takes turns at going first, so slow
    drifts (heat, other load) cancel in the ratio of a pair. The garbage collector is off while the clock runs; with a
    GPU in use, the device is waited for before the clock starts and before it stops.

    Args:
        ours, peer: called without arguments, or with what ``setup`` returned.
        pairs: number of pairs, at least 1.
        warmup: calls of each side before the first pair.
        setup: called before every single call, outside the clock; its result is passed on, so neither side sees what
            the other has changed. Without it, a call shorter than 2 ms is repeated until that long and averaged.

    Raises:
        ValueError: ``pairs`` below 1 or ``warmup`` below 0.
    """
    if pairs < 1 or warmup < 0:
        raise ValueError(f"pairs must be at least 1 and warmup at least 0, got pairs={pairs}, warmup={warmup}")
    calls = 1
    sides = (ours, peer)
    for _ in range(warmup):
        for side in sides:
            _timed(side, setup, 1)
    if setup is None:
        calls = _calls(min(_timed(side, None, 1) for side in sides), sides)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for index in (0, 1) if pair % 2 == 0 else (1, 0):
            times[index].append(_timed(sides[index], setup, calls))
    return Comparison(tuple(times[0]), tuple(times[1]), calls)


@dataclass(frozen=True)
class Growth:
    """Cost against size.

    Attributes:
        sizes: sizes, ascending.
        seconds: median time at each size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Time over the time at the size before; None for the first."""
        steps = zip(self.seconds[1:], self.seconds[:-1], strict=True)
        return (None, *(later / earlier for later, earlier in steps))

    @property
    def exponent(self) -> float:
        """``b`` of the least-squares fit ``log(seconds) = a + b log(size)``: 1 is linear, 2 quadratic."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.seconds), 1)[0])

    def rows(self) -> list[tuple[float, float, float | None]]:
        """(size, seconds, ratio to the row before) for each size."""
        return list(zip(self.sizes, self.seconds, self.ratios, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Rows and exponent."""
        rows = [dict(zip(("size", "seconds", "ratio"), row, strict=True)) for row in self.rows()]
        return {"rows": rows, "exponent": self.exponent}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Growth:
        """The growth that :meth:`to_json` wrote."""
        return cls(tuple(row["size"] for row in kept["rows"]), tuple(row["seconds"] for row in kept["rows"]))


def growth(
    fn: Callable[[Any], Any],
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    setup: Callable[[int], Any] | None = None,
) -> Growth:
    """Time ``fn`` at several sizes.

    The sizes are measured in rounds (all sizes, ``repeats`` times), so a slow moment does not fall on one size alone.

    Args:
        fn: called with a size, or with ``setup(size)``.
        sizes: at least two, positive, ascending.
        repeats: rounds; the median over them counts. One more round before them is the warm-up.
        setup: prepares the input of a size, outside the clock, before every call.

    Raises:
        ValueError: sizes or repeats that cannot be used.
    """
    sizes = tuple(sizes)
    if len(sizes) < 2 or sizes[0] <= 0 or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"sizes must be two or more positive numbers in ascending order, got {sizes}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    prepare = setup or (lambda size: size)
    times: list[list[float]] = [[] for _ in sizes]
    for round_ in range(repeats + 1):
        for index, size in enumerate(sizes):
            seconds = _timed(fn, lambda size=size: prepare(size), 1)  # type: ignore[misc]
            if round_ > 0:
                times[index].append(seconds)
    return Growth(sizes, tuple(float(np.median(row)) for row in times))


def _timed(fn: Callable[..., Any], setup: Callable[[], Any] | None, calls: int) -> float:
    arguments = () if setup is None else (setup(),)
    with _no_collection():
        _wait_for_device()
        start = time.perf_counter()
        for _ in range(calls):
            fn(*arguments)
        _wait_for_device()
        return (time.perf_counter() - start) / calls


def _calls(shortest: float, sides: Sequence[Callable[..., Any]]) -> int:
    """Calls that take at least 2 ms together on the faster side; one call alone tells too little of a short one."""
    calls = 1
    while shortest * calls < _SHORTEST and calls < _MOST_CALLS:
        calls *= 4
        shortest = min(_timed(side, None, calls) for side in sides)
    return calls


@contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
