"""Settings of the controller."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from layerwise_lr.assignment import ASSIGNS, Assign, check_bounds
from layerwise_lr.layers import LORA
from layerwise_lr.measurement import METRICS, Measure, Metric
from layerwise_lr.tail import Fit

RampIn = Literal["ratio", "rate"]
Decay = Literal["coupled", "constant"]


@dataclass(frozen=True)
class LLRConfig:
    """Settings of `layerwise_lr.controller.LayerwiseLR`; every argument has the published value as its default.

    Args:
        s1, s2: smallest and largest ratio to the base rate, 0 < s1 <= s2 (published: 1 and 3 at 60M, 1 and 5 at 1B).
        interval: steps between refreshes; they happen at step 1 and at multiples of it (40 of 3200, 100 of 40 000).
        ramp: steps over which a refresh moves to its new ratios; 0: at once (20 and 50).
        active_fraction: refreshes stop after this share of the steps, and the ratios stay.
        total_steps: steps of the training. Needed unless ``active_fraction`` is 1.
        fit: where a tail starts, see `layerwise_lr.tail.fit_tail`.
        assign: map from exponents to ratios, see `layerwise_lr.assignment`.
        embed: ratio of embeddings and head: ``"max"`` (that of the largest alpha, as published), ``"base"`` (1) or a
            positive number.
        inverse: larger rates for heavier tails (ablation).
        within_block: apply the map within each block.
        metric: what is mapped: ``"alpha"``, ``"alphahat"``, ``"stable_rank"`` or ``"entropy"``.
        min_dim: matrices with fewer eigenvalues keep the base rate.
        ramp_in: what moves linearly in a ramp: the ``"ratio"``, or the ``"rate"`` from the present one to the new ratio
            times what the scheduler will give at the ramp's end (as published). Both start and end alike, and are one
            where the schedule is constant.
        decay: ``"coupled"``: decoupled weight decay grows with a layer's rate (as published); ``"constant"``: the
            group's weight decay is divided by its ratio.
        shrink: pull badly determined alphas to the mean before mapping (not in the paper).
        lora: what LoRA layers are measured by, ``"merged"`` or ``"ba"``.
        farms: measure averages over square windows.
        k, alpha_max, filter_zeros: see `layerwise_lr.tail.fit_tail`.
        background: measure in a thread, on a copy of the weights, while training goes on.
        deterministic: with ``background``, wait for the result one step later, so that runs are repeatable.
    """

    s1: float = 1.0
    s2: float = 3.0
    interval: int = 40
    ramp: int = 20
    active_fraction: float = 0.2
    total_steps: int | None = None
    fit: Fit = "median"
    assign: Assign = "linear"
    embed: Literal["max", "base"] | float = "max"
    inverse: bool = False
    within_block: bool = False
    metric: Metric = "alpha"
    min_dim: int = 50
    ramp_in: RampIn = "ratio"
    decay: Decay = "coupled"
    shrink: bool = False
    lora: str = "merged"
    farms: bool = False
    k: float = 2
    alpha_max: float = 50.0
    filter_zeros: bool = False
    background: bool = False
    deterministic: bool = True
    measure: Measure = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds(self.s1, self.s2)
        _whole("interval", self.interval, 1)
        _whole("ramp", self.ramp, 0)
        if not 0 < self.active_fraction <= 1:
            raise ValueError(f"active_fraction must be in (0, 1], got {self.active_fraction}")
        if self.total_steps is not None:
            _whole("total_steps", self.total_steps, 1)
        elif self.active_fraction < 1:
            raise ValueError(
                f"active_fraction = {self.active_fraction} is a share of total_steps, which is not given: pass "
                "total_steps=N, or active_fraction=1 to refresh throughout"
            )
        _one_of("assign", self.assign, ASSIGNS)
        _one_of("metric", self.metric, METRICS)
        _one_of("ramp_in", self.ramp_in, ("ratio", "rate"))
        _one_of("decay", self.decay, ("coupled", "constant"))
        _one_of("lora", self.lora, LORA)
        if isinstance(self.embed, str):
            _one_of("embed", self.embed, ("max", "base"))
        elif not (math.isfinite(self.embed) and self.embed > 0):
            raise ValueError(f"embed must be 'max', 'base' or a positive ratio, got {self.embed}")
        measure = Measure(
            self.fit, self.k, self.filter_zeros, alpha_max=self.alpha_max, min_dim=self.min_dim, farms=self.farms
        )
        object.__setattr__(self, "measure", measure)

    def refreshes_at(self, step: int) -> bool:
        """Whether step (1, 2, ...) is one at which the spectra are read."""
        if self.total_steps is not None and step > self.active_fraction * self.total_steps:
            return False
        return step == 1 or step % self.interval == 0

    def to_json(self) -> dict[str, Any]:
        """All settings."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(allowed)}")
