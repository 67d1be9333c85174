"""A compressed prompt cache on disk, to be used again by another process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from icml26_shared.checkpoint import atomic_path
from manifoldkv.config import KVConfig
from manifoldkv.integrations.transformers.layer import ManifoldLayer

if TYPE_CHECKING:
    from manifoldkv.integrations.transformers.cache import ManifoldCache

FORMAT = "manifoldkv-cache-2"
_TENSORS = ("keys", "values", "positions", "pads", "padded", "front")
_FULL = ("logical", "evictions", "metric_used", "_decode_budget")  # beside the tensors, of a compressed layer
_SLIDING = ("cumulative_length",)
_ROPE = ("rope_type", "rope_theta", "factor")


class CacheFormatError(ValueError):
    """A file that isn't a saved cache, is damaged, or belongs to another model."""


def save_cache(cache: ManifoldCache, path: str | Path) -> Path:
    """Write a cache to one safetensors file, atomically: all of the new file or the old one.

    Raises:
        ValueError: an empty cache, or layers that are neither full nor sliding attention.
    """
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        if not getattr(layer, "is_initialized", False):
            raise ValueError(
                f"layer {index} holds nothing yet: run the prompt through the model before saving its cache"
            )
        if isinstance(layer, ManifoldLayer):
            layers.append({name: getattr(layer, name) for name in _FULL})
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layers.append({name: getattr(layer, name) for name in _SLIDING})
        else:
            raise ValueError(f"layer {index} is a {type(layer).__name__}; only full and sliding attention can be saved")
        for name in _TENSORS:
            tensor = getattr(layer, name, None)
            if tensor is not None:
                tensors[f"{index}.{name}"] = tensor.contiguous()
    if cache.padding_mask is not None:
        tensors["padding_mask"] = cache.padding_mask.contiguous()
    header = {"format": FORMAT, "model": fingerprint(cache.model_config), "cfg": asdict(cache.cfg), "layers": layers}
    header["dtype"] = str(cache.layers[0].keys.dtype)
    header["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    header["digest"] = _digest(header, tensors)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"manifoldkv": json.dumps(header)})
    return Path(path)


def load_cache(path: str | Path, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> ManifoldCache:
    """Read a cache written by :func:`save_cache` for use with the model of ``config``.

    Args:
        path: the file.
        config: of the model that will continue from it.
        dtype: of the model's weights; default: what ``config`` says.

    Raises:
        FileNotFoundError: no such file.
        CacheFormatError: not a saved cache, damaged, or of another model (type, layers, heads, head size, rotary base,
            dtype).
        TypeError: ``config`` is not a configuration, e.g. the model itself.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be the model's configuration (model.config), not {type(config).__name__}")
    header, tensors = _read(Path(path))
    decoder = config.get_text_config(decoder=True)
    _check_fits(header, fingerprint(decoder), dtype or getattr(decoder, "dtype", None), path)
    from manifoldkv.integrations.transformers.cache import ManifoldCache

    try:
        cache = ManifoldCache(decoder, KVConfig(**header["cfg"]), per_head=header["cfg"]["head_budget"] == "adaptive")
        for index, (layer, numbers) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            _restore(layer, numbers, {name: tensors.get(f"{index}.{name}") for name in _TENSORS})
    except (KeyError, TypeError, ValueError) as error:
        raise CacheFormatError(f"{path}: the saved cache is incomplete ({error}); save it again") from error
    cache.padding_mask = tensors.get("padding_mask")
    return cache


def _restore(layer: Any, numbers: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Fill a fresh layer. Sets what a saved layer has and nothing else, whatever the file says."""
    if tensors["keys"] is None or tensors["values"] is None:
        raise ValueError("a layer without keys and values")
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    for name in _FULL if isinstance(layer, ManifoldLayer) else _SLIDING:
        value = numbers[name]
        if name == "metric_used":
            if not isinstance(value, str):
                raise ValueError(f"{name} {value!r}")
        elif not (isinstance(value, int) and value >= 0) and not (name == "_decode_budget" and value is None):
            raise ValueError(f"{name} {value!r}")
        setattr(layer, name, value)
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(layer, name, tensor)


def fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """What must agree for a cache to make sense in a model."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "key_value_heads": heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope": _rope(getattr(config, "rope_parameters", None) or {}),
        "vocab_size": config.vocab_size,
    }


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Type, base and factor of the rotation; some models have one a kind of layer."""
    kinds = {kind: own for kind, own in parameters.items() if isinstance(own, dict)} or {"": parameters}
    return {
        f"{kind} {name}".strip(): own[name]
        for kind, own in sorted(kinds.items())
        for name in _ROPE
        if own.get(name) is not None
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("manifoldkv", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise CacheFormatError(f"{path} is damaged or no safetensors file ({error}); save the cache again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CacheFormatError(f"{path} is a safetensors file, but not a cache saved by this version ({FORMAT})")
    if header.get("shapes") != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise CacheFormatError(f"{path}: the saved cache is incomplete (tensors are missing or cut); save it again")
    if header.pop("digest", None) != _digest(header, tensors):
        raise CacheFormatError(f"{path} is damaged (its contents don't match their checksum); save the cache again")
    return header, tensors


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Checksum of all that a file says: a flipped bit in a key would otherwise change answers without a word."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().flatten()
        digest.update(f"{name} {flat.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_fits(
    header: dict[str, Any], model: dict[str, Any], dtype: torch.dtype | str | None, path: str | Path
) -> None:
    saved = header.get("model")
    if not isinstance(saved, dict):
        raise CacheFormatError(f"{path}: the saved cache doesn't say which model it is of; save it again")
    wrong = [
        f"{name} {saved.get(name)} instead of {value}" for name, value in model.items() if saved.get(name) != value
    ]
    wanted = f"torch.{dtype}" if isinstance(dtype, str) else str(dtype)  # a config holds the name, once it was saved
    if dtype is not None and header.get("dtype") != wanted:
        wrong.append(f"dtype {header.get('dtype')} instead of {wanted}")
    if wrong:
        raise CacheFormatError(f"{path} was saved from another model: {'; '.join(wrong)}")
