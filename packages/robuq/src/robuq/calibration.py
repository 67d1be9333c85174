"""Choose the gain of the activation quantiser by what it does to the output on calibration data.

An MSE-optimal quantiser shrinks its input by ``1 - NMSE``. Undoing that helps some models and hurts others (normalised
after every block), so quantisation without training tries both: ``gain="auto"`` with calibration data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from robuq.sensitivity import Forward, _output
from robuq.surgery import quantised_layers


@torch.no_grad()
def choose_gain(
    model: nn.Module, batches: Sequence[Any], forward_fn: Forward, references: Sequence[torch.Tensor] | None = None
) -> tuple[bool, dict[str, float]]:
    """Set all layers to the gain whose outputs are nearer to the references.

    Args:
        model: quantised.
        batches, forward_fn: as for `robuq.measure_sensitivity`.
        references: outputs of the unquantised model on the batches. None: this model's own with unquantised
            activations, for where the unquantised model is nowhere in memory.

    Returns:
        Whether ``"unbiased"`` was chosen, and the mean squared error of both gains.

    Raises:
        ValueError: no batches, or not as many references.
    """
    if references is None:
        references = unquantised_activations(model, batches, forward_fn)
    if len(batches) == 0 or len(batches) != len(references):
        raise ValueError(f"got {len(batches)} batches and {len(references)} reference outputs; give one for each")
    training = model.training
    model.eval()
    errors: dict[str, float] = {}
    for unbiased in (False, True):
        _set_gain(model, unbiased)
        total = 0.0
        for found, expected in zip(outputs(model, batches, forward_fn), references, strict=True):
            total += float((found.double() - expected.double()).square().mean())
        errors["unbiased" if unbiased else "mse"] = total / len(batches)
    chosen = errors["unbiased"] < errors["mse"]
    _set_gain(model, chosen)
    model.train(training)
    return chosen, errors


def _set_gain(model: nn.Module, unbiased: bool) -> None:
    for _, layer in quantised_layers(model):
        layer.unbiased = unbiased


@torch.no_grad()
def outputs(model: nn.Module, batches: Sequence[Any], forward_fn: Forward) -> list[torch.Tensor]:
    """What the model gives for each batch, in eval mode."""
    training = model.training
    model.eval()
    found = [_output(forward_fn(model, batch)) for batch in batches]
    model.train(training)
    return found


def unquantised_activations(model: nn.Module, batches: Sequence[Any], forward_fn: Forward) -> list[torch.Tensor]:
    """:func:`outputs` with all layers at 16 bits; their bits are put back."""
    layers = [layer for _, layer in quantised_layers(model)]
    before = [layer.bits for layer in layers]
    try:
        for layer in layers:
            layer.bits = 16
        return outputs(model, batches, forward_fn)
    finally:
        for layer, bits in zip(layers, before, strict=True):
            layer.bits = bits


def gain_left_at_mse(stacklevel: int) -> None:
    """Warn that ``gain="auto"`` had nothing to go by."""
    warnings.warn(
        'gain="auto" is decided on calibration data and there is none, so it stays at "mse"; give batches and '
        'forward_fn, or set gain to "mse" or "unbiased"',
        stacklevel=stacklevel + 1,
    )
