"""The operations with kernels of their own, each with one public function that picks a path.

* :func:`gram`: ``W W^T`` of one matrix or a batch, lower triangle only;
* :func:`tail_scan`: exponent and Kolmogorov-Smirnov distance of a power law for every possible threshold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerwise_lr.kernels.gram import gram
from layerwise_lr.kernels.tail_scan import tail_scan

if TYPE_CHECKING:
    from icml26_shared.kernels import KernelSpec

__all__ = ["AOT_SPECS", "gram", "tail_scan"]


def AOT_SPECS() -> list[KernelSpec]:
    """The Triton kernels in their default configurations, to compile ahead of time."""
    from layerwise_lr.kernels.aot_specs import specs

    return specs()
