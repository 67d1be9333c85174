"""How a ratio moves from one value to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Ramp:
    """The ratio of one matrix over the steps.

    With ``x = (t - t0) / length`` in [0, 1]: the ratio is ``r0 + x (r1 - r0)``; or, with rates given, the rate is
    ``l0 + x (l1 - l0)``, ``l0 = r0 eta(t0)``, ``l1 = r1 eta(t0 + length)``, and the ratio is it over ``eta(t)``.
    From ``t0 + length`` on the ratio is ``r1`` exactly.

    Args:
        ratio: before any refresh.
    """

    def __init__(self, ratio: float) -> None:
        self.first = self.target = ratio
        self.start, self.length = 0, 0
        self.rates: tuple[float, float] | None = None

    def begin(self, step: int, length: int, target: float, base_rates: tuple[float, float] | None = None) -> None:
        """Start towards `target` at `step`; base rates at the start and the end for a ramp of the rate."""
        self.first = self.ratio(step, None if base_rates is None else base_rates[0])
        self.start, self.length, self.target = step, length, target
        self.rates = None if base_rates is None else (self.first * base_rates[0], target * base_rates[1])

    def ratio(self, step: int, base_rate: float | None = None) -> float:
        """The ratio at a step; a ramp of the rate needs the base rate of that step, else the ratio moves linearly."""
        if step >= self.start + self.length:
            return self.target
        x = (step - self.start) / self.length
        if self.rates is not None and base_rate:
            rate = self.rates[0] + x * (self.rates[1] - self.rates[0])
            if rate > 0:
                return rate / base_rate
        return self.first + x * (self.target - self.first)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        rates = None if self.rates is None else list(self.rates)
        return {"first": self.first, "target": self.target, "start": self.start, "length": self.length, "rates": rates}

    def load(self, state: Mapping[str, Any]) -> None:
        """What `to_json` gave."""
        self.first, self.target = float(state["first"]), float(state["target"])
        self.start, self.length = int(state["start"]), int(state["length"])
        self.rates = None if state["rates"] is None else (float(state["rates"][0]), float(state["rates"][1]))
