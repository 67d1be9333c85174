"""The kernels as they are launched by default, listed for compiling ahead of time (`icml26_shared.aot`)."""

from __future__ import annotations

from typing import Any

from icml26_shared.kernels import KernelSpec
from robuq.kernels import triton_gemm, triton_transform
from robuq.kernels.triton_transform import FLAGS, Part

_QUANT = {"QUANTISE": True, "CODES": True, "SIGNS_IN": True}
_FAKE = {"QUANTISE": True, "VALUES": True, "KEEP": True, "MASK_OUT": True, "SIGNS_IN": True}
_BACK = {"KEEP": True, "MASKED_IN": True, "ADD": True, "SIGNS_OUT": True}
_TRANSFORM_POINTERS = {
    "g_ptr": "*fp32",
    "bits_ptr": "*u8",
    "signs_ptr": "*fp32",
    "m1_ptr": "*fp32",
    "m2_ptr": "*fp32",
    "given_ptr": "*fp32",
    "y_ptr": "*fp32",
    "codes_ptr": "*i8",
    "values_ptr": "*fp32",
    "d_ptr": "*fp32",
    "mask_ptr": "*u8",
}
_FLOATS = ("scale", "statistic_count", "step", "low", "high", "offset", "reach", "gain")


def specs() -> list[KernelSpec]:
    """The transform at DiT-XL/2's, SmolLM2's and power-of-two widths, and the product for few and for many tokens."""
    dit, smol, ffn, power = Part((12, 12), 3), Part((12, 12), 2), Part((12,), 7), Part((), 10)
    return [
        _transform("hadamard_quant bf16 n=1152", "bf16", dit, _QUANT),
        _transform("hadamard_quant bf16 n=576 branch", "bf16", smol, {**_QUANT, "KEEP": True}),
        _transform("hadamard_quant fp16 n=1536", "fp16", ffn, _QUANT),
        _transform("hadamard_quant fp32 n=1024 rounding", "fp32", power, {**_QUANT, "ROUNDS": True}),
        _transform("fake_quant bf16 n=1152", "bf16", dit, _FAKE),
        _transform("fake_quant gradient n=1152", "fp32", dit, _BACK),
        _gemm("ternary_gemm decode", 1, nibbles=False),
        _gemm("ternary_gemm M=64", 64, nibbles=False),
        _gemm("ternary_gemm M=512", 512, nibbles=False),
        _gemm("ternary_gemm M=512 two codes a byte", 512, nibbles=True),
        _scale("ternary_gemm decode epilogue"),
    ]


def _transform(name: str, dtype: str, part: Part, flags: dict[str, bool]) -> KernelSpec:
    fn: Any = triton_transform.transform_kernel
    constants = {**FLAGS, **flags, **part.constants(), "ROWS": triton_transform.rows_of(part.tile)}
    types = {**_TRANSFORM_POINTERS, "x_ptr": f"*{dtype}", **dict.fromkeys(_FLOATS, "fp32")}
    constants |= {"stride_x": 1, "stride_y": 1}
    signature = {n: types.get(n, "i32") for n in fn.arg_names if n not in constants}
    aligned = tuple(n for n in signature if n.endswith("_ptr") or n in ("stride_xt", "stride_yt"))
    return KernelSpec(name, fn, signature, constants, 4, divisible_by_16=aligned)


_GEMM_POINTERS = {
    "codes_ptr": "*i8",
    "packed_ptr": "*u8",
    "d_ptr": "*fp32",
    "z_ptr": "*fp32",
    "alpha_ptr": "*fp32",
    "rowsum_ptr": "*i32",
    "bias_ptr": "*fp32",
    "inner_ptr": "*fp32",
    "outer_ptr": "*bf16",
    "y_ptr": "*fp32",
    "partial_ptr": "*i32",
}


def _gemm(name: str, tokens: int, *, nibbles: bool) -> KernelSpec:
    constants = {
        "NIBBLES": nibbles,
        "HAS_BIAS": True,
        "BLOCK_R": 16,
        **triton_gemm.tiles(tokens),
        "stride_k": 1,
        "stride_b": 1,
    }
    return _product(
        name, triton_gemm.gemm_kernel, constants, {"codes_ptr": "*u8"} if nibbles else {}, triton_gemm.warps(tokens)
    )


def _scale(name: str) -> KernelSpec:
    chosen = triton_gemm.tiles(1)
    constants = {"HAS_BIAS": True, "BLOCK_R": 16, "BLOCK_M": chosen["BLOCK_M"], "BLOCK_N": chosen["BLOCK_N"]}
    return _product(name, triton_gemm.scale_kernel, constants, {}, triton_gemm.warps(1))


def _product(name: str, fn: Any, constants: dict[str, Any], pointers: dict[str, str], warps: int) -> KernelSpec:
    types = {**_GEMM_POINTERS, **pointers}
    signature = {n: types.get(n, "i32") for n in fn.arg_names if n not in constants}
    aligned = tuple(n for n in signature if n.endswith("_ptr") or n in ("N", "K", "stride_m", "stride_n"))
    return KernelSpec(name, fn, signature, constants, warps, triton_gemm.NUM_STAGES, aligned)
