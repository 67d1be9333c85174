"""Tucker layers under the names and call signatures that host models use for their attention modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tucker_attention.attention import TuckerAttention
from tucker_attention.config import TuckerConfig
from tucker_attention.readers import kind_of


class HostAttention(nn.Module):
    """A Tucker layer that is called as the module it stands for.

    Args:
        tucker: the layer.
        kind: what it stands for, see `tucker_attention.readers.kind_of`.
        layer_idx: its place in the host's cache.
    """

    def __init__(self, tucker: TuckerAttention, kind: str, layer_idx: int = 0) -> None:
        super().__init__()
        self.tucker, self.kind, self.layer_idx = tucker, kind, layer_idx
        tucker.layer_idx = layer_idx


class TimmAttention(HostAttention):
    """timm's ``Attention``: one tensor in, one out."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, d]."""
        return self.tucker(x, mask=attn_mask, is_causal=is_causal)


class TransformersAttention(HostAttention):
    """Attention modules of transformers: hidden states and keywords in, output and no weights out."""

    def __init__(self, tucker: TuckerAttention, kind: str, layer_idx: int = 0, resid_dropout: float = 0.0) -> None:
        super().__init__(tucker, kind, layer_idx)
        self.rotates = tucker.config.rope is not None  # kept here: an adapter may come to stand around the layer
        self.resid_dropout = nn.Dropout(resid_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        *positional: Any,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As the host calls it; the latents go into the host's own cache.

        Raises:
            ValueError: attention weights, a head mask or cross-attention were asked for.
        """
        if positional or encoder_hidden_states is not None or options.get("head_mask") is not None:
            raise ValueError("Tucker attention in transformers takes keywords, without head_mask and cross-attention")
        if options.get("output_attentions"):
            raise ValueError("Tucker attention forms no attention weights: output_attentions=True cannot be had")
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        self._refuse_static(cache)
        n, past = hidden_states.shape[1], 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
        positions = None
        if self.rotates:
            positions = (
                torch.arange(past, past + n, device=hidden_states.device) if position_ids is None else position_ids
            )
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            # the host's mask has causality in it already; a static cache has room behind the last key, which it hides
            out = self.tucker(hidden_states, mask=attention_mask, positions=positions, cache=cache, is_causal=False)
        elif isinstance(attention_mask, Tensor):
            padding = attention_mask == 0
            out = self.tucker(hidden_states, key_padding_mask=padding, positions=positions, cache=cache)
        else:
            out = self.tucker(hidden_states, positions=positions, cache=cache)
        return self.resid_dropout(out), None

    def _refuse_static(self, cache: Any) -> None:
        """transformers lays a static cache out for the heads of the host's configuration, which latents have not."""
        layers = getattr(cache, "layers", None) or ()
        if self.layer_idx < len(layers) and type(layers[self.layer_idx]).__name__.startswith("Static"):
            raise ValueError(
                "transformers' static cache does not fit latents; use its dynamic cache, or TuckerCache(max_length) "
                "with the layers themselves"
            )


class TorchAttention(HostAttention):
    """`torch.nn.MultiheadAttention`, for self-attention."""

    def __init__(self, tucker: TuckerAttention, kind: str, batch_first: bool = True) -> None:
        super().__init__(tucker, kind)
        self.batch_first = batch_first
        # what torch's encoder layers look at before they take their own fused path, which this is not
        self.in_proj_bias, self._qkv_same_embed_dim = None, False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As torch's: bool masks are True where attention is *not* allowed. No weights are returned.

        Raises:
            ValueError: keys that are not the values.
        """
        if key is not value and not torch.equal(key, value):
            raise ValueError("Tucker attention takes keys and values from the same tokens")
        tokens, context = (query, key) if self.batch_first else (query.transpose(0, 1), key.transpose(0, 1))
        mask = None if attn_mask is None else (~attn_mask if attn_mask.dtype == torch.bool else attn_mask)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(tokens.shape[0], -1, *mask.shape[1:])
        if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
            key_padding_mask = key_padding_mask == float("-inf")
        out = self.tucker(tokens, mask=mask, context=context, key_padding_mask=key_padding_mask,
                          is_causal=is_causal and mask is None)  # fmt: skip
        return (out if self.batch_first else out.transpose(0, 1)), None


def install(model: nn.Module, name: str, module: Any, layer: TuckerAttention, index: int) -> None:
    """Put a layer in the place of a module of the model."""
    kind = kind_of(module) or ""
    like = next(module.parameters())
    layer.to(device=like.device, dtype=like.dtype)
    if kind == "torch":
        replace(model, name, TorchAttention(layer, kind, module.batch_first))
    elif kind == "timm":
        replace(model, name, TimmAttention(layer, kind))
    elif kind == "bert":
        place = getattr(module.self, "layer_idx", None)
        replace(model, f"{name}.self", TransformersAttention(layer, kind, index if place is None else place))
        module.output.dense = nn.Identity()  # W^O is part of the layer
    else:
        place = getattr(module, "layer_idx", None)
        dropout = getattr(getattr(module, "resid_dropout", None), "p", 0.0)
        wrapped = TransformersAttention(layer, kind, index if place is None else place, dropout)
        replace(model, name, wrapped)


def skeleton(model: nn.Module, name: str, plain: dict[str, Any], index: int) -> None:
    """Put a layer of this configuration, with fresh parameters, where a saved model had one."""
    config = TuckerConfig.from_json({key: value for key, value in plain.items() if key != "kind"})
    target = name.removesuffix(".self") if plain["kind"] == "bert" else name
    install(model, target, model.get_submodule(target), TuckerAttention(config), index)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set a submodule by its dotted name, in the mode of the one it replaces."""
    parent, _, last = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent) if parent else model, last, module)
