"""Operations with a Triton kernel, a CPU path and a plain reference: packed attention and the packed policy loss."""

from __future__ import annotations

from dppo.kernels.layout import PackedLayout
from dppo.kernels.packed_attention import aot_specs as attention_specs
from dppo.kernels.packed_attention import packed_attention
from dppo.kernels.policy_loss import aot_specs as loss_specs
from dppo.kernels.policy_loss import packed_policy_loss
from icml26_shared.kernels import KernelSpec

__all__ = ["AOT_SPECS", "PackedLayout", "packed_attention", "packed_policy_loss"]


def AOT_SPECS() -> list[KernelSpec]:
    """All kernels in their default configurations."""
    return [*attention_specs(), *loss_specs()]
