"""The weights of a trained attention layer, by head, whatever module they came from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The RoPE of a trained layer: radians a position of each pair of a head, factor on cos and sin, pairing."""

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionWeights:
    """Attention by heads: ``logits_h = (x W_h^Q + b_h^Q)(x W_h^K + b_h^K)^T scale``, ``out = sum_h A_h (x W_h^V + b_h^V) W_h^O + b^O``.

    Args:
        query: [H, d, d_H].
        key: [n_KV, d, d_H]; head h looks at key head h // (H / n_KV).
        value: [n_KV, d, d_V].
        output: [H, d_V, d].
        query_bias, key_bias, value_bias: [H, d_H], [n_KV, d_H], [n_KV, d_V], or None.
        output_bias: [d] or None.
        scale: factor on the logits; default 1/sqrt(d_H).
        causal: whether the layer hides later tokens.
        rotary: its RoPE, or None.
        dropout: of the attention weights.

    Raises:
        ValueError: shapes that do not fit, or weights that are not finite.
    """  # noqa: E501

    query: Float[Tensor, "h d w"]
    key: Float[Tensor, "g c w"]
    value: Float[Tensor, "g c v"]
    output: Float[Tensor, "h v d"]
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    rotary: Rotary | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        heads, d, width = self.query.shape
        groups, context, _ = self.key.shape
        expected = {
            "key": (groups, context, width),
            "value": (groups, context, self.value.shape[2]),
            "output": (heads, self.value.shape[2], self.output.shape[2]),
            "query_bias": (heads, width),
            "key_bias": (groups, width),
            "value_bias": (groups, self.value.shape[2]),
            "output_bias": (self.output.shape[2],),
        }
        for field in fields(self):
            tensor = getattr(self, field.name)
            if not isinstance(tensor, Tensor):
                continue
            if field.name in expected and tuple(tensor.shape) != expected[field.name]:
                raise ValueError(f"{field.name} must be {expected[field.name]}, got {tuple(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{field.name} has values that are not finite: NaN or infinity")
        if heads % groups:
            raise ValueError(f"{heads} heads do not divide among {groups} key heads")
        if self.output.shape[2] != d:
            raise ValueError(f"output must map to the width {d} of the queries' tokens, got {self.output.shape[2]}")
        if self.scale is None:
            object.__setattr__(self, "scale", width**-0.5)

    @classmethod
    def from_matrices(
        cls, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, n_heads: int, n_kv_heads: int | None = None,
        query_bias: Tensor | None = None, key_bias: Tensor | None = None, value_bias: Tensor | None = None,
        output_bias: Tensor | None = None, scale: float | None = None, causal: bool = False,
        rotary: Rotary | None = None, dropout: float = 0.0,
    ) -> AttentionWeights:  # fmt: skip
        """From projections ``X W``: query [d, H d_H], key [d, n_KV d_H], value [d, n_KV d_V], output [H d_V, d].

        Biases are flat: [H d_H], [n_KV d_H], [n_KV d_V], [d].

        Raises:
            ValueError: matrices whose columns do not divide among the heads.
        """
        groups = n_heads if n_kv_heads is None else n_kv_heads
        for name, matrix, count in (("query", query, n_heads), ("key", key, groups), ("value", value, groups)):
            if matrix.dim() != 2 or count < 1 or matrix.shape[1] % count:
                raise ValueError(
                    f"{name} must be [d, {count} heads times their width], got {tuple(matrix.shape)}: "
                    f"{count} heads do not divide it"
                )
        if output.dim() != 2 or output.shape[0] % n_heads:
            raise ValueError(f"output must be [{n_heads} heads times their width, d], got {tuple(output.shape)}")

        def split(matrix: Tensor, count: int) -> Tensor:
            return matrix.reshape(matrix.shape[0], count, -1).transpose(0, 1)

        def bias(vector: Tensor | None, count: int) -> Tensor | None:
            return None if vector is None else vector.reshape(count, -1)

        return cls(
            split(query, n_heads), split(key, groups), split(value, groups),
            output.reshape(n_heads, -1, output.shape[1]), bias(query_bias, n_heads), bias(key_bias, groups),
            bias(value_bias, groups), output_bias,
            scale, causal, rotary, dropout,
        )  # fmt: skip

    @property
    def n_heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def n_kv_heads(self) -> int:
        """n_KV."""
        return self.key.shape[0]

    @property
    def d_model(self) -> int:
        """d."""
        return self.query.shape[1]

    @property
    def parameter_count(self) -> int:
        """Parameters of the four matrices, without biases."""
        return sum(x.numel() for x in (self.query, self.key, self.value, self.output))

    def without_biases(self) -> AttentionWeights:
        """The matrices alone."""
        return replace(self, query_bias=None, key_bias=None, value_bias=None, output_bias=None)

    @property
    def constant(self) -> Tensor | None:
        """What value and output biases add to every output: ``sum_h b_h^V W_h^O + b^O`` [d], as weights sum to 1."""
        if self.value_bias is None:
            return self.output_bias
        per_head = self.value_bias.repeat_interleave(self.n_heads // self.n_kv_heads, 0)
        wide = torch.promote_types(per_head.dtype, torch.float32)
        added = torch.einsum("hv,hvd->d", per_head.to(wide), self.output.to(wide))
        total = added if self.output_bias is None else added + self.output_bias.to(wide)
        return total.to(per_head.dtype)
