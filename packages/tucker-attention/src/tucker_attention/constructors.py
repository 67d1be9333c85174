"""Constructors of a Tucker layer from other attention; see `tucker_attention.special_cases`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from tucker_attention import special_cases
from tucker_attention.config import TuckerConfig
from tucker_attention.readers import read_module
from tucker_attention.weights import AttentionWeights

Layer = TypeVar("Layer", bound="FromAttention")


class FromAttention(nn.Module):
    """Class methods that make a layer; each is exact unless ranks, energy or a budget are given."""

    def __init__(self, config: TuckerConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_mha(
        cls: type[Layer], query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, n_heads: int, **options: Any
    ) -> Layer:
        """Multi-head attention as Tucker attention, exactly (theorem B.2): ranks (H, d, d) of both tensors.

        Args:
            query, key, value: W^Q, W^K, W^V [d, H d_H], so that ``X W`` is the projection (``linear.weight.T``).
            output: W^O [H d_H, d].
            n_heads: H.
            options: ``query_bias``, ``key_bias``, ``value_bias`` [H d_H], ``output_bias`` [d], ``scale``, ``causal``,
                ``core``: ``"per_head"`` (default), with exactly MHA's parameters, or ``"dense"``, with the core of the
                theorem, of H d^2 numbers.
        """
        return cls.from_gqa(query, key, value, output, n_heads=n_heads, n_kv_heads=n_heads, **options)

    @classmethod
    def from_gqa(
        cls: type[Layer], query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, n_heads: int, n_kv_heads: int,
        core: str = "per_head", **options: Any,
    ) -> Layer:  # fmt: skip
        """Grouped-query attention (theorem B.3), with one key head MQA: ranks (H, d, d_H n_KV) of both tensors.

        Args: as :meth:`from_mha`; ``key`` and ``value`` are [d, n_KV d_H].
        """
        weights = AttentionWeights.from_matrices(
            query, key, value, output, n_heads=n_heads, n_kv_heads=n_kv_heads, **options
        )
        return cls.from_weights(weights, core=core)

    @classmethod
    def from_mla(
        cls: type[Layer], query_down: Tensor, query_up: Tensor, kv_down: Tensor, key_up: Tensor, value_up: Tensor,
        output: Tensor, *, n_heads: int, core: str = "per_head", scale: float | None = None, causal: bool = False,
    ) -> Layer:  # fmt: skip
        """Multi-head latent attention without positions (theorem B.4): ranks (H, d_cQ, d_cKV), (H, d, d_cKV).

        Args:
            query_down: W^DQ [d, d_cQ].
            query_up: W^UQ [d_cQ, H d_H].
            kv_down: W^DKV [d, d_cKV]; it is U3 and V3, so the cache has d_cKV numbers a token.
            key_up, value_up: W^UK [d_cKV, H d_H], W^UV [d_cKV, H d_V].
            output: W^O [H d_V, d].
            n_heads: H.
            core: ``"per_head"`` (MLA's own parameters) or ``"dense"``.
            scale: factor on the logits; default 1/sqrt(d_H).
            causal: whether queries see only what came before.
        """
        return cls._built(
            special_cases.mla(
                query_down,
                query_up,
                kv_down,
                key_up,
                value_up,
                output,
                n_heads=n_heads,
                core=core,
                scale=scale,
                causal=causal,
            )
        )

    @classmethod
    def from_weights(
        cls: type[Layer], weights: AttentionWeights, *, ranks: Sequence[Any] | None = None, energy: float | None = None,
        budget: int | None = None, calibration: Tensor | None = None, core: str | None = None, rope: str | None = None,
    ) -> Layer:  # fmt: skip
        """From the weights of a trained layer: exactly, or truncated (HOSVD, then five sweeps of HOOI).

        Args:
            weights: what `read_module` read, or `AttentionWeights.from_matrices`.
            ranks: (r1, r2, r3) for both tensors, or ((r1, r2, r3), (s1, s2, s3)).
            energy: ranks that keep this share of each mode's squared singular values; 1.0 keeps the layer.
            budget: at most this many attention parameters.
            calibration: inputs [.., d]; the error on them is minimised, not the error of the weights.
            core: ``"dense"`` or ``"per_head"``; default: for truncated ranks whichever has fewer parameters.
            rope: for weights with RoPE: ``"head"`` keeps it exactly; ``"latent"`` makes an initialisation that needs
                training. Default ``"head"`` without truncation.

        Raises:
            ValueError: more than one of ranks, energy and budget, or values out of range.
        """
        return cls._built(
            special_cases.from_weights(
                weights, ranks=ranks, energy=energy, budget=budget, calibration=calibration, core=core, rope=rope
            )
        )

    @classmethod
    def from_module(cls: type[Layer], module: nn.Module, **options: Any) -> Layer:
        """From an attention module of torch, timm or transformers; options as in :meth:`from_weights`.

        Raises:
            UnsupportedAttention: a feature that cannot be carried (named), or a module of unknown make.
        """
        return cls.from_weights(read_module(module), **options)

    @classmethod
    def _built(cls: type[Layer], made: tuple[TuckerConfig, dict[str, Tensor]]) -> Layer:
        config, state = made
        layer = cls(config)
        for name, tensor in state.items():
            setattr(layer, name, nn.Parameter(tensor.detach().clone().contiguous()))
        return layer
