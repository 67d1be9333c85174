"""The kernels as they are launched by default, listed for compiling ahead of time (`icml26_shared.aot`)."""

from __future__ import annotations

from typing import Any, Literal

from icml26_shared.kernels import KernelSpec
from tucker_attention.kernels import triton_attention, triton_backward, triton_decode
from tucker_attention.kernels.layout import gradient_launch, launch_for, power_of_two

_FLOATS = ("lse_ptr", "d_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "cos_q_ptr", "sin_q_ptr", "cos_k_ptr", "sin_k_ptr")
_WIDTHS = (64, 128, 256)


def specs() -> list[KernelSpec]:
    """GPT-2's published ranks, wide latents, and what training and decoding launch."""
    return [
        _forward("forward bf16 [8,128,64]", 64, 64, 128),
        _forward("forward bf16 [8,64,64] latent RoPE", 64, 64, 64, ROPE_Q=True),
        _forward("forward bf16 shared latent RoPE", 64, 64, 64, ROPE_Q=True, ROPE_K=True),
        _forward("forward bf16 r3=128 heads", 128, 128, 0),
        _forward("forward bf16 r3=256 heads", 256, 256, 0),
        *(_gradient(of, r) for of in triton_backward.KERNELS for r in _WIDTHS),
        *(_decode(f"decode bf16 r3={r}", r) for r in _WIDTHS),
    ]


def _forward(name: str, r3: int, s3: int, s2: int, **flags: bool) -> KernelSpec:
    chosen = launch_for(r3, s3, s2, flags.get("ROPE_K", False))
    half = (r3 + 1) // 2
    constants: dict[str, Any] = {
        "R3": r3, "S3": s3, "S2": s2, "FIRST": half, "STEP": 1, "CAUSAL": True, "ROPE_Q": False, "ROPE_K": False,
        "MASKED": True, "FUSED": chosen.fused, "HALF": half, "HALF_P": power_of_two(half),
        "S3_P": power_of_two(s3), "S2_P": power_of_two(max(1, s2)),
        **chosen.blocks, **flags,
    }  # fmt: skip
    return _spec(name, triton_attention.forward_kernel, constants, chosen.warps)


def _gradient(of: Literal["queries", "keys"], r3: int) -> KernelSpec:
    chosen, wide = gradient_launch(r3, r3, of), power_of_two(r3)
    constants: dict[str, Any] = {
        "R3": r3, "S3": r3, "CAUSAL": True, "MASKED": True, "R3_P": wide, "S3_P": wide, **chosen.blocks,
    }  # fmt: skip
    return _spec(f"gradient of {of} bf16 r3={r3}", triton_backward.KERNELS[of], constants, chosen.warps)


def _decode(name: str, r3: int) -> KernelSpec:
    constants: dict[str, Any] = {"MASKED": True, **triton_decode.blocks(r3, r3)}
    return _spec(name, triton_decode.decode_kernel, constants, 4, out_ptr="*fp32")


def _spec(name: str, kernel: Any, constants: dict[str, Any], warps: int, **types: str) -> KernelSpec:
    def kind(argument: str) -> str:
        if argument in types:
            return types[argument]
        if argument == "mask_ptr":
            return "*u8"
        if argument in _FLOATS:
            return "*fp32"
        if argument.endswith(("start_ptr", "len_ptr")):
            return "*i32"
        return "*bf16" if argument.endswith("_ptr") else "i32"

    signature = {argument: kind(argument) for argument in kernel.arg_names if argument not in constants}
    aligned = tuple(
        n for n in signature if n.endswith("_ptr") or n in ("R2", "R3", "S3", "S2") or n.startswith("stride_")
    )
    return KernelSpec(name, kernel, signature, constants, warps, 1, aligned)
