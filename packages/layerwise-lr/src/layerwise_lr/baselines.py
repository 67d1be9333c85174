"""What the paper compares with: LARS, LAMB, rates by block type, and controls that use LLR's ratios without their
information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise_lr.controller import LayerwiseLR
from layerwise_lr.layers import clean_name

# Multiples of the norm layers' rate (Wang et al., The Sharpness Disparity Principle in Transformers, 2025).
SHARPNESS_RATIOS = {"embedding": 10.0, "qk": 8.0, "ffn": 6.0, "vo": 4.0, "norm": 1.0}
_BLOCK_TYPES = {
    "qk": ("q_proj", "k_proj", "query", "key", "wq", "wk", "q", "k"),
    "vo": ("v_proj", "o_proj", "value", "wv", "wo", "out_proj", "v", "o"),
}


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017).

    ``v = mu v + g + wd w``, ``w = w - lr ||w|| / (||v|| + 1e-6) v``; where ``||w||`` is zero the factor is 1.

    Args:
        params: parameters or groups.
        lr: rate.
        momentum: mu.
        weight_decay: wd.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step."""
        loss = _closed(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                v = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                v.mul_(group["momentum"]).add_(p.grad + group["weight_decay"] * p)
                norm = p.norm()
                trust = torch.where(norm > 0, norm / (v.norm() + 1e-6), 1.0)
                p.sub_(float(group["lr"]) * trust * v)
        return loss


class LAMB(Optimizer):
    """Layer-wise adaptation for Adam (You et al., 2020).

    ``u = m_hat / (sqrt(v_hat) + eps) + wd w``, ``w = w - lr ||w|| / ||u|| u``; the factor is 1 where a norm is zero.

    Args:
        params: parameters or groups.
        lr: rate.
        betas, eps: of Adam.
        weight_decay: wd.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step."""
        loss = _closed(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = _adam_direction(p, self.state[p], group) + group["weight_decay"] * p
                    norm, length = p.norm(), update.norm()
                    trust = torch.where((norm > 0) & (length > 0), norm / length.clamp(min=1e-30), 1.0)
                    p.sub_(float(group["lr"]) * trust * update)
        return loss


def _adam_direction(p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
    first, second = group["betas"]
    m = state.setdefault("exp_avg", torch.zeros_like(p)).mul_(first).add_(p.grad, alpha=1 - first)
    v = state.setdefault("exp_avg_sq", torch.zeros_like(p)).mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
    state["step"] = step = state.get("step", 0) + 1
    corrected: Tensor = (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + group["eps"])
    return corrected


def _closed(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


class BlockwiseSharpnessLR:
    """Fixed ratios by type of block: embedding 10, query and key 8, feed-forward 6, value and output 4, the rest 1.

    Multiplies the scheduler's rates as `LayerwiseLR` does; the base rate is the norm layers'.

    Args:
        optimizer, model, scheduler: as for `LayerwiseLR`.
        ratios: others than the published ones, for any of ``embedding``, ``qk``, ``ffn``, ``vo``.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any = None, ratios: Mapping[str, float] | None = None
    ) -> None:
        unknown = sorted(set(ratios or {}) - set(SHARPNESS_RATIOS))
        if unknown:
            raise ValueError(f"unknown block types {', '.join(unknown)}; choose from {', '.join(SHARPNESS_RATIOS)}")
        chosen = {**SHARPNESS_RATIOS, **(ratios or {})}
        self._controller = LayerwiseLR(
            optimizer, model, scheduler, interval=1, ramp=0, active_fraction=1.0, total_steps=1,
            remap=lambda targets: {layer.name: chosen[block_type(layer.name, layer.role)] for layer in self._layers},
        )  # fmt: skip
        self._layers = self._controller.layers

    @property
    def ratios(self) -> dict[str, float]:
        """Present ratio of each matrix."""
        return self._controller.ratios

    def step(self) -> None:
        """After the scheduler's step."""
        self._controller.step()

    def state_dict(self) -> dict[str, Any]:
        """See `LayerwiseLR.state_dict`."""
        return self._controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LayerwiseLR.load_state_dict`."""
        self._controller.load_state_dict(state)


def block_type(name: str, role: str = "matrix") -> str:
    """``"embedding"`` (and head), ``"qk"``, ``"vo"`` or ``"ffn"``, by a matrix's name."""
    if role != "matrix":
        return "embedding"
    last = clean_name(name).rpartition(".")[2]
    return next((kind for kind, names in _BLOCK_TYPES.items() if last in names), "ffn")


def permuted(seed: int) -> Callable[[dict[str, float]], dict[str, float]]:
    """For ``remap``: LLR's ratios in an order drawn once, so the distribution stays and the information goes."""
    order: dict[int, np.ndarray] = {}

    def remap(targets: dict[str, float]) -> dict[str, float]:
        if len(targets) not in order:
            order[len(targets)] = np.random.default_rng(seed).permutation(len(targets))
        values = [targets[name] for name in sorted(targets)]
        return {name: values[i] for name, i in zip(sorted(targets), order[len(targets)], strict=True)}

    return remap


def mean_ratio(targets: dict[str, float]) -> dict[str, float]:
    """For ``remap``: LLR's mean ratio for every matrix."""
    mean = sum(targets.values()) / len(targets)
    return dict.fromkeys(targets, mean)
