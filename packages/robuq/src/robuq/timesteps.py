"""Bits that depend on the diffusion timestep: AMPN over (layer, bin of timesteps), by the same dynamic programming.

``min sum_{l,k} w_k S_k[l, b_lk]`` subject to ``sum_{l,k} w_k m_l b_lk <= abar sum_{l,k} w_k m_l``: bin k of the
timesteps has ``w_k`` sampling steps, and ``S_k`` is the sensitivity measured on inputs of that bin. Plans that give all
bins the same bits are among the candidates, so the optimum is never above AMPN's own under the same weights.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from icml26_shared.checkpoint import atomic_write_json
from robuq.allocation import Plan, allocate_bits, apply_plan
from robuq.sensitivity import Forward, Metric, Sensitivity, measure_sensitivity

ARGUMENTS = ("t", "timestep", "timesteps")
_SEPARATOR = "@"


@dataclass(frozen=True)
class TimestepPlan:
    """Bits of every layer in every bin of timesteps.

    Attributes:
        edges: increasing; bin k holds the timesteps with ``edges[k] <= t < edges[k + 1]``.
        bits: of each bin, layer to bits.
        whole: the plan over all pairs, its layers named ``layer@k``: average, objective, bound, cost, budget.
    """

    edges: tuple[int, ...]
    bits: tuple[Mapping[str, int], ...]
    whole: Plan

    @property
    def avg(self) -> float:
        """Average bits over all layers and sampling steps."""
        return self.whole.avg

    def bin_of(self, timesteps: Tensor) -> int:
        """The bin that all of these timesteps lie in.

        Raises:
            ValueError: none given, some outside the edges, or some in different bins.
        """
        flat = timesteps.detach().reshape(-1).to("cpu", torch.float64)
        if flat.numel() == 0:
            raise ValueError("there are no timesteps to choose bits by")
        low, high = float(flat.min()), float(flat.max())
        # not (a <= x < b) rather than x < a or x >= b: NaN is outside as well
        if not (self.edges[0] <= low and high < self.edges[-1]):
            raise ValueError(f"timesteps must be in [{self.edges[0]}, {self.edges[-1]}), got {low:g} to {high:g}")
        first, last = (sum(edge <= value for edge in self.edges) - 1 for value in (low, high))
        if first != last:
            raise ValueError(
                f"a batch has timesteps from {low:g} to {high:g}, in bins {first} to {last}; a layer has one number of "
                "bits at a time, so run the model once for each bin"
            )
        return first

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {"edges": list(self.edges), "bits": [dict(row) for row in self.bits], "whole": self.whole.to_json()}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | str) -> TimestepPlan:
        """What :meth:`to_json` gave, or its text.

        Raises:
            ValueError: not a plan of this kind.
        """
        try:
            plain = json.loads(kept) if isinstance(kept, str) else kept
            edges = check_edges(plain["edges"])
            bits = tuple({str(layer): int(b) for layer, b in row.items()} for row in plain["bits"])
            whole = Plan.from_json(plain["whole"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no plan over timesteps ({type(error).__name__}: {error})") from None
        if len(bits) != len(edges) - 1:
            raise ValueError(f"this is no plan over timesteps: {len(edges)} edges, but bits for {len(bits)} bins")
        return cls(edges, bits, whole)

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        atomic_write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> TimestepPlan:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text("utf-8"))


def check_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """The edges of at least one bin, strictly increasing whole numbers.

    Raises:
        ValueError: something else.
    """
    found = tuple(edges)
    whole = all(isinstance(edge, int) and not isinstance(edge, bool) for edge in found)
    if len(found) < 2 or not whole or any(b <= a for a, b in itertools.pairwise(found)):
        raise ValueError(f"edges must be at least two increasing whole numbers, such as (0, 250, 1000), got {found}")
    return found


def timestep_edges(timesteps: int = 1000, bins: int = 4) -> tuple[int, ...]:
    """Edges of bins as equal as they can be over ``0 .. timesteps - 1``.

    Raises:
        ValueError: fewer than one bin, or more bins than timesteps.
    """
    if not 1 <= bins <= timesteps:
        raise ValueError(f"bins must be 1 to the number of timesteps ({timesteps}), got {bins}")
    return tuple(round(timesteps * k / bins) for k in range(bins + 1))


def measure_timestep_sensitivity(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    forward_fn: Forward,
    bits: Sequence[int] = (1, 2, 3, 4),
    metric: Metric = "output_mse",
) -> tuple[Sensitivity, ...]:
    """The sensitivity in each bin of timesteps.

    Args:
        model, forward_fn, bits, metric: as for `robuq.measure_sensitivity`.
        batches: of each bin, its calibration batches: noisy inputs at timesteps of that bin.

    Returns:
        One sensitivity a bin.

    Raises:
        ValueError: no bins, or what `robuq.measure_sensitivity` raises.
    """
    if len(batches) == 0:
        raise ValueError("batches is empty; give a list of calibration batches for each bin of timesteps")
    return tuple(measure_sensitivity(model, part, forward_fn, bits, metric) for part in batches)


def allocate_timestep_bits(
    sensitivities: Sequence[Sensitivity],
    macs: Mapping[str, int],
    avg_bits: float,
    edges: Sequence[int],
    *,
    sampled: Sequence[int] | None = None,
) -> TimestepPlan:
    """Bits for every layer in every bin of timesteps, at an average over all sampling steps.

    Args:
        sensitivities: one a bin, of the same layers and candidates.
        macs: multiply-accumulates a token of each layer.
        avg_bits: abar.
        edges: of the bins, see :class:`TimestepPlan`.
        sampled: ``w_k``, how many sampling steps fall into each bin; None: as many as it has timesteps.

    Raises:
        ValueError: bins, layers or candidates that do not agree, weights below 1, or no plan within the budget.
    """
    edges = check_edges(edges)
    count = len(edges) - 1
    steps = [b - a for a, b in itertools.pairwise(edges)] if sampled is None else list(sampled)
    if len(sensitivities) != count or len(steps) != count:
        raise ValueError(f"{count} bins need as many sensitivities and weights, got {len(sensitivities)}, {len(steps)}")
    if any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in steps):
        raise ValueError(f"every bin needs a whole number of sampling steps, at least 1, got {tuple(steps)}")
    first = sensitivities[0]
    if any(s.layers != first.layers or s.bits != first.bits for s in sensitivities):
        raise ValueError("the sensitivities of all bins must have the same layers and the same bits")
    missing = [layer for layer in first.layers if layer not in macs]
    if missing:
        raise ValueError(f"macs has no entry for {missing[0]!r}; it needs one for every layer")
    pairs = [(k, layer) for k in range(count) for layer in first.layers]
    total = sum(steps)
    values = {
        _pair(layer, k): {b: steps[k] / total * sensitivities[k].values[layer][b] for b in first.bits}
        for k, layer in pairs
    }
    cost = {_pair(layer, k): steps[k] * macs[layer] for k, layer in pairs}
    whole = allocate_bits(Sensitivity(values, first.bits, first.metric), cost, avg_bits)
    bits = tuple({layer: whole.bits[_pair(layer, k)] for layer in first.layers} for k in range(count))
    return TimestepPlan(edges, bits, whole)


def _pair(layer: str, k: int) -> str:
    return f"{layer}{_SEPARATOR}{k}"


def follow_timesteps(model: nn.Module, plan: TimestepPlan, argument: str | None = None) -> RemovableHandle:
    """From now on, each call of the model first sets the bits for the timesteps that it is given.

    Args:
        model: quantised or packed; every bin of the plan is checked against its layers at once.
        plan: see :func:`allocate_timestep_bits`.
        argument: name of the forward's argument with the timesteps; None: one of ``t``, ``timestep``, ``timesteps``.

    Returns:
        A handle; ``handle.remove()`` ends it and leaves the bits as they are.

    Raises:
        PlanError: the plan is of another model.
        ValueError: the forward has no such argument. Later, from the model's calls: timesteps in different bins.
    """
    for row in reversed(plan.bits):
        apply_plan(model, row)
    names = list(inspect.signature(model.forward).parameters)
    candidates = ARGUMENTS if argument is None else (argument,)
    found = next((name for name in candidates if name in names), None)
    if found is None:
        raise ValueError(
            f"the forward of {type(model).__name__} has no argument {' or '.join(map(repr, candidates))}; "
            f"its arguments are {', '.join(names)}"
        )
    return model.register_forward_pre_hook(_Follower(plan, found, names.index(found)), with_kwargs=True)


class _Follower:
    """The hook; no closure over the model, so that copies of the model follow on their own."""

    def __init__(self, plan: TimestepPlan, name: str, place: int) -> None:
        self.plan, self.name, self.place = plan, name, place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs[self.name] if self.name in kwargs else args[self.place] if self.place < len(args) else None
        if given is None:
            raise ValueError(f"bits follow the timesteps, but the model was called without {self.name!r}")
        apply_plan(module, self.plan.bits[self.plan.bin_of(torch.as_tensor(given))])
