"""What quantisation saves, counted from shapes: bytes on disk and operations."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from robuq.config import RobuQConfig
from robuq.linear import RobuQLinear
from robuq.packed import PackedLinear
from robuq.storage import save_model

Shape = tuple[int, int, bool]


def dit_xl2() -> dict[str, tuple[Shape, int]]:
    """Linear layers of DiT-XL/2 by type: (in, out, bias) and how many there are."""
    d = 1152
    return {
        "attn.qkv": ((d, 3 * d, True), 28),
        "attn.proj": ((d, d, True), 28),
        "mlp.fc1": ((d, 4 * d, True), 28),
        "mlp.fc2": ((4 * d, d, True), 28),
        "adaLN_modulation.1": ((d, 6 * d, True), 28),
    }


def dit_xl2_other_parameters() -> int:
    """Parameters of DiT-XL/2 that stay: embeddings of patches, steps and labels, positions, final layer."""
    d = 1152
    patches, steps, labels = 4 * 4 * d + d, 256 * d + d + d * d + d, 1001 * d
    final = d * 2 * d + 2 * d + d * 32 + 32
    return patches + steps + labels + 256 * d + final


def packed_size(layers: Mapping[str, tuple[Shape, int]], rank: int, scratch: str | Path) -> dict[str, float]:
    """Bytes of a model with such layers: one of each type is packed and saved, and its file measured.

    Args:
        layers: as :func:`dit_xl2` gives them.
        rank: of the low-rank branch.
        scratch: folder for the files, which are removed.

    Returns:
        ``"packed"``: all layers packed, the rest in float16; ``"float32"``: everything in float32.
    """
    packed = float32 = 0.0
    config = RobuQConfig(rank=rank)
    Path(scratch).mkdir(parents=True, exist_ok=True)
    for name, ((n, out, bias), count) in layers.items():
        layer = PackedLinear(n, out, bias, config, name, dtype=torch.float16)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            save_model(nn.ModuleDict({"layer": layer}), folder)
            packed += count * (Path(folder) / "model.safetensors").stat().st_size
        float32 += count * 4 * (n * out + bias * out)
    others = dit_xl2_other_parameters()
    return {"packed": packed + 2 * others, "float32": float32 + 4 * others}


# GFLOP-equivalents of DiT-XL/2 at 256 px by kind of product, as published.
PUBLISHED_GFLOPS = {"weights x activations": 6.92, "attention": 1.01, "adaLN": 0.20}


def operations(tokens: int = 256, depth: int = 28, width: int = 1152) -> dict[str, float]:
    """Multiply-accumulates of one forward pass of DiT-XL/2, in 1e9: linear layers, attention, adaLN, the rest."""
    linear = tokens * depth * 12 * width * width
    attention = 2 * tokens * tokens * depth * width
    ada = depth * 6 * width * width
    rest = tokens * (16 * width + 32 * width) + 2 * width * width + 256 * width + width * width
    parts = {"weights x activations": linear, "attention": attention, "adaLN": ada, "rest": rest}
    return {name: value / 1e9 for name, value in parts.items()}


def equivalents(act_bits: float = 2.0, attention_bits: float = 8.0, ada_bits: float = 4.0) -> dict[str, float]:
    """Floating point equivalents: ternary weights need no multiplication, so a product counts ``activation bits /
    32``.
    """
    macs = operations()
    return {
        "weights x activations": macs["weights x activations"] * act_bits / 32,
        "attention": macs["attention"] * attention_bits / 32,
        "adaLN": macs["adaLN"] * ada_bits / 32,
        "rest": macs["rest"],
    }


def speed_up_in_theory(act_bits: float = 2.0) -> float:
    """Operations in full precision over equivalents."""
    return sum(operations().values()) / sum(equivalents(act_bits).values())


def layer_bytes(layer: RobuQLinear | PackedLinear) -> int:
    """Bytes of a layer when packed."""
    n, out = layer.recipe.padded, layer.out_features
    weights = out * ((n + 3) // 4 if layer.ternary_weights else (n + 1) // 2)
    signs = 0 if layer.signs is None else layer.signs.numel()
    branch = 2 * layer.config.rank * (n + out)
    bias = 0 if layer.bias is None else layer.bias.numel() * layer.bias.element_size()
    return weights + 8 * out + signs + branch + bias
