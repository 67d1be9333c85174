"""Operations on cached keys and values, each with a Triton kernel, a CPU path and a plain reference.

A file an operation; `layout` holds what they share. The public functions pick the path by device.
"""

from icml26_shared.kernels import KernelSpec
from manifoldkv.kernels.gather import gather_kv, gather_kv_paged
from manifoldkv.kernels.key_stats import KeyStats, centroids, key_stats
from manifoldkv.kernels.scores import cosine_scores, key_norms, l2_scores

__all__ = [
    "AOT_SPECS",
    "KeyStats",
    "centroids",
    "cosine_scores",
    "gather_kv",
    "gather_kv_paged",
    "key_norms",
    "key_stats",
    "l2_scores",
]


def AOT_SPECS() -> list[KernelSpec]:
    """Every kernel in its default configurations, for `icml26_shared.aot`."""
    from manifoldkv.kernels.aot_specs import specs

    return specs()
