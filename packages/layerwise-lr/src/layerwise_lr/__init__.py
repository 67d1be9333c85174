"""A learning rate for each weight matrix, from how heavy the tail of its eigenvalue spectrum is (LLR).

Names load when first used, so importing the package brings neither torch nor a host library in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerwise_lr.baselines import LAMB as LAMB
    from layerwise_lr.baselines import LARS as LARS
    from layerwise_lr.baselines import BlockwiseSharpnessLR as BlockwiseSharpnessLR
    from layerwise_lr.config import LLRConfig as LLRConfig
    from layerwise_lr.controller import LayerwiseLR as LayerwiseLR
    from layerwise_lr.groups import param_groups as param_groups
    from layerwise_lr.integrations.checkpoint import analyze as analyze
    from layerwise_lr.integrations.lightning import LLRLightningCallback as LLRLightningCallback
    from layerwise_lr.integrations.transformers import LLRTrainerCallback as LLRTrainerCallback
    from layerwise_lr.measurement import LayerReport as LayerReport
    from layerwise_lr.muon import MuonAdamW as MuonAdamW
    from layerwise_lr.spectra import spectrum as spectrum
    from layerwise_lr.tail import TailFit as TailFit
    from layerwise_lr.tail import fit_tail as fit_tail

__version__ = "0.1.0"

# What a reader meets first; the rest of the table goes with them.
__all__ = [
    "LLRLightningCallback",
    "LLRTrainerCallback",
    "LayerwiseLR",
    "MuonAdamW",
    "analyze",
    "fit_tail",
    "param_groups",
    "spectrum",
]
_HOME = {
    "spectrum": "layerwise_lr.spectra",
    "fit_tail": "layerwise_lr.tail",
    "TailFit": "layerwise_lr.tail",
    "analyze": "layerwise_lr.integrations.checkpoint",
    "LayerReport": "layerwise_lr.measurement",
    "param_groups": "layerwise_lr.groups",
    "LayerwiseLR": "layerwise_lr.controller",
    "LLRConfig": "layerwise_lr.config",
    "MuonAdamW": "layerwise_lr.muon",
    "LARS": "layerwise_lr.baselines",
    "LAMB": "layerwise_lr.baselines",
    "BlockwiseSharpnessLR": "layerwise_lr.baselines",
    "LLRTrainerCallback": "layerwise_lr.integrations.transformers",
    "LLRLightningCallback": "layerwise_lr.integrations.lightning",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'layerwise_lr' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
