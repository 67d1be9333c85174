"""GGUF files with llama.cpp's ternary blocks, TQ2_0 and TQ1_0, of packed layers.

Rows are padded with zeros to multiples of 256. Weights are those of the rotated basis: a reader multiplies them with
rotated tokens; signs, scales, branch and the description are in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from icml26_shared.checkpoint import atomic_path
from icml26_shared.errors import require
from robuq.errors import RobuqFormatError
from robuq.linear import RobuQLinear
from robuq.packed import PackedLinear
from robuq.storage import describe
from robuq.surgery import quantised_layers

FORMATS = {"tq2_0": "TQ2_0", "tq1_0": "TQ1_0"}
_BLOCK = 256


def export_gguf(model: nn.Module, path: str | Path, kind: str = "tq2_0") -> Path:
    """Write a quantised model as GGUF.

    Args:
        model: quantised; trainable layers are packed on the way.
        path: the file.
        kind: ``"tq2_0"`` or ``"tq1_0"``.

    Raises:
        ValueError: another kind, nothing quantised, or layers with 4-bit weights.
    """
    if kind not in FORMATS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, FORMATS))}, got {kind!r}")
    gguf = require("gguf", "gguf")
    layers = dict(quantised_layers(model))
    if not layers:
        raise ValueError("nothing in this model is quantised; call robuq.quantize(model, config) first")
    for name, layer in layers.items():
        if not layer.ternary_weights:
            raise ValueError(f"{name} has 4-bit weights, which {FORMATS[kind]} cannot hold")
    path = Path(path)
    with atomic_path(path) as temporary:
        writer = gguf.GGUFWriter(temporary, "robuq")
        writer.add_string("robuq.description", json.dumps(describe(model)))
        for name, layer in layers.items():
            _add_layer(writer, gguf, name, layer, kind)
        inside = tuple(f"{name}." for name in layers)
        for key, tensor in model.state_dict().items():
            if not key.startswith(inside):
                writer.add_tensor(key, _array(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _add_layer(writer: Any, gguf: Any, name: str, layer: RobuQLinear | PackedLinear, kind: str) -> None:
    packed = layer if isinstance(layer, PackedLinear) else PackedLinear.from_trained(layer)
    codes = packed.codes()
    values = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _BLOCK)).float()
    # One block's scale is the row's, except in a block of zeros; float16 there, float32 in NAME.alpha.
    scaled = values * packed.alpha[:, None].clamp(min=torch.finfo(torch.float16).tiny)
    dtype = getattr(gguf.GGMLQuantizationType, FORMATS[kind])
    writer.add_tensor(f"{name}.weight", gguf.quants.quantize(scaled.numpy(), dtype), raw_dtype=dtype)
    for key, tensor in packed.state_dict().items():
        if key not in ("qweight", "rowsum"):
            writer.add_tensor(f"{name}.{key}", _array(tensor))


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.uint8:
        return tensor.view(torch.int8).numpy()
    if tensor.dtype in (torch.bfloat16, torch.float64):
        tensor = tensor.float()
    return np.atleast_1d(tensor.contiguous().numpy())


def read_gguf_codes(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """``T`` int8 [out, n'] and ``alpha`` float32 [out] of every layer of a file that :func:`export_gguf` wrote.

    Raises:
        RobuqFormatError: the file holds no description of robuq's.
    """
    gguf = require("gguf", "gguf")
    reader = gguf.GGUFReader(path)
    field = reader.get_field("robuq.description")
    if field is None:
        raise RobuqFormatError(f"{path} has no robuq.description")
    described = json.loads(field.contents())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for name, told in described["layers"].items():
        if f"{name}.weight" not in tensors or f"{name}.alpha" not in tensors:
            raise RobuqFormatError(f"{path}: {name}.weight or {name}.alpha is missing")
        weight = tensors[f"{name}.weight"]
        values = gguf.quants.dequantize(weight.data, weight.tensor_type)
        codes = np.sign(values).astype(np.int8)[:, : told["rotation"]["padded"]]
        found[name] = codes, np.array(tensors[f"{name}.alpha"].data, dtype=np.float32)
    return found
