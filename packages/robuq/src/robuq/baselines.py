"""What RobuQ is compared with, as settings of the same machinery, and TerDiT's change to adaLN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robuq.config import RobuQConfig
from robuq.quantizer import ActBits

BASELINES = ("bitnet", "minmax", "minmax+branch", "minmax+branch+hadamard", "terdit", "robuq")


def baseline(name: str, act_bits: ActBits = 2, *, rank: int = 8, dit: bool = True) -> RobuQConfig:
    """Settings of a method by name.

    * ``"bitnet"``: absmean over the tensor, absmax activations, no rotation, no branch (BitNet b1.58);
    * ``"minmax"``: per-channel ternary weights and per-token min-max activations: the paper's first baseline;
    * ``"minmax+branch"``: with the low-rank branch; ``"minmax+branch+hadamard"``: with the plain Hadamard too;
    * ``"terdit"``: ternary weights only, no rotation, no branch (apply :func:`add_adaln_norms` to the model as well);
    * ``"robuq"``: all of it.

    Args:
        name: one of :data:`BASELINES`.
        act_bits: activation bits (``"terdit"`` leaves activations alone).
        rank: rank of the branch where there is one.
        dit: start from ``RobuQConfig.for_dit()`` without 8-bit attention, else from the defaults.

    Raises:
        ValueError: an unknown name.
    """
    base = RobuQConfig.for_dit(attn_bits=None) if dit else RobuQConfig()
    plain: dict[str, Any] = {"rotation": "none", "signs": "none", "rank": 0, "act_bits": act_bits}
    settings: dict[str, dict[str, Any]] = {
        "bitnet": {**plain, "quantizer": "absmax", "granularity": "tensor"},
        "minmax": {**plain, "quantizer": "minmax"},
        "minmax+branch": {**plain, "quantizer": "minmax", "rank": rank},
        "minmax+branch+hadamard": {"quantizer": "minmax", "signs": "none", "rank": rank, "act_bits": act_bits},
        "terdit": {**plain, "act_bits": 16, "ada_bits": 16},
        "robuq": {"rank": rank, "act_bits": act_bits},
    }
    if name not in settings:
        raise ValueError(f"baseline must be one of {', '.join(map(repr, BASELINES))}, got {name!r}")
    return base.replace(**settings[name])


class NormedModulation(nn.Module):
    """An adaLN layer followed by an RMSNorm with gain (TerDiT, arXiv 2405.14854)."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.RMSNorm(width, eps=1e-6)

    def forward(self, c: Tensor) -> Tensor:
        """[b, d] to [b, width]."""
        return self.norm(self.layer(c))  # type: ignore[no-any-return]


@torch.no_grad()
def add_adaln_norms(model: nn.Module, calibration: Tensor) -> nn.Module:
    """Put an RMSNorm after every ``adaLN_modulation`` of a DiT's blocks, in place.

    Args:
        model: with ``blocks`` that have ``adaLN_modulation``, a sequence that ends with a linear layer.
        calibration: conditions [b, d]; each gain starts at the root mean square of what the layer gives for them, so
            that outputs keep their size.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ValueError("the model has no blocks with adaLN_modulation")
    for block in blocks:
        modulation = block.adaLN_modulation
        size = modulation(calibration).square().mean().sqrt()
        wrapped = NormedModulation(modulation, modulation[-1].out_features)
        wrapped.norm.weight.fill_(float(size) if float(size) > 0 else 1.0)
        block.adaLN_modulation = wrapped
    return model
