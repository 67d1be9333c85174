"""The operations with kernels of their own, each with one public function that picks a path.

* :func:`rotate`: ``x D H`` and its inverse;
* :func:`hadamard_quant`: rotate and quantise tokens;
* :func:`fake_quant`: the same for training, with its gradient;
* :func:`ternary_gemm`: integer tokens times packed ternary weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from robuq.kernels.fake_quant import fake_quant
from robuq.kernels.grid import Grid
from robuq.kernels.hadamard_quant import hadamard_quant
from robuq.kernels.packed import pack_ternary, unpack_ternary
from robuq.kernels.rotate import rotate
from robuq.kernels.ternary_gemm import ternary_gemm

if TYPE_CHECKING:
    from icml26_shared.kernels import KernelSpec

__all__ = [
    "AOT_SPECS",
    "Grid",
    "fake_quant",
    "hadamard_quant",
    "pack_ternary",
    "rotate",
    "ternary_gemm",
    "unpack_ternary",
]


def AOT_SPECS() -> list[KernelSpec]:
    """The Triton kernels in their default configurations, to compile ahead of time."""
    from robuq.kernels.aot_specs import specs

    return specs()
