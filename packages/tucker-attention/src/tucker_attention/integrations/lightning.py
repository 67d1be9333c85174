"""Lightning: train only the cores of Tucker layers, and keep them as a file, as a callback.

::

    Trainer(callbacks=[TrainCores("cores.safetensors")]).fit(LitModel(converted), data)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from icml26_shared.errors import require
from tucker_attention.integrations.adapters import freeze_factors, save_cores

require("lightning.pytorch", "lightning", distribution="tucker-attention")

from lightning.pytorch import Callback  # noqa: E402


class TrainCores(Callback):  # type: ignore[misc]
    """Freezes all but the cores before the optimizer is made, and writes them when training ends.

    Args:
        path: safetensors file of the cores, see `tucker_attention.integrations.adapters.load_cores`; None: not written.
        head_factors: train U1 and V1 too.

    Raises:
        ValueError: the module has no Tucker layer.
    """

    def __init__(self, path: str | Path | None = None, *, head_factors: bool = True) -> None:
        self.path, self.head_factors = path, head_factors
        self.trainable: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Freeze; Lightning calls this before ``configure_optimizers``."""
        if stage == "fit":
            self.trainable = freeze_factors(pl_module, head_factors=self.head_factors)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the cores, in one process of many."""
        if self.path is not None and trainer.is_global_zero:
            save_cores(pl_module, self.path)
