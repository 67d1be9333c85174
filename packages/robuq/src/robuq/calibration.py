"""Choose the gain of the activation quantiser by what it does to the output on calibration data.

An MSE-optimal quantiser shrinks its input by ``1 - NMSE``. Undoing that helps some models and hurts others (normalised
after every block), so quantisation without training tries both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from robuq.sensitivity import Forward, _output
from robuq.surgery import quantised_layers


@torch.no_grad()
def choose_gain(
    model: nn.Module, batches: Sequence[Any], forward_fn: Forward, references: Sequence[torch.Tensor]
) -> tuple[bool, dict[str, float]]:
    """Set all layers to the gain whose outputs are nearer to the unquantised model's.

    Args:
        model: quantised.
        batches, forward_fn: as for `robuq.measure_sensitivity`.
        references: outputs of the unquantised model on the batches.

    Returns:
        Whether ``"unbiased"`` was chosen, and the mean squared error of both gains.

    Raises:
        ValueError: as many references as batches are needed, at least one.
    """
    if len(batches) == 0 or len(batches) != len(references):
        raise ValueError(f"got {len(batches)} batches and {len(references)} reference outputs; give one for each")
    training = model.training
    model.eval()
    errors: dict[str, float] = {}
    for unbiased in (False, True):
        for _, layer in quantised_layers(model):
            layer.unbiased = unbiased
        total = 0.0
        for batch, expected in zip(batches, references, strict=True):
            total += float((_output(forward_fn(model, batch)).double() - expected.double()).square().mean())
        errors["unbiased" if unbiased else "mse"] = total / len(batches)
    chosen = errors["unbiased"] < errors["mse"]
    for _, layer in quantised_layers(model):
        layer.unbiased = chosen
    model.train(training)
    return chosen, errors
