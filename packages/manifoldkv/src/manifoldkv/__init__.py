"""Training-free KV-cache compression by distance to the key centroid (arXiv 2602.08343).

Names load when first used, so importing the package costs nothing and brings no host library in.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "KVConfig": "manifoldkv.config",
    "score_keys": "manifoldkv.scoring",
    "select": "manifoldkv.selection",
    "diagnose": "manifoldkv.geometry",
    "compress": "manifoldkv.integrations.transformers",
    "ManifoldCache": "manifoldkv.integrations.transformers",
    "ManifoldKVPress": "manifoldkv.integrations.kvpress",
    "WindowedManifoldKVPress": "manifoldkv.integrations.kvpress",
}

__all__ = [
    "KVConfig",
    "ManifoldCache",
    "ManifoldKVPress",
    "WindowedManifoldKVPress",
    "compress",
    "diagnose",
    "score_keys",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'manifoldkv' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # replaces the submodule of the same name (diagnose) and skips this lookup next time
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
