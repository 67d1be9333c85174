"""timm: vision transformers by name, quantised, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from icml26_shared.errors import require
from robuq.config import RobuQConfig
from robuq.storage import save_model
from robuq.streaming import quantize_checkpoint
from robuq.surgery import freeze, quantize


def timm_factory(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A function that makes a model of timm with random weights; nothing is downloaded.

    Raises:
        MissingExtra: timm is not installed.
        ValueError: timm knows no such model.
    """
    timm = require("timm", "timm")
    if name not in timm.list_models():
        raise ValueError(f"timm knows no model {name!r}; timm.list_models() lists them")
    return lambda: timm.create_model(name, pretrained=False, **settings)  # type: ignore[no-any-return]


def quantize_timm(
    name: str,
    config: RobuQConfig | None = None,
    checkpoint: str | Path | None = None,
    *,
    images: Sequence[Tensor] | None = None,
    **settings: Any,
) -> nn.Module:
    """A packed model of timm.

    Args:
        name: as ``timm.create_model`` takes it.
        config: default ``RobuQConfig.for_vit()``.
        checkpoint: safetensors or ``.pt`` file with its weights, read layer by layer; None: random weights.
        images: batches [b, c, h, w], normalised, that ``gain="auto"`` is decided on.
        settings: further arguments of ``timm.create_model``.
    """
    config, factory = config or RobuQConfig.for_vit(), timm_factory(name, **settings)
    forward_fn = None if images is None else _call
    if checkpoint is not None:
        return quantize_checkpoint(checkpoint, config, factory, batches=images, forward_fn=forward_fn)
    return freeze(quantize(factory().eval(), config, batches=images, forward_fn=forward_fn))


def _call(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def save_timm(model: nn.Module, folder: str | Path, name: str, **settings: Any) -> Path:
    """Save a quantised model of timm, so that ``robuq.load_pretrained(folder)`` finds its class."""
    return save_model(model, folder, host={"library": "timm", "name": name, "settings": settings})
