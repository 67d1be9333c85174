"""The kernels as they are launched by default, listed for compiling ahead of time (`icml26_shared.aot`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from icml26_shared.kernels import KernelSpec
from manifoldkv.kernels import layout
from manifoldkv.kernels.gather import gather_constants, gather_kernel
from manifoldkv.kernels.key_stats import key_stats_kernel, stats_constants
from manifoldkv.kernels.scores import scores_constants, scores_kernel


def specs() -> list[KernelSpec]:
    """Each kernel at the usual width in bfloat16, and where registers are tightest: wide heads, odd widths."""
    return [
        _stats("bf16", 128, unit=False, masked=False),
        _stats("bf16", 128, unit=True, masked=True),
        _stats("fp16", 80, unit=True, masked=False),
        _stats("fp32", 256, unit=True, masked=True),
        _scores("bf16", 128, "l2", masked=False),
        _scores("bf16", 128, "cosine", masked=True),
        _scores("bf16", 128, "norm", masked=False),
        _scores("fp16", 80, "l2", masked=True),
        _scores("fp32", 256, "l2", masked=True),
        _scores("fp32", 256, "cosine", masked=True),
        _gather("bf16", 128, in_place=False),
        _gather("bf16", 128, in_place=True),
        _gather("fp16", 80, in_place=True),
        _gather("fp32", 256, in_place=True),
        _gather("bf16", 128, in_place=True, block_size=16),
    ]


def _spec(
    name: str, fn: Any, pointers: dict[str, str], constants: Mapping[str, int | float | bool | str], aligned: list[str]
) -> KernelSpec:
    """Arguments that are neither pointers nor constants are 32-bit integers; the innermost stride is 1, as usual."""
    constants = {**constants, **{n: 1 for n in fn.arg_names if n.endswith("stride_d")}}
    signature = {n: pointers.get(n, "i32") for n in fn.arg_names if n not in constants}
    divisible = tuple(n for n in signature if n in pointers or n in aligned)
    return KernelSpec(name, fn, signature, constants, layout.NUM_WARPS, divisible_by_16=divisible)


_KEY_STRIDES = ["stride_b", "stride_h", "stride_t"]


def _stats(dtype: str, dim: int, *, unit: bool, masked: bool) -> KernelSpec:
    pointers = {"keys_ptr": f"*{dtype}", "mask_ptr": "*u8", "bounds_ptr": "*i32", "partial_ptr": "*fp32"}
    name = f"key_stats {'unit ' * unit}{dtype} D={dim}{' masked' * masked}"
    return _spec(name, key_stats_kernel, pointers, stats_constants(dim, unit=unit, masked=masked), _KEY_STRIDES)


def _scores(dtype: str, dim: int, metric: str, *, masked: bool) -> KernelSpec:
    pointers = {"keys_ptr": f"*{dtype}", "mask_ptr": "*u8", "centroid_ptr": "*fp32", "scores_ptr": "*fp32"}
    pointers |= dict.fromkeys(("bounds_ptr", "first_ptr", "last_ptr"), "*i32")
    name = f"scores {metric} {dtype} D={dim}{' masked' * masked}"
    return _spec(name, scores_kernel, pointers, scores_constants(metric, dim, masked=masked), _KEY_STRIDES)


def _gather(dtype: str, dim: int, *, in_place: bool, block_size: int | None = None) -> KernelSpec:
    bits = {"bf16": "*i16", "fp16": "*i16", "fp32": "*i32"}[dtype]
    pointers = {"source_ptr": bits, "target_ptr": bits, "index_ptr": "*i64"}
    pointers |= {"table_ptr": "*i32", "lengths_ptr": "*i32"}
    form = "paged" if block_size else "in place" if in_place else "new"
    constants = gather_constants(dim, in_place=in_place, block_size=block_size)
    strides = [f"{which}_stride_{axis}" for which in ("source", "target") for axis in "bht"] + ["block_stride"]
    return _spec(f"gather {form} {dtype} D={dim}", gather_kernel, pointers, constants, strides)
