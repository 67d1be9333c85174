"""The kernels as they are launched by default, listed for compiling ahead of time (`icml26_shared.aot`)."""

from __future__ import annotations

from icml26_shared.kernels import KernelSpec
from layerwise_lr.kernels.gram import BLOCK, BLOCK_K, STAGES, gram_kernel
from layerwise_lr.kernels.gram import WARPS as GRAM_WARPS
from layerwise_lr.kernels.tail_scan import BLOCK_I, BLOCK_J, tail_scan_kernel
from layerwise_lr.kernels.tail_scan import WARPS as SCAN_WARPS


def specs() -> list[KernelSpec]:
    """The Gram matrix of bfloat16, float16 and float32 weights; the scan in both precisions."""
    return [
        _gram("bf16", "ieee"),
        _gram("fp16", "ieee"),
        _gram("fp32", "ieee"),
        _gram("fp32", "tf32"),
        *(_scan(dtype) for dtype in ("fp32", "fp64")),
    ]


def _gram(dtype: str, precision: str) -> KernelSpec:
    signature = {
        "w_ptr": f"*{dtype}", "out_ptr": "*fp32", "m": "i32", "n": "i32", "stride_b": "i64", "stride_m": "i32",
    }  # fmt: skip
    constants: dict[str, int | float | bool | str | None] = {
        "stride_n": 1,
        "BLOCK": BLOCK,
        "BLOCK_K": BLOCK_K,
        "PRECISION": precision,
        "WIDEN": False,
    }
    aligned = ("w_ptr", "out_ptr", "m", "n", "stride_b", "stride_m")
    return KernelSpec(f"gram {dtype} {precision}", gram_kernel, signature, constants, GRAM_WARPS, STAGES, aligned)


def _scan(dtype: str) -> KernelSpec:
    pointers = ("logs_ptr", "alpha_ptr", "distance_ptr")
    signature = {**dict.fromkeys(pointers, f"*{dtype}"), "count": "i32"}
    constants = {"BLOCK_I": BLOCK_I, "BLOCK_J": BLOCK_J}
    return KernelSpec(f"tail_scan {dtype}", tail_scan_kernel, signature, constants, SCAN_WARPS, 2, pointers)
