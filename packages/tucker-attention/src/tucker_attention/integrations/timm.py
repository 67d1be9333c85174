"""Tucker attention in timm's models: the class to build blocks with, for training from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from icml26_shared.errors import require
from tucker_attention.attention import TuckerAttention
from tucker_attention.config import TuckerConfig
from tucker_attention.readers import kind_of

require("timm", "timm", distribution="tucker-attention")


class TuckerAttnLayer(nn.Module):
    """Takes timm's arguments: ``attn_layer=functools.partial(TuckerAttnLayer, ranks=(8, 64, 64))``.

    Args:
        dim, num_heads, qkv_bias, attn_drop, proj_drop: as timm's.
        ranks, post_ranks: see `TuckerConfig`.
        other: timm's further arguments; qk_norm and scale_norm are refused.
    """

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True, attn_drop: float = 0.0,
        proj_drop: float = 0.0, *, ranks: Sequence[int], post_ranks: Sequence[int] | None = None, n_layers: int = 12,
        **other: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        for name in ("qk_norm", "scale_norm", "gated"):
            if other.get(name):
                raise ValueError(f"Tucker attention has no {name}; leave it out")
        biases = (("query", "key") if qkv_bias else ()) + (("output",) if proj_bias else ())
        ranked = tuple(ranks), None if post_ranks is None else tuple(post_ranks)
        self.attn = TuckerAttention(
            TuckerConfig(dim, num_heads, *ranked, biases=biases, dropout=attn_drop, n_layers=n_layers)  # type: ignore[arg-type]
        )
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, d]."""
        out: Tensor = self.proj_drop(self.attn(x, mask=attn_mask, is_causal=is_causal))
        return out


def use_tucker(model: nn.Module, ranks: Sequence[int], post_ranks: Sequence[int] | None = None) -> nn.Module:
    """Give an untrained timm model fresh Tucker layers of these ranks in place of its attention, in place."""
    from tucker_attention.integrations.hosts import install

    found = [(name, module) for name, module in model.named_modules() if kind_of(module) == "timm"]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layer of timm's kind (fused qkv with proj)")
    for index, (name, module) in enumerate(found):
        held: Any = module
        config = TuckerConfig(
            held.qkv.in_features, held.num_heads, tuple(ranks), None if post_ranks is None else tuple(post_ranks),  # type: ignore[arg-type]
            head_dim=held.head_dim, biases=("query", "key", "output") if held.qkv.bias is not None else ("output",),
            dropout=held.attn_drop.p, n_layers=len(found),
        )  # fmt: skip
        install(model, name, held, TuckerAttention(config), index)
    return model
