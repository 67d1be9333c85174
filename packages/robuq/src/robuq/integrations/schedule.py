"""The pipeline inside another library's training loop: warm-up at 4 bits, sensitivity, plan, packing at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from robuq.allocation import Plan, allocate_bits, apply_plan
from robuq.sensitivity import Sensitivity, measure_sensitivity
from robuq.storage import save_model
from robuq.surgery import freeze, macs_per_token, quantised_layers

PLAN = "robuq_plan.json"


class BitSchedule:
    """What the callbacks of transformers and Lightning share.

    Args:
        avg_bits: average activation bits of the plan.
        batches, forward_fn: for the sensitivity, see `robuq.measure_sensitivity`.
        warm: steps before the plan.
        bits: candidates; the largest is used until the plan.
        freeze: pack the model at the end.
        folder: where the packed model is saved, or None.
    """

    def __init__(
        self,
        avg_bits: float,
        batches: Any,
        forward_fn: Callable[[nn.Module, Any], Any],
        *,
        warm: int,
        bits: tuple[int, ...],
        freeze: bool,
        folder: str | Path | None,
    ) -> None:
        if warm < 0:
            raise ValueError(f"warm must be at least 0, got {warm}")
        self.avg_bits, self.batches, self.forward_fn = avg_bits, batches, forward_fn
        self.warm, self.bits, self.freeze, self.folder = warm, bits, freeze, folder
        self.plan: Plan | None = None
        self.sensitivity: Sensitivity | None = None
        self._plan_file: Path | None = None

    def begin(self, model: nn.Module, step: int, run_folder: Path | None) -> None:
        """At the start, or when a run goes on at ``step``; the plan lies in the run's folder."""
        if not any(True for _ in quantised_layers(model)):
            raise ValueError("nothing in this model is quantised; call robuq.quantize(model, config) before training")
        self._plan_file = None if run_folder is None else run_folder / PLAN
        if step >= self.warm and step > 0 and self._plan_file is not None and self._plan_file.is_file():
            self.plan = Plan.load(self._plan_file)
            apply_plan(model, self.plan)
            return
        for _, layer in quantised_layers(model):
            if not layer.is_ada:
                layer.bits = max(self.bits)

    def step(self, model: nn.Module, step: int) -> None:
        """After each step."""
        if self.plan is not None or step < self.warm:
            return
        state = torch.get_rng_state()
        self.sensitivity = measure_sensitivity(model, self.batches, self.forward_fn, self.bits)
        self.plan = allocate_bits(self.sensitivity, macs_per_token(model), self.avg_bits)
        torch.set_rng_state(state)
        apply_plan(model, self.plan)
        if self._plan_file is not None:
            self.plan.save(self._plan_file)

    def end(self, model: nn.Module) -> None:
        """After training: pack, and save if there is a folder."""
        if self.folder is not None:
            save_model(model, self.folder)
        if self.freeze:
            freeze(model)
