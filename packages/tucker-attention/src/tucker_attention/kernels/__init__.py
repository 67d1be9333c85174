"""Operations of the latent attention, each with a Triton kernel, a path over torch's attention, and a reference."""

from icml26_shared.kernels import KernelSpec
from tucker_attention.kernels.latent_attention import latent_attention
from tucker_attention.kernels.latent_decode import latent_decode
from tucker_attention.kernels.latent_packed import latent_attention_packed

__all__ = ["AOT_SPECS", "latent_attention", "latent_attention_packed", "latent_decode"]


def AOT_SPECS() -> list[KernelSpec]:
    """Every kernel in its default configurations, for `icml26_shared.aot`."""
    from tucker_attention.kernels.aot_specs import specs

    return specs()
