"""Nested states in one safetensors file; public names are in :mod:`icml26_shared.checkpoint`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from icml26_shared._files import atomic_path

_FORMAT = "icml26-state"
_VERSION = "1"
_TAG = "__state__"


class CheckpointError(ValueError):
    """The file is not a saved state, or it is damaged."""


def save_state(path: str | Path, state: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Save a nested state atomically in one safetensors file.

    The state may hold dicts (keys: str, int, float, bool or None, as in an optimizer's ``state_dict()``), lists,
    tuples, torch tensors, numpy arrays, numbers (NaN and infinities too), strings, booleans and None. Tensors are
    stored as they are in dtype and shape, dense and detached, without their device; everything else goes, as JSON,
    into the metadata of the same file. Nothing is pickled.

    Args:
        path: file to write, e.g. ``out / "training.safetensors"``. An older file stays until the new one is whole.
        state: what to save.
        metadata: further text to keep in the file's header; read by any safetensors reader.

    Raises:
        TypeError: a value, a key or a kind of tensor (sparse, quantized) that cannot be stored; says where it is.
    """
    tensors: dict[str, Any] = {}
    tree = _encode(state, "state", tensors)
    header = {**{str(k): str(v) for k, v in (metadata or {}).items()}}
    header |= {"format": _FORMAT, "version": _VERSION, "tree": json.dumps(tree, allow_nan=False)}
    with atomic_path(path) as temporary:
        if any(not isinstance(tensor, np.ndarray) for tensor in tensors.values()):
            import torch
            from safetensors.torch import save_file

            mixed = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in tensors.items()}
            save_file(mixed, temporary, metadata=header)
        else:
            from safetensors.numpy import save_file as save_arrays

            save_arrays(tensors, temporary, metadata=header)


def load_state(path: str | Path, *, device: Any = "cpu") -> Any:
    """Load what :func:`save_state` wrote: the same structure, keys, dtypes and values.

    Args:
        path: the file.
        device: where torch tensors go. Numpy arrays stay numpy arrays.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the file is damaged or was written by something else.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no saved state at {str(path)!r}")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or is not a safetensors file ({error})") from None
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise CheckpointError(f"{path} was not written by save_state (format {header.get('format')!r})")
    try:
        tree = json.loads(header["tree"])
        return _decode(tree, _Reader(path, device))
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


class _Reader:
    """Tensors of one file by name, as torch tensors or numpy arrays."""

    def __init__(self, path: Path, device: Any) -> None:
        self.path, self.device = path, device
        self._open: dict[str, Any] = {}

    def __call__(self, name: str, kind: str) -> Any:
        from safetensors import safe_open

        if kind not in ("torch", "numpy"):
            raise ValueError(f"unknown kind of tensor {kind!r}")
        if kind not in self._open:
            options = {"device": str(self.device)} if kind == "torch" else {}
            self._open[kind] = safe_open(self.path, framework={"torch": "pt", "numpy": "numpy"}[kind], **options)
        return self._open[kind].get_tensor(name)


def _encode(value: Any, where: str, tensors: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.ndarray):
        return {_TAG: "numpy", "name": _keep(np.ascontiguousarray(value).reshape(value.shape), where, tensors)}
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where, tensors)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {_TAG: "torch", "name": _keep(_dense(value, where), where, tensors)}
    raise TypeError(
        f"{where} is a {type(value).__name__}; a state holds dicts, lists, tuples, tensors, arrays, numbers, "
        "strings, booleans and None"
    )


def _encode_dict(value: dict[Any, Any], where: str, tensors: dict[str, Any]) -> Any:
    pairs = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (str, bool, int, float))):
            raise TypeError(f"{where} has a key of type {type(key).__name__}; keys are str, int, float, bool or None")
        pairs.append([_encode(key, where, tensors), _encode(item, f"{where}[{key!r}]", tensors)])
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return dict(pairs)
    return {_TAG: "dict", "items": pairs}


def _dense(tensor: Any, where: str) -> Any:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a sparse or quantized tensor; store its parts (indices, values) as dense tensors")
    # clone: safetensors refuses tensors that share memory, as tied weights and views do
    return tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


def _keep(tensor: Any, where: str, tensors: dict[str, Any]) -> str:
    name = f"{len(tensors)}:{where}"
    tensors[name] = tensor
    return name


def _decode(node: Any, read: _Reader) -> Any:
    if isinstance(node, list):
        return [_decode(item, read) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(_TAG)
    if kind is None:
        return {key: _decode(item, read) for key, item in node.items()}
    if kind == "tuple":
        return tuple(_decode(item, read) for item in node["items"])
    if kind == "dict":
        return {_decode(key, read): _decode(item, read) for key, item in node["items"]}
    if kind == "float":
        return float(node["value"])
    return read(node["name"], kind)
