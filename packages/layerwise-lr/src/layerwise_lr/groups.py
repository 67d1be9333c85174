"""Parameter groups: one for each matrix, the rest by whether weight decay applies."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from layerwise_lr.layers import Matrix, clean_name, matrices

OptimizerName = Literal["adamw", "muon"]


def param_groups(
    model: nn.Module,
    lr: float,
    optimizer: OptimizerName = "adamw",
    weight_decay: float = 0.1,
    decay_norm_bias: bool = False,
    *,
    muon_lr: float | None = None,
    lora: str = "merged",
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: one for each trainable matrix, then the other parameters.

    Args:
        model: whose trainable parameters are grouped; each is in exactly one group.
        lr: base rate.
        optimizer: ``"muon"`` marks the groups of 2-D matrices, but not embeddings and head, with ``use_muon``; they are
            for `layerwise_lr.muon.MuonAdamW`.
        weight_decay: of the matrices.
        decay_norm_bias: also of the other parameters (the paper decays everything).
        muon_lr: base rate of the matrices under Muon; default lr.
        lora: see `layerwise_lr.layers.matrices`.

    Returns:
        Dictionaries with ``params``, ``name``, ``lr``, ``weight_decay``, ``llr_ratio`` (1) and, for Muon, ``use_muon``.

    Raises:
        ValueError: a rate that is not positive, a negative weight decay, an unknown optimizer, no trainable parameter.
    """
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"unknown optimizer {optimizer!r}; choose from adamw, muon")
    if not lr > 0 or (muon_lr is not None and not muon_lr > 0):
        raise ValueError(f"rates must be positive, got lr = {lr}, muon_lr = {muon_lr}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    muon = optimizer == "muon"
    groups: list[dict[str, Any]] = []
    taken: set[int] = set()
    for layer in matrices(model, lora=lora):
        for name, parameter in layer.parameters.items():
            if parameter.requires_grad and id(parameter) not in taken:
                taken.add(id(parameter))
                under = muon and _muon_can(layer, parameter)
                rate = muon_lr if under and muon_lr is not None else lr
                groups.append(_group([parameter], name, rate, weight_decay, under if muon else None))
    rest = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
    decayed = [p for name, p in rest if decay_norm_bias or (p.dim() >= 2)]
    plain = [p for name, p in rest if not decay_norm_bias and p.dim() < 2]
    for parameters, name, decay in ((decayed, "other", weight_decay), (plain, "norms and biases", 0.0)):
        if parameters:
            groups.append(_group(parameters, name, lr, decay, False if muon else None))
    if not groups:
        raise ValueError(f"{type(model).__name__} has no trainable parameter")
    return groups


def _muon_can(layer: Matrix, parameter: nn.Parameter) -> bool:
    return layer.role == "matrix" and parameter.dim() == 2


def _group(parameters: list[nn.Parameter], name: str, lr: float, decay: float, muon: bool | None) -> dict[str, Any]:
    made = {"params": parameters, "name": clean_name(name), "lr": lr, "weight_decay": decay, "llr_ratio": 1.0}
    return made if muon is None else {**made, "use_muon": muon}
