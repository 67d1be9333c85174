"""AMPN: activation bits for every layer by exact dynamic programming.

``min sum_l S[l, b_l]`` subject to ``sum_l m_l b_l <= abar sum_l m_l``, ``b_l in B``: sensitivities S,
multiply-accumulates m_l of a layer, average bits abar (RobuQ, arXiv 2509.23582).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from icml26_shared.checkpoint import atomic_write_json
from robuq.sensitivity import Sensitivity
from robuq.surgery import quantised_layers

STATES = 1_000_000
WEIGHTS = ("macs", "layers", "elements")
SOLVERS = ("dp", "greedy", "uniform")


class PlanError(ValueError):
    """A plan does not belong to this model."""


@dataclass(frozen=True)
class Plan:
    """Bits of every layer.

    Attributes:
        bits: layer to bits.
        avg: average bits under the weights that the budget was about.
        objective: ``sum_l S[l, b_l]``.
        lower_bound: optimum of the linear relaxation: no plan within the budget is below it.
        cost: ``sum_l m_l b_l``.
        budget: what the cost had to stay within.
        exact: whether the budget was not rounded to a grid.
    """

    bits: Mapping[str, int]
    avg: float
    objective: float
    lower_bound: float
    cost: float
    budget: float
    exact: bool = True
    solver: str = field(default="dp")

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "bits": dict(self.bits),
            "avg": self.avg,
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "cost": self.cost,
            "budget": self.budget,
            "exact": self.exact,
            "solver": self.solver,
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | str) -> Plan:
        """What :meth:`to_json` gave, or its text.

        Raises:
            ValueError: fields are missing or unknown, or bits are no whole numbers.
        """
        plain = dict(json.loads(kept) if isinstance(kept, str) else kept)
        try:
            plan = cls(**plain)
        except TypeError as error:
            raise ValueError(f"this is no plan: {error}") from None
        if not isinstance(plan.bits, dict) or not all(isinstance(b, int) for b in plan.bits.values()):
            raise ValueError("this is no plan: bits must map layers to whole numbers")
        return plan

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        atomic_write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text("utf-8"))


def allocate_bits(
    sens: Sensitivity,
    macs: Mapping[str, int],
    avg_bits: float,
    solver: Literal["dp", "greedy", "uniform"] = "dp",
    *,
    weights: Literal["macs", "layers", "elements"] = "macs",
    elements: Mapping[str, int] | None = None,
    costs: Mapping[str, Mapping[int, float]] | None = None,
) -> Plan:
    """Choose bits for every layer of ``sens`` within an average.

    Ties go to the smallest cost, then to the lexicographically smallest plan in the order of the layers.

    Args:
        sens: sensitivities of N layers at candidate bits.
        macs: multiply-accumulates a token of each layer.
        avg_bits: abar.
        solver: ``"dp"`` is exact; ``"greedy"`` (gain a MAC) and ``"uniform"`` are for comparison.
        weights: what bits are averaged over: ``"macs"``, ``"layers"`` (equal weights), or ``"elements"``, given by
            ``elements``.
        elements: activations a token of each layer, for ``weights="elements"``.
        costs: cost of each layer at each bits, measured times or energies, in place of ``m_l b``; the budget is then
            the mean of the costs at the bits next to ``avg_bits``, interpolated.

    Returns:
        The plan. Where the budget has more than a million states, it is rounded down to a grid of a million cells:
        ``exact`` is then False, and ``objective - lower_bound`` bounds what that can cost.

    Raises:
        ValueError: no plan fits the budget, unknown names, or layers without MACs.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, got {solver!r}")
    layers, bits = list(sens.layers), sorted(sens.bits)
    cost = _costs(layers, bits, macs, weights, elements, costs)
    value = np.array([[sens.values[layer][b] for b in bits] for layer in layers], dtype=np.float64)
    if not np.isfinite(value).all() or (value < 0).any():
        raise ValueError("sensitivities must be finite and at least 0")
    if not math.isfinite(avg_bits) or avg_bits < bits[0]:
        raise ValueError(f"an average of {avg_bits} bits cannot be met: the smallest candidate is {bits[0]}")
    budget = _budget(cost, bits, avg_bits)
    if cost.min(1).sum() > budget * (1 + 1e-12):
        raise ValueError(f"no plan fits the budget {budget:g}: the cheapest costs {cost.min(1).sum():g}")
    exact = True
    if solver == "dp":
        chosen, exact = solve(value, cost, budget)
    elif solver == "greedy":
        chosen = greedy(value, cost, budget)
    else:
        level = max(i for i, b in enumerate(bits) if b <= avg_bits)
        chosen = [level] * len(layers)
    rows = np.arange(len(layers))
    spent = float(cost[rows, chosen].sum())
    return Plan(
        bits={layer: bits[c] for layer, c in zip(layers, chosen, strict=True)},
        avg=_average(cost, bits, spent),
        objective=math.fsum(value[rows, chosen]),
        lower_bound=lower_bound(value, cost, budget),
        cost=spent,
        budget=float(budget),
        exact=exact,
        solver=solver,
    )


