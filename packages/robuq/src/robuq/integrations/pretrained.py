"""Load packed models, and quantise checkpoints, with the model's class found from the folder's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from icml26_shared.errors import require
from robuq.config import RobuQConfig
from robuq.errors import RobuqFormatError
from robuq.storage import load_model, read_description
from robuq.streaming import quantize_checkpoint

Factory = Callable[[], nn.Module]


def load_pretrained(folder: str | Path, model_factory: Factory | None = None) -> nn.Module:
    """Load what ``robuq.save_pretrained`` wrote: a packed model in eval mode.

    Args:
        folder: the folder.
        model_factory: makes the unquantised model. None: ``robuq.json`` names a model of timm, or the folder's
            ``config.json`` a class of transformers or diffusers.

    Raises:
        FileNotFoundError: no such folder.
        RobuqFormatError: damaged or incomplete files, another version, a model that does not fit.
    """
    folder = Path(folder)
    described = read_description(folder)
    if model_factory is None and described.get("host", {}).get("library") == "timm":
        from robuq.integrations.timm import timm_factory

        host = described["host"]
        model_factory = timm_factory(host["name"], **host.get("settings", {}))
    return load_model(folder, model_factory or host_factory(folder, described.get("class")))


def from_pretrained(
    path: str | Path,
    config: RobuQConfig,
    *,
    model_factory: Factory | None = None,
    dtype: torch.dtype | None = None,
    batches: Sequence[Any] | None = None,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    references: Sequence[torch.Tensor] | None = None,
) -> nn.Module:
    """Quantise a floating point checkpoint layer by layer: peak memory is the packed model and one layer.

    Args:
        path: folder of transformers or diffusers with safetensors, or a ``.pt`` or ``.safetensors`` file.
        config: settings.
        model_factory: makes the unquantised model; needed for files, and for folders without a ``config.json``.
        dtype: of what is not quantised.
        batches, forward_fn, references: calibration data for ``gain="auto"``, which without it stays at ``"mse"``, with
            a warning; see `robuq.streaming.quantize_checkpoint`.

    Returns:
        The packed model in eval mode.

    Raises:
        FileNotFoundError: no such checkpoint.
        RobuqFormatError: damaged files, or a model that does not fit.
    """
    path = Path(path)
    if model_factory is None:
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"no checkpoint {str(path)!r}")
            raise ValueError(f"{path} is a file and does not say of which model; give model_factory")
        model_factory = host_factory(path, None)
    return quantize_checkpoint(
        path, config, model_factory, dtype=dtype, batches=batches, forward_fn=forward_fn, references=references
    )


def host_factory(folder: Path, name: str | None) -> Factory:
    """A function that makes the model that a folder's ``config.json`` describes, with random weights.

    Args:
        folder: with ``config.json``.
        name: class of the model; None takes what the config names.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise RobuqFormatError(f"{folder} has no config.json of transformers or diffusers; give model_factory")
    try:
        settings: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise RobuqFormatError(f"{file} is damaged: {error}") from None
    settings.pop("quantization_config", None)
    if "_class_name" in settings:
        return _diffusers(settings)
    return _transformers(settings, name, file)


def _diffusers(settings: dict[str, Any]) -> Factory:
    diffusers = require("diffusers", "diffusers")
    found = getattr(diffusers, settings["_class_name"], None)
    if found is None or not hasattr(found, "from_config"):
        raise RobuqFormatError(f"diffusers has no model class {settings['_class_name']!r}")
    return lambda: found.from_config(settings)  # type: ignore[no-any-return]


def _transformers(settings: dict[str, Any], name: str | None, file: Path) -> Factory:
    transformers = require("transformers", "transformers")
    kind = settings.get("model_type")
    if not kind:
        raise RobuqFormatError(f"{file} names neither model_type nor _class_name; give model_factory")
    wanted = name or (settings.get("architectures") or [None])[0]
    found = getattr(transformers, wanted, None) if wanted else None
    kwargs = {key: value for key, value in settings.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **kwargs)
    if found is None or not hasattr(found, "_from_config"):
        return lambda: transformers.AutoModel.from_config(config)  # type: ignore[no-any-return]
    return lambda: found._from_config(config)  # type: ignore[no-any-return]
