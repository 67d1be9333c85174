"""Ternary weights and 1 to 4 bit activations for transformers that still generate (RobuQ, arXiv 2509.23582)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robuq.allocation import Plan as Plan
    from robuq.allocation import allocate_bits as allocate_bits
    from robuq.allocation import apply_plan as apply_plan
    from robuq.config import RobuQConfig as RobuQConfig
    from robuq.errors import RobuqFormatError as RobuqFormatError
    from robuq.gaussian import gaussian_step as gaussian_step
    from robuq.hadamard import hadamard as hadamard
    from robuq.integrations.lightning import RobuQLightningCallback as RobuQLightningCallback
    from robuq.integrations.pretrained import from_pretrained as from_pretrained
    from robuq.integrations.pretrained import load_pretrained as load_pretrained
    from robuq.integrations.transformers import RobuQTrainerCallback as RobuQTrainerCallback
    from robuq.linear import RobuQLinear as RobuQLinear
    from robuq.packed import PackedLinear as PackedLinear
    from robuq.quantizer import robust_quantize as robust_quantize
    from robuq.sensitivity import Sensitivity as Sensitivity
    from robuq.sensitivity import measure_sensitivity as measure_sensitivity
    from robuq.storage import save_model as save_pretrained
    from robuq.surgery import dequantize as dequantize
    from robuq.surgery import freeze as freeze
    from robuq.surgery import quantize as quantize

__version__ = "0.1.0"

# What a reader meets first; the rest of the table goes with them.
__all__ = [
    "RobuQConfig",
    "allocate_bits",
    "freeze",
    "from_pretrained",
    "load_pretrained",
    "measure_sensitivity",
    "quantize",
    "save_pretrained",
]
_HOME = {
    "RobuQConfig": "robuq.config",
    "quantize": "robuq.surgery",
    "freeze": "robuq.surgery",
    "dequantize": "robuq.surgery",
    "RobuQLinear": "robuq.linear",
    "PackedLinear": "robuq.packed",
    "measure_sensitivity": "robuq.sensitivity",
    "Sensitivity": "robuq.sensitivity",
    "allocate_bits": "robuq.allocation",
    "apply_plan": "robuq.allocation",
    "Plan": "robuq.allocation",
    "save_pretrained": "robuq.storage",
    "load_pretrained": "robuq.integrations.pretrained",
    "from_pretrained": "robuq.integrations.pretrained",
    "robust_quantize": "robuq.quantizer",
    "hadamard": "robuq.hadamard",
    "gaussian_step": "robuq.gaussian",
    "RobuQTrainerCallback": "robuq.integrations.transformers",
    "RobuQLightningCallback": "robuq.integrations.lightning",
    "RobuqFormatError": "robuq.errors",
}
_ATTRIBUTE = {"save_pretrained": "save_model"}


def __getattr__(name: str) -> object:
    # Public names load on first use, so that `import robuq` needs neither torch nor a host library.
    if name not in _HOME:
        raise AttributeError(f"module 'robuq' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), _ATTRIBUTE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