def _costs(
    layers: Sequence[str],
    bits: Sequence[int],
    macs: Mapping[str, int],
    weights: str,
    elements: Mapping[str, int] | None,
    costs: Mapping[str, Mapping[int, float]] | None,
) -> np.ndarray:
    """[layers, bits]."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(map(repr, WEIGHTS))}, got {weights!r}")
    if not layers:
        raise ValueError("there are no layers to give bits to")
    if costs is not None:
        return np.array([[float(costs[layer][b]) for b in bits] for layer in layers])
    table: Mapping[str, int] = {"macs": macs, "layers": dict.fromkeys(layers, 1), "elements": elements or {}}[weights]
    missing = [layer for layer in layers if layer not in table]
    if missing:
        raise ValueError(f"{weights} has no entry for {missing[0]!r}; it needs one for every layer")
    m = np.array([int(table[layer]) for layer in layers], dtype=np.float64)
    if (m <= 0).any():
        raise ValueError(f"{weights} must be at least 1 for every layer")
    return np.outer(m, np.array(bits, dtype=np.float64))


def _budget(cost: np.ndarray, bits: Sequence[int], avg_bits: float) -> float:
    totals = cost.sum(0)
    return float(np.interp(avg_bits, bits, totals)) if avg_bits <= bits[-1] else float(totals[-1])


def _average(cost: np.ndarray, bits: Sequence[int], spent: float) -> float:
    totals = cost.sum(0)
    if not (np.diff(totals) > 0).all():
        return math.nan
    return round(float(np.interp(spent, totals, bits)), 12)  # the interpolation's rounding must not pass the budget


def solve(value: np.ndarray, cost: np.ndarray, budget: float) -> tuple[list[int], bool]:
    """The optimal choices by dynamic programming over the spent budget, and whether no rounding took place.

    From the last layer to the first, ``best[s]`` is the smallest objective, then the smallest cost, of the layers from
    here on within s cells; going forward, the first choice that reaches it is the lexicographically smallest.
    """
    cells, limit, exact = _cells(cost, budget)
    count, options = value.shape
    best, spent = np.zeros(limit + 1), np.zeros(limit + 1)
    choice = np.empty((count, limit + 1), dtype=np.int8)
    for layer in range(count - 1, -1, -1):
        new, new_spent = np.full(limit + 1, np.inf), np.full(limit + 1, np.inf)
        picked = choice[layer]
        picked[:] = -1
        for option in range(options):
            step = int(cells[layer, option])
            if step > limit:
                continue
            objective = best[: limit + 1 - step] + value[layer, option]
            total = spent[: limit + 1 - step] + cost[layer, option]
            here, here_spent = new[step:], new_spent[step:]
            better = _below(objective, here) | (_same(objective, here) & (total < here_spent * (1 - 1e-12)))
            here[better], here_spent[better] = objective[better], total[better]
            picked[step:][better] = option
        best, spent = new, new_spent
    found, left = [], limit
    for layer in range(count):
        option = int(choice[layer, left])
        found.append(option)
        left -= int(cells[layer, option])
    return found, exact


def _below(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (a < b) & ~_same(a, b)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal up to the rounding of sums in another order."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(b) & (np.abs(a - b) <= 1e-12 * np.maximum(np.abs(a), np.abs(b)))


def _cells(cost: np.ndarray, budget: float) -> tuple[np.ndarray, int, bool]:
    """Costs and budget in whole cells: exactly, by the greatest common divisor, or rounded onto a grid."""
    whole = bool((cost == np.round(cost)).all())
    if whole:
        divisor = int(np.gcd.reduce(cost.astype(np.int64).ravel()))
        cheapest = cost.min(1)
        # only what is spent beyond the cheapest choice needs states
        extra = ((cost - cheapest[:, None]) / divisor).astype(np.int64)
        limit = min(math.floor((budget - cheapest.sum()) / divisor + 1e-9), int(extra.max(1).sum()))
        if limit <= STATES:
            return extra, max(limit, 0), True
    cheapest = cost.min(1)
    room = budget - cheapest.sum()
    cell = max(room, 1e-300) / STATES
    extra = np.ceil((cost - cheapest[:, None]) / cell - 1e-9)
    return np.minimum(extra, STATES + 1).astype(np.int64), STATES, False


def greedy(value: np.ndarray, cost: np.ndarray, budget: float) -> list[int]:
    """From the cheapest choices, raise the layer with the largest gain for its cost, one step at a time, while it
    fits.
    """
    order = np.argsort(cost, axis=1, kind="stable")
    place = [0] * len(value)
    spent = float(cost[np.arange(len(value)), order[:, 0]].sum())
    while True:
        best: tuple[float, int] | None = None
        for layer in range(len(value)):
            if place[layer] + 1 == value.shape[1]:
                continue
            now, then = order[layer, place[layer]], order[layer, place[layer] + 1]
            extra = cost[layer, then] - cost[layer, now]
            gain = value[layer, now] - value[layer, then]
            fits = spent + extra <= budget * (1 + 1e-12)
            if fits and gain > 0 and (best is None or gain / extra > best[0]):
                best = gain / extra, layer
        if best is None:
            return [int(order[layer, place[layer]]) for layer in range(len(value))]
        layer = best[1]
        spent += float(cost[layer, order[layer, place[layer] + 1]] - cost[layer, order[layer, place[layer]]])
        place[layer] += 1


def lower_bound(value: np.ndarray, cost: np.ndarray, budget: float) -> float:
    """Optimum of the linear relaxation: each layer may mix its choices. By the lower convex hull of each layer."""
    total, spent = 0.0, 0.0
    steps: list[tuple[float, float]] = []
    for values, costs in zip(value, cost, strict=True):
        points = sorted(zip(costs.tolist(), values.tolist(), strict=True))
        hull: list[tuple[float, float]] = []
        for c, v in points:
            if hull and v >= hull[-1][1]:
                continue  # dearer and no better
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (c, v)):
                hull.pop()
            if hull and hull[-1][0] == c:
                hull.pop()
            hull.append((c, v))
        total += hull[0][1]
        spent += hull[0][0]
        steps += [(_slope(a, b), b[0] - a[0]) for a, b in pairwise(hull)]
    for slope, length in sorted(steps):
        part = min(length, budget - spent)
        if part <= 0:
            break
        total += slope * part
        spent += part
    return total


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] != a[0] else -math.inf


def apply_plan(model: nn.Module, plan: Plan | Mapping[str, int]) -> nn.Module:
    """Set the bits of a model's layers, in place; all of them are checked first.

    Raises:
        PlanError: the plan names a layer that the model lacks, or leaves one out that is not an adaLN layer.
    """
    bits = plan.bits if isinstance(plan, Plan) else plan
    layers = dict(quantised_layers(model))
    unknown = [name for name in bits if name not in layers]
    if unknown:
        raise PlanError(f"the plan has bits for {unknown[0]!r}, which is no quantised layer of this model")
    missing = [name for name, layer in layers.items() if name not in bits and not layer.is_ada]
    if missing:
        raise PlanError(f"the plan has no bits for {missing[0]!r}; it belongs to another model")
    for name, b in bits.items():
        layers[name].bits = b
    return model
