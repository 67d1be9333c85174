"""Lightning: warm-up, sensitivity, plan and packing as a callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from icml26_shared.errors import require
from robuq.allocation import Plan, apply_plan
from robuq.integrations.schedule import BitSchedule

require("lightning", "lightning")

from lightning.pytorch.callbacks import Callback  # noqa: E402


class RobuQLightningCallback(Callback):  # type: ignore[misc]
    """Warm-up at 4 bits, sensitivity, plan, and packing at the end, inside ``lightning.Trainer``.

    The plan is part of Lightning's checkpoints.

    Args:
        avg_bits: average activation bits of the plan.
        batches: calibration batches.
        forward_fn: ``forward_fn(module, batch)`` gives the output; default ``module(batch)``.
        warm: optimiser steps before the plan.
        bits: candidates.
        freeze: pack at the end.
        freeze_to: folder for the packed model, or None.
    """

    def __init__(
        self,
        avg_bits: float,
        batches: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        *,
        warm: int = 1000,
        bits: tuple[int, ...] = (1, 2, 3, 4),
        freeze: bool = True,
        freeze_to: str | Path | None = None,
    ) -> None:
        call = forward_fn or (lambda module, batch: module(batch))
        self.schedule = BitSchedule(avg_bits, batches, call, warm=warm, bits=bits, freeze=freeze, folder=freeze_to)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the bits of the warm-up, or of the restored plan."""
        if self.schedule.plan is not None:
            apply_plan(pl_module, self.schedule.plan)
        else:
            self.schedule.begin(pl_module, trainer.global_step, None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """After the warm-up: measure and plan."""
        self.schedule.step(pl_module, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Pack."""
        self.schedule.end(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint."""
        return {"plan": None if self.schedule.plan is None else self.schedule.plan.to_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From Lightning's checkpoint."""
        self.schedule.plan = None if state_dict["plan"] is None else Plan.from_json(state_dict["plan"])
