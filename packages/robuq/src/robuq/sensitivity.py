"""How much the output suffers from few bits in one layer: ``S[l, b] = mean ||f_{l,b} - f_ref||^2``.

``f_ref`` has all layers at the largest candidate, ``f_{l,b}`` differs in layer l alone (RobuQ, arXiv 2509.23582;
measured after a short training, because layers that look bad right after quantisation recover).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from icml26_shared.checkpoint import atomic_write_json
from icml26_shared.console import progress
from robuq.gaussian import check_bits
from robuq.surgery import quantised_layers

Metric = Literal["output_mse", "loss"] | Callable[[Any, Any, Any], Tensor | float]
Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Sensitivity:
    """``values[layer][bits]`` >= 0; 0 at the largest bits."""

    values: Mapping[str, Mapping[int, float]]
    bits: tuple[int, ...]
    metric: str = "output_mse"

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers in the model's order."""
        return tuple(self.values)

    def to_json(self) -> dict[str, Any]:
        """All fields; bits become text, as JSON's keys are."""
        values = {layer: {str(b): v for b, v in row.items()} for layer, row in self.values.items()}
        return {"values": values, "bits": list(self.bits), "metric": self.metric}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | str) -> Sensitivity:
        """What :meth:`to_json` gave, or its text.

        Raises:
            ValueError: not a sensitivity.
        """
        try:
            plain = json.loads(kept) if isinstance(kept, str) else kept
            bits = tuple(int(b) for b in plain["bits"])
            values = {layer: {b: float(row[str(b)]) for b in bits} for layer, row in plain["values"].items()}
            return cls(values, bits, str(plain.get("metric", "output_mse")))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no sensitivity ({type(error).__name__}: {error})") from None

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        atomic_write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text("utf-8"))


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module,
    batches: Sequence[Any],
    forward_fn: Forward,
    bits: Sequence[int] = (1, 2, 3, 4),
    metric: Metric = "output_mse",
) -> Sensitivity:
    """Measure S over the quantised layers that are not adaLN layers.

    The bits, the mode and the gradients of the model are left as they were.

    Args:
        model: with quantised layers.
        batches: calibration batches, fixed: the same noise in every pass.
        forward_fn: ``forward_fn(model, batch)`` gives the output as a tensor (the first of a tuple, or ``.logits`` or
            ``.sample`` of an object, will do), or with ``metric="loss"`` the loss as a scalar.
        bits: candidates; the largest is the reference, with S = 0.
        metric: ``"output_mse"``: mean over the batch of the squared distance of the outputs; ``"loss"``: the rise of
            the loss, at least 0; or ``metric(output, reference, batch)``, a number of at least 0.

    Returns:
        The sensitivity. It takes ``N (|bits| - 1) + 1`` passes over the batches.

    Raises:
        ValueError: no batches, no layers, fewer than two candidates, or an unknown metric.
    """
    if any(isinstance(b, str) for b in bits):
        raise ValueError(f"bits to allocate are whole numbers, got {tuple(bits)}")
    candidates = tuple(sorted({int(check_bits(b)) for b in bits}))
    layers = {name: layer for name, layer in quantised_layers(model) if not layer.is_ada}
    if len(candidates) < 2:
        raise ValueError(f"bits needs at least two candidates, got {tuple(bits)}")
    if not layers:
        raise ValueError("the model has no quantised layers to measure; call robuq.quantize first")
    if len(batches) == 0:
        raise ValueError("batches is empty; give at least one calibration batch")
    if not callable(metric) and metric not in ("output_mse", "loss"):
        raise ValueError(f"metric must be 'output_mse', 'loss' or a function, got {metric!r}")
    before, training = {name: layer.bits for name, layer in layers.items()}, model.training
    model.eval()
    try:
        _set(layers.values(), candidates[-1])
        reference = [_output(forward_fn(model, batch)) for batch in batches]
        values: dict[str, dict[int, float]] = {}
        with progress("sensitivity", len(layers) * (len(candidates) - 1)) as bar:
            for name, layer in layers.items():
                row = values[name] = {}
                for b in candidates[:-1]:
                    layer.bits = b
                    row[b] = _measure(model, batches, forward_fn, reference, metric)
                    bar.advance()
                layer.bits = candidates[-1]
                row[candidates[-1]] = 0.0
        return Sensitivity(values, candidates, metric if isinstance(metric, str) else "custom")
    finally:
        for name, layer in layers.items():
            layer.bits = before[name]
        model.train(training)


def _set(layers: Any, bits: int) -> None:
    for layer in layers:
        layer.bits = bits


def _measure(
    model: nn.Module, batches: Sequence[Any], forward_fn: Forward, reference: Sequence[Tensor], metric: Metric
) -> float:
    total, count = 0.0, 0
    for batch, expected in zip(batches, reference, strict=True):
        found = _output(forward_fn(model, batch))
        size = found.shape[0] if found.dim() else 1
        if callable(metric):
            total += float(metric(found, expected, batch)) * size
        elif metric == "loss":
            total += float(found.double().mean() - expected.double().mean()) * size
        else:
            total += float((found.double() - expected.double()).square().sum())
        count += size
    return max(total / max(count, 1), 0.0)


def _output(result: Any) -> Tensor:
    for name in ("logits", "sample", "last_hidden_state"):
        if getattr(result, name, None) is not None:
            result = getattr(result, name)
    if isinstance(result, tuple | list):
        result = result[0]
    if not isinstance(result, Tensor):
        raise TypeError(f"forward_fn must give a tensor, got {type(result).__name__}")
    return result.detach()
