"""Hugging Face Trainer: a callback that holds the controller, and the optimizer with one group a matrix.

::

    trainer = Trainer(
        model=model, args=args, train_dataset=data,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, lr=6e-4, weight_decay=0.1),
        callbacks=[LLRTrainerCallback(s2=3.0)],
    )

A run that resumes from a checkpoint goes on with the same ratios: they stand in its ``trainer_state.json``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from icml26_shared.errors import require

require("transformers", "layerwise-lr[transformers]")

from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from layerwise_lr.controller import LayerwiseLR  # noqa: E402
from layerwise_lr.groups import OptimizerName, param_groups  # noqa: E402
from layerwise_lr.muon import MuonAdamW  # noqa: E402
from layerwise_lr.rates import unwrapped  # noqa: E402


def optimizer_cls_and_kwargs(
    model: nn.Module, lr: float, optimizer: OptimizerName = "adamw", weight_decay: float = 0.1, **options: Any
) -> tuple[type, dict[str, Any]]:
    """For the Trainer's argument of the same name: AdamW, or Muon with AdamW, over one group a matrix.

    Args:
        model, lr, optimizer, weight_decay: see `layerwise_lr.groups.param_groups`. The Trainer's own ``learning_rate``
            and ``weight_decay`` are not used.
        options: ``decay_norm_bias``, ``muon_lr`` and ``lora`` of `param_groups`; the others go to the optimizer
            (``betas``, ``eps``, ``fused``).
    """
    of_groups = {name: options.pop(name) for name in ("decay_norm_bias", "muon_lr", "lora") if name in options}
    groups = param_groups(model, lr, optimizer, weight_decay, **of_groups)
    return (MuonAdamW if optimizer == "muon" else AdamW), {"params": groups, "lr": lr, **options}


class LLRTrainerCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Steps a `LayerwiseLR` after the Trainer's scheduler, and logs alpha, ratio and rate of every layer.

    Args:
        log: add ``llr/alpha/NAME`` and ``llr/lr/NAME`` to what the Trainer logs.
        settings: of `layerwise_lr.config.LLRConfig`; ``total_steps`` defaults to the Trainer's number of steps.

    Attributes:
        controller: the `LayerwiseLR`, once training has begun.
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self.log, self.settings = log, settings
        self.controller: LayerwiseLR | None = None
        self.saved: dict[str, Any] | None = None

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Build the controller; on a resumed run, load its state."""
        settings = {"total_steps": state.max_steps, **self.settings}
        self.controller = LayerwiseLR(
            unwrapped(optimizer),  # accelerate wraps both
            model,
            getattr(lr_scheduler, "scheduler", lr_scheduler),
            **settings,
        )
        kept = self.saved or _kept_state(state.stateful_callbacks.get(type(self).__name__))
        if state.global_step and kept:
            self.controller.load_state_dict(kept)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the scheduler's step."""
        if self.controller is not None:
            self.controller.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the layers' figures."""
        if self.log and logs is not None and self.controller is not None:
            figures = layer_figures(self.controller)
            logs.update(figures)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the background thread."""
        if self.controller is not None:
            self.controller.close()

    def state(self) -> dict[str, Any]:
        """What goes into ``trainer_state.json``."""
        kept = None if self.controller is None else self.controller.state_dict()
        return {"args": {"log": self.log, **self.settings}, "attributes": {"saved": kept}}


def layer_figures(controller: LayerwiseLR) -> dict[str, float]:
    """``llr/alpha/NAME`` of fitted matrices and ``llr/lr/NAME`` of all."""
    alphas = {f"llr/alpha/{name}": alpha for name, alpha in controller.alphas.items()}
    return alphas | {f"llr/lr/{name}": lr for name, lr in controller.lrs.items()}


def _kept_state(kept: Any) -> dict[str, Any] | None:
    """The controller's state in what the Trainer keeps of its callbacks."""
    first = kept[0] if isinstance(kept, list) and kept else kept
    return first.get("attributes", {}).get("saved") if isinstance(first, dict) else None
