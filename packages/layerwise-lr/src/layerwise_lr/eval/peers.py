"""Peers: WeightWatcher on the same model, and a float64 SVD."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import torch
from torch import nn

from icml26_shared.console import progress
from icml26_shared.errors import require
from layerwise_lr.layers import matrices
from layerwise_lr.measurement import Measure
from layerwise_lr.tail import fit_tail


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct, float32."""
    from icml26_shared import models

    model: nn.Module = models.load("smollm2", dtype="float32")[0]
    return model


def weightwatcher_alphas(model: nn.Module) -> dict[str, float]:
    """Exponent of each layer by WeightWatcher with its default settings, plots off, log silenced."""
    module = require("weightwatcher", "layerwise-lr[claims]")
    logging.getLogger("weightwatcher").setLevel(logging.ERROR)
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        table: Any = module.WeightWatcher(model=model).analyze(plot=False)
    return dict(zip(table["longname"], map(float, table["alpha"]), strict=True))


def smollm2_differences() -> dict[str, list[float]]:
    """Largest and all differences of alpha over SmolLM2's matrices."""
    model = smollm2()
    peer = weightwatcher_alphas(model)
    median, gof = Measure(), Measure(fit="gof")
    by_svd, by_peer = [], []
    layers = [layer for layer in matrices(model) if layer.role == "matrix"]
    with progress("SmolLM2 against its peers", len(layers)) as bar:
        for layer in layers:
            weight = layer.read()
            exact = fit_tail(torch.linalg.svdvals(weight.double()).square()).alpha
            by_svd.append(abs(median(layer.name, weight).alpha - exact))
            by_peer.append(abs(gof(layer.name, weight).alpha - peer[layer.name]))
            bar.advance()
    return {"median against float64 SVD": by_svd, "gof against WeightWatcher": by_peer}
