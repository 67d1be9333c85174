"""Lightning: a callback that holds the controller.

::

    class LitModel(LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(param_groups(self, lr=6e-4))
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    Trainer(callbacks=[LLRLightningCallback(s2=3.0)]).fit(LitModel(), data)
"""

from __future__ import annotations

import math
from typing import Any

from icml26_shared.errors import require

require("lightning.pytorch", "layerwise-lr[lightning]")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

from layerwise_lr.controller import LayerwiseLR  # noqa: E402


class LLRLightningCallback(Callback):  # type: ignore[misc]
    """Steps a `LayerwiseLR` after Lightning's scheduler, logs alpha and rate of every layer, and keeps its state in
    Lightning's checkpoints.

    Args:
        log: log ``llr/alpha/NAME`` and ``llr/lr/NAME`` every ``log_every_n_steps``.
        settings: of `layerwise_lr.config.LLRConfig`; ``total_steps`` defaults to the trainer's number of steps.

    Attributes:
        controller: the `LayerwiseLR`, once training has begun.
    """

    def __init__(self, *, log: bool = True, **settings: Any) -> None:
        self.log, self.settings = log, settings
        self.controller: LayerwiseLR | None = None
        self._saved: dict[str, Any] | None = None
        self._seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the controller; on a resumed run, load its state."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"LLRLightningCallback takes a module with one optimizer, got {len(trainer.optimizers)}")
        settings = dict(self.settings)
        steps = trainer.estimated_stepping_batches
        if "total_steps" not in settings and math.isfinite(steps) and steps > 0:
            settings["total_steps"] = int(steps)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.controller = LayerwiseLR(trainer.optimizers[0], pl_module, schedulers, **settings)
        self._seen = trainer.global_step
        if self._saved is not None:
            self.controller.load_state_dict(self._saved)
            self._saved = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the scheduler's step; nothing while gradients accumulate."""
        if self.controller is None or trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self.controller.step()
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.log and trainer.logger is not None and every and trainer.global_step % every == 0:
            figures = {f"llr/alpha/{name}": alpha for name, alpha in self.controller.alphas.items()}
            figures |= {f"llr/lr/{name}": lr for name, lr in self.controller.lrs.items()}
            trainer.logger.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the background thread."""
        if self.controller is not None:
            self.controller.close()

    def state_dict(self) -> dict[str, Any]:
        """The controller's."""
        return {} if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts."""
        self._saved = dict(state_dict) or None
