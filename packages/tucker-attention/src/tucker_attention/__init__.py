"""One low-rank attention that contains MHA, MQA, GQA and MLA (Tucker Attention, arXiv 2603.30033)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tucker_attention.attention import TuckerAttention as TuckerAttention
    from tucker_attention.cache import TuckerCache as TuckerCache
    from tucker_attention.config import TuckerConfig as TuckerConfig
    from tucker_attention.counts import param_count as param_count
    from tucker_attention.errors import UnsupportedAttention as UnsupportedAttention
    from tucker_attention.integrations.models import convert_model as convert_model
    from tucker_attention.spectra import attention_spectra as attention_spectra

__version__ = "0.1.0"
__all__ = [
    "TuckerAttention",
    "TuckerCache",
    "TuckerConfig",
    "UnsupportedAttention",
    "attention_spectra",
    "convert_model",
    "param_count",
]
_HOME = {
    "TuckerAttention": "attention",
    "TuckerCache": "cache",
    "TuckerConfig": "config",
    "UnsupportedAttention": "errors",
    "attention_spectra": "spectra",
    "convert_model": "integrations.models",
    "param_count": "counts",
}


def __getattr__(name: str) -> object:
    # Public names load on first use, so that `import tucker_attention` needs neither torch nor a host library.
    if name not in _HOME:
        raise AttributeError(f"module 'tucker_attention' has no attribute {name!r}")
    value = getattr(import_module(f"tucker_attention.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
