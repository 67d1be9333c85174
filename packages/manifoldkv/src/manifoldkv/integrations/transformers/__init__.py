"""Compressed caches for transformers (>= 5.16)."""

from icml26_shared.errors import require

require("transformers", "manifoldkv[transformers]")

from manifoldkv.integrations.transformers.cache import ManifoldCache, MetricChoice, UnsupportedModelError  # noqa: E402
from manifoldkv.integrations.transformers.context import Compression, compress  # noqa: E402
from manifoldkv.integrations.transformers.layer import CacheTrimError, LayerStats, ManifoldLayer  # noqa: E402
from manifoldkv.integrations.transformers.saved import CacheFormatError  # noqa: E402

__all__ = [
    "CacheFormatError",
    "CacheTrimError",
    "Compression",
    "LayerStats",
    "ManifoldCache",
    "ManifoldLayer",
    "MetricChoice",
    "UnsupportedModelError",
    "compress",
]
