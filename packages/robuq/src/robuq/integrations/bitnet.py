"""The layout of transformers' BitNet layers: two bits a weight, packed along the *output* dimension.

Byte (i, j) holds rows i, i + out/4, i + out/2, i + 3 out/4 of column j, from the low bits up. ``BitLinear`` divides by
``weight_scale``, so that is ``1 / alpha``; it knows one scale a tensor and no rotation, so only layers made with
``granularity="tensor"``, ``rotation="none"`` and ``rank=0`` give the same output there. Others carry what is missing
beside.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from icml26_shared.checkpoint import atomic_path
from robuq.linear import RobuQLinear
from robuq.packed import PackedLinear
from robuq.storage import describe
from robuq.surgery import quantised_layers


def pack_bitnet(codes: Tensor) -> Tensor:
    """T int8 [out, n] as uint8 [out/4, n] in BitNet's layout.

    Raises:
        ValueError: out is not a multiple of 4, which that layout cannot hold.
    """
    if codes.shape[0] % 4:
        raise ValueError(f"BitNet's layout needs a multiple of 4 outputs, got {codes.shape[0]}")
    four = (codes + 1).to(torch.uint8).reshape(4, -1, codes.shape[1])
    return four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6


def is_plain(layer: RobuQLinear | PackedLinear) -> bool:
    """Whether transformers' BitLinear computes what this layer does (but for its 8-bit activations)."""
    config = layer.config
    return config.granularity == "tensor" and config.rotation == "none" and not config.rank


def export_bitnet(model: nn.Module, path: str | Path) -> Path:
    """Write a safetensors file with ``NAME.weight`` (packed), ``NAME.weight_scale`` and ``NAME.bias`` of each layer.

    Layers that BitNet's module cannot compute also have ``NAME.alpha``, ``NAME.signs``, ``NAME.A``, ``NAME.B``; the
    header's ``robuq`` describes all layers, and ``plain`` lists those that it can.

    Raises:
        ValueError: nothing quantised, 4-bit weights, or outputs that are no multiple of 4.
    """
    layers = dict(quantised_layers(model))
    if not layers:
        raise ValueError("nothing in this model is quantised; call robuq.quantize(model, config) first")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        if not layer.ternary_weights:
            raise ValueError(f"{name} has 4-bit weights, which BitNet's layout cannot hold")
        packed = layer if isinstance(layer, PackedLinear) else PackedLinear.from_trained(layer)
        tensors[f"{name}.weight"] = pack_bitnet(packed.codes()).contiguous()
        mean = packed.alpha.mean().clamp(min=torch.finfo(torch.float32).tiny)
        tensors[f"{name}.weight_scale"] = (1 / mean).reshape(1)
        kept = ("bias",) if is_plain(layer) else ("bias", "alpha", "signs", "A", "B")
        for key in kept:
            tensor = getattr(packed, key)
            if tensor is not None:
                tensors[f"{name}.{key}"] = tensor.detach().contiguous()
    inside = tuple(f"{name}." for name in layers)
    for key, tensor in model.state_dict().items():
        if not key.startswith(inside):
            tensors[key] = tensor.detach().clone().contiguous()
    plain = [name for name, layer in layers.items() if is_plain(layer)]
    header = {"format": "pt", "robuq": json.dumps({**describe(model), "layout": "BitNet", "plain": plain})}
    path = Path(path)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata=header)
    return path
