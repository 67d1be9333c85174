"""A health report: which layers' tokens are not normal after the rotation, what quantising them costs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robuq.accounting import layer_bytes
from robuq.gaussian import gaussian_nmse
from robuq.kernels.rotate import rotate
from robuq.sensitivity import Forward
from robuq.surgery import quantised_layers

_TOKENS = 2048
NORMAL = (2.3, 3.7)


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name: the layer.
        bits: its activation bits.
        size: bytes when packed.
        nmse: error of its quantised tokens over their energy; None without data.
        expected: what a Gaussian would give.
        kurtosis_before, kurtosis_after: median over tokens, before and after the rotation; 3 is normal.
        dc_share: share of the tokens' energy that is their mean: what a plain Hadamard puts into one coefficient.
        remark: what is wrong, or empty.
    """

    name: str
    bits: Any
    size: int
    nmse: float | None = None
    expected: float | None = None
    kurtosis_before: float | None = None
    kurtosis_after: float | None = None
    dc_share: float | None = None
    remark: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@torch.no_grad()
def inspect_layers(
    model: nn.Module, batches: Sequence[Any] = (), forward_fn: Forward | None = None
) -> list[LayerReport]:
    """Report every quantised layer, with statistics of its tokens where batches are given."""
    layers = dict(quantised_layers(model))
    seen: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def keep(module: nn.Module, args: Any, name: str = name) -> None:
            tokens = args[0].reshape(-1, args[0].shape[-1])[:_TOKENS].float()
            seen[name] = torch.cat([seen[name], tokens])[:_TOKENS] if name in seen else tokens.clone()

        handles.append(layer.register_forward_pre_hook(keep))
    try:
        for batch in batches:
            (forward_fn or (lambda m, b: m(b)))(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    reports = []
    for name, layer in layers.items():
        if name not in seen:
            reports.append(LayerReport(name, layer.bits, layer_bytes(layer)))
            continue
        x = seen[name]
        y = rotate(x, layer.recipe, layer.sign_vector())
        quantizer = layer.quantizer
        error = expected = None
        if quantizer is not None:
            error = float((quantizer.values(y) / quantizer.gain - y).square().sum() / y.square().sum().clamp(min=1e-30))
            expected = gaussian_nmse(layer.bits) if quantizer.kind == "gauss_uniform" else None  # type: ignore[arg-type]
        dc = float(x.mean(1).square().sum() * x.shape[1] / x.square().sum().clamp(min=1e-30))
        after = _kurtosis(y)
        remark = _remark(after, dc, layer.signs is not None, layer.recipe.blocks > 1)
        reports.append(
            LayerReport(name, layer.bits, layer_bytes(layer), error, expected, _kurtosis(x), after, dc, remark)
        )
    return reports


def _kurtosis(x: Tensor) -> float:
    centred = x.double() - x.double().mean(1, keepdim=True)
    variance = centred.square().mean(1)
    return float((centred.pow(4).mean(1) / variance.square().clamp(min=1e-300)).median())


def _remark(kurtosis: float, dc: float, signed: bool, blocks: bool) -> str:
    if NORMAL[0] <= kurtosis <= NORMAL[1]:
        return ""
    if kurtosis > NORMAL[1] and dc > 0.05 and not signed:
        return "tokens have a mean, which the plain Hadamard puts into one coefficient: use signs='random'"
    if blocks:
        return "the width has no full transform: blocks mix only part of each token; use fallback='pad'"
    return "heavier tails than normal after the rotation" if kurtosis > NORMAL[1] else "flatter than normal"
