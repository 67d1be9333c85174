"""Muon for matrices and AdamW for the rest, as one optimizer whose groups are the union.

Schedulers, controllers and checkpoints see one list of groups and one state, so nothing is dropped or split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

_MUON = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}


class MuonAdamW(Optimizer):
    """Torch's `torch.optim.Muon` for the groups with ``use_muon``, torch's AdamW for the others.

    Muon: Nesterov momentum 0.95, five Newton-Schulz steps (3.4445, -4.7750, 2.0315), the update scaled by
    ``max(1, rows / columns)^0.5``.

    Args:
        params: groups, as `layerwise_lr.groups.param_groups(model, lr, "muon")` makes them.
        lr, weight_decay: defaults of the groups.
        betas, eps: of AdamW.
        momentum, ns_steps: of Muon.

    Raises:
        ValueError: no group says ``use_muon``, or one with it has a parameter without two dimensions.
        ImportError: a torch older than 2.9 has no Muon.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"torch {torch.__version__} has no Muon: pip install 'torch>=2.9'")
        groups = [{**group, "params": list(group["params"])} for group in params]
        if not any(group.get("use_muon") for group in groups):
            raise ValueError("no group has use_muon=True; make them with param_groups(model, lr, optimizer='muon')")
        for group in groups:
            bad = [tuple(p.shape) for p in group["params"] if p.dim() != 2] if group.get("use_muon") else []
            if bad:
                raise ValueError(f"Muon takes matrices, but the group {group.get('name', '?')!r} has shapes {bad}")
        muon = {**_MUON, "momentum": momentum, "ns_steps": ns_steps, "adjust_lr_fn": "original"}
        own = {"lr": lr, "weight_decay": weight_decay}
        chosen = [group for group in groups if group.get("use_muon")]
        others = [group for group in groups if not group.get("use_muon")]
        self._muon = torch.optim.Muon([{**own, **muon, **group} for group in chosen], lr=lr)
        self._adamw = AdamW([{**own, **group} for group in others], lr=lr, betas=betas, eps=eps) if others else None
        inner = [*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])]
        by_first = {id(group["params"][0]): group for group in inner}
        super().__init__([by_first[id(group["params"][0])] for group in groups], own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner, muon in ((self._muon, True), (self._adamw, False)):
            if inner is not None:
                inner.param_groups = [g for g in self.param_groups if bool(g.get("use_muon")) is muon]
                inner.state = self.state  # one state, so that saving and loading have it all
                inner.step()
        return loss
