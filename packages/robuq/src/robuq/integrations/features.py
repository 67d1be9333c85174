"""Image features from a local folder of transformers or timm; nothing is downloaded, nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.errors import UserError, require

_PREPROCESSING = "preprocessor_config.json"


@dataclass(frozen=True)
class Extractor:
    """A network with what it wants its images to be.

    Attributes:
        network: from normalised images [b, 3, h, w] to features [b, d].
        size: height and width.
        mean, std: of the three channels.
    """

    network: Callable[[Tensor], Tensor]
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features float32 [b, d] of images float [b, 3, h, w] in [0, 1], resized (bicubic, antialiased) and
        normalised.
        """
        if tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in (self.mean, self.std))
        return self.network((images - mean) / std).float()


def load_extractor(folder: Path) -> Extractor:
    """The feature extractor in a folder.

    Args:
        folder: of transformers (``config.json`` with ``model_type``) or timm (``config.json`` with ``architecture``),
            with weights in safetensors. Pooled features are used; a classifier on top is left out.

    Raises:
        UserError: no such folder, no weights in safetensors, or a model that is neither.
        MissingExtra: transformers or timm is not installed.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"no feature extractor in {str(folder)!r}: give a folder of transformers or timm with config.json and "
            "*.safetensors"
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors files; other formats of weights are not read")
    if "architecture" in config:
        return _timm(folder, config)
    if "model_type" in config:
        return _transformers(folder, config)
    raise UserError(f"{file} names neither model_type (transformers) nor architecture (timm)")


def _timm(folder: Path, config: Mapping[str, Any]) -> Extractor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    timm = require("timm", "timm")
    try:
        options = {**(config.get("model_args") or {}), "num_classes": 0}
        network = timm.create_model(config["architecture"], pretrained=False, **options)
        told = dict(config.get("pretrained_cfg") or {})
        weights = load_file(folder / "model.safetensors")
        heads = told.get("classifier") or ()
        heads = (heads,) if isinstance(heads, str) else tuple(heads)
        weights = {n: w for n, w in weights.items() if not any(n.startswith(f"{head}.") for head in heads)}
        network.load_state_dict(weights)
        height, width = tuple(told.get("input_size") or network.pretrained_cfg["input_size"])[1:]
        mean, std = (tuple(map(float, told.get(k) or network.pretrained_cfg[k])) for k in ("mean", "std"))
    except (OSError, RuntimeError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder} is no model of timm that can be loaded: {_first_line(error)}") from None
    return Extractor(network.eval(), (int(height), int(width)), mean, std)


def _transformers(folder: Path, config: Mapping[str, Any]) -> Extractor:
    from safetensors import SafetensorError

    transformers = require("transformers", "transformers")
    try:
        model = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} is no model of transformers that can be loaded: {_first_line(error)}") from None
    model = getattr(model, "vision_model", model).eval()
    file = folder / _PREPROCESSING
    told: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    size = _size(told.get("crop_size") or told.get("size") or getattr(model.config, "image_size", None) or 224)
    mean, std = (tuple(map(float, told.get(key) or (0.5, 0.5, 0.5))) for key in ("image_mean", "image_std"))
    return Extractor(lambda images: _pooled(model, images), size, mean, std)


def _pooled(model: nn.Module, images: Tensor) -> Tensor:
    """The model's own pooled output, else the mean over tokens or places."""
    found = model(pixel_values=images)
    pooled = getattr(found, "pooler_output", None)
    if pooled is not None:
        return torch.flatten(pooled, 1)
    last: Tensor = found.last_hidden_state
    return last.mean(1) if last.dim() == 3 else last.mean((2, 3))


def _size(told: Any) -> tuple[int, int]:
    """Height and width of ``224``, ``[224, 224]``, ``{"height": 224, "width": 224}`` or ``{"shortest_edge": 224}``."""
    if isinstance(told, Mapping):
        edge = told.get("shortest_edge")
        return int(told.get("height", edge)), int(told.get("width", edge))
    return (int(told[0]), int(told[1])) if isinstance(told, list | tuple) else (int(told), int(told))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
