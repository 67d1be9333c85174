"""Attention modules of torch, timm and transformers, read into `AttentionWeights` by their attributes.

No host library is imported. What a Tucker form cannot carry is refused by name: `UnsupportedAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tucker_attention.errors import UnsupportedAttention
from tucker_attention.weights import AttentionWeights, Rotary


def kind_of(module: nn.Module) -> str | None:
    """Which reader knows the module: ``"torch"``, ``"timm"``, ``"gpt2"``, ``"bert"``, ``"projections"``; None for none.

    A class is known by the projections it holds, and by calling itself attention.
    """
    if isinstance(module, nn.MultiheadAttention):
        return "torch"
    if "attention" not in type(module).__name__.lower():
        return None
    holds = {name for name, child in module.named_children() if isinstance(child, nn.Module)}
    if {"qkv", "proj"} <= holds:
        return "timm"
    if {"c_attn", "c_proj"} <= holds:
        return "gpt2"
    inner, outer = getattr(module, "self", None), getattr(module, "output", None)
    if isinstance(inner, nn.Module) and {"query", "key", "value"} <= {n for n, _ in inner.named_children()}:
        return "bert" if isinstance(getattr(outer, "dense", None), nn.Module) else None
    if {"q_proj", "k_proj", "v_proj"} <= holds and ("o_proj" in holds or "out_proj" in holds):
        return "projections"
    return None


def read_module(module: nn.Module) -> AttentionWeights:
    """The weights of an attention module.

    Raises:
        UnsupportedAttention: an unknown kind of module, or a feature that cannot be carried: qk-norm, sliding window,
            ALiBi, attention sinks, soft-capping, gates, quantised weights, cross-attention, added key and value biases.
    """
    kind = kind_of(module)
    if kind is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} is no attention module that is known here: torch's MultiheadAttention, a fused "
            "qkv with proj (timm), c_attn with c_proj (GPT-2), self with output.dense (BERT), or q_proj, k_proj and "
            "v_proj with o_proj or out_proj; from_mha, from_gqa and from_mla take bare matrices"
        )
    refuse_features(module)
    readers: dict[str, Callable[[Any], AttentionWeights]] = {
        "torch": _torch, "timm": _timm, "gpt2": _gpt2, "bert": _bert, "projections": _projections,
    }  # fmt: skip
    return readers[kind](module)


def refuse_features(module: nn.Module) -> None:
    """Raise `UnsupportedAttention` for a feature that a Tucker form would silently drop."""
    name, config = type(module).__name__, getattr(module, "config", None)

    def refuse(feature: str) -> None:
        raise UnsupportedAttention(f"{name} has {feature}, which a Tucker form cannot carry")

    for attribute in ("q_norm", "k_norm", "query_norm", "key_norm", "qk_layernorm", "q_layernorm", "k_layernorm"):
        norm = getattr(module, attribute, None)
        if norm is not None and norm is not False and not isinstance(norm, nn.Identity):
            refuse(f"qk-norm ({attribute})")
    if isinstance(getattr(module, "norm", None), nn.Module) and not isinstance(module.norm, nn.Identity):
        refuse("a norm after attention (norm)")
    if getattr(module, "gate", None) is not None:
        refuse("an output gate (gate)")
    window = getattr(module, "sliding_window", None)
    if window is None and getattr(config, "use_sliding_window", True) is not False:
        window = getattr(config, "sliding_window", None)
    if window:
        refuse(f"a sliding window of {window} tokens")
    if getattr(config, "alibi", False) or getattr(module, "alibi_slopes", None) is not None:
        refuse("ALiBi")
    sinks = getattr(module, "sinks", None)
    if sinks is not None:
        refuse("attention sinks")
    for owner in (module, config):
        for attribute in ("attn_logit_softcapping", "attn_logit_soft_cap", "logit_softcapping", "softcap"):
            if getattr(owner, attribute, None):
                refuse(f"soft-capping of the logits ({attribute})")
    if getattr(module, "is_cross_attention", False):
        refuse("cross-attention")
    if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
        refuse("added keys (add_bias_kv, add_zero_attn)")
    if getattr(config, "clip_qkv", None):
        refuse("clipping of queries, keys and values (clip_qkv)")
    if getattr(module, "relative_attention_bias", None) is not None or hasattr(module, "distance_embedding"):
        refuse("a relative position bias")


def matrix_of(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [in, out] and bias of a linear layer, also of transformers' Conv1D, which stores it so."""
    weight, bias = getattr(projection, "weight", None), getattr(projection, "bias", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise UnsupportedAttention(
            f"{type(projection).__name__} has quantised or no weights; load the model in floating point first"
        )
    if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise UnsupportedAttention(f"{type(projection).__name__} has quantised weights ({weight.dtype})")
    plain = weight if type(projection).__name__ == "Conv1D" else weight.T
    return plain.detach(), None if bias is None else bias.detach()


def _torch(module: nn.MultiheadAttention) -> AttentionWeights:
    heads, d = module.num_heads, module.embed_dim
    if module.in_proj_weight is not None:
        query, key, value = module.in_proj_weight.detach().chunk(3)
    else:
        query, key, value = (
            w.detach() for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if w is not None
        )
        if key.shape[1] != value.shape[1]:
            raise UnsupportedAttention("MultiheadAttention has keys and values of different widths (kdim, vdim)")
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.detach().split(d)
    output, output_bias = matrix_of(module.out_proj)
    return AttentionWeights.from_matrices(
        query.T, key.T, value.T, output, n_heads=heads, query_bias=biases[0], key_bias=biases[1], value_bias=biases[2],
        output_bias=output_bias, dropout=module.dropout,
    )  # fmt: skip


def _timm(module: Any) -> AttentionWeights:
    weight, bias = matrix_of(module.qkv)
    query, key, value = weight.chunk(3, 1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    output, output_bias = matrix_of(module.proj)
    return AttentionWeights.from_matrices(
        query, key, value, output, n_heads=module.num_heads, query_bias=biases[0], key_bias=biases[1],
        value_bias=biases[2], output_bias=output_bias, scale=float(module.scale), dropout=_rate(module, "attn_drop"),
    )  # fmt: skip


def _gpt2(module: Any) -> AttentionWeights:
    weight, bias = matrix_of(module.c_attn)
    query, key, value = weight.chunk(3, 1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    output, output_bias = matrix_of(module.c_proj)
    return AttentionWeights.from_matrices(
        query, key, value, output, n_heads=module.num_heads, query_bias=biases[0], key_bias=biases[1],
        value_bias=biases[2], output_bias=output_bias, scale=float(module.scaling), causal=True,
        dropout=_rate(module, "attn_dropout"),
    )  # fmt: skip


def _bert(module: Any) -> AttentionWeights:
    inner = module.self
    refuse_features(inner)
    if getattr(inner, "position_embedding_type", "absolute") != "absolute":
        raise UnsupportedAttention(f"{type(inner).__name__} has relative positions ({inner.position_embedding_type})")
    (query, qb), (key, kb), (value, vb) = (matrix_of(p) for p in (inner.query, inner.key, inner.value))
    output, output_bias = matrix_of(module.output.dense)
    scale = float(getattr(inner, "scaling", inner.attention_head_size**-0.5))
    return AttentionWeights.from_matrices(
        query, key, value, output, n_heads=inner.num_attention_heads, query_bias=qb, key_bias=kb, value_bias=vb,
        output_bias=output_bias, scale=scale, causal=bool(getattr(inner, "is_causal", False)),
        dropout=_rate(inner, "dropout"),
    )  # fmt: skip


def _projections(module: Any) -> AttentionWeights:
    (query, qb), (key, kb), (value, vb) = (matrix_of(p) for p in (module.q_proj, module.k_proj, module.v_proj))
    output, output_bias = matrix_of(module.o_proj if hasattr(module, "o_proj") else module.out_proj)
    width = getattr(module, "head_dim", None)
    if width is None:
        heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
        width = query.shape[1] // heads
    scale = float(getattr(module, "scaling", getattr(module, "scale", width**-0.5)))
    dropout = getattr(module, "attention_dropout", 0.0)
    return AttentionWeights.from_matrices(
        query, key, value, output, n_heads=query.shape[1] // width, n_kv_heads=key.shape[1] // width, query_bias=qb,
        key_bias=kb, value_bias=vb, output_bias=output_bias, scale=scale,
        causal=bool(getattr(module, "is_causal", False)), rotary=_rotary(module, width),
        dropout=float(dropout) if isinstance(dropout, float | int) else 0.0,
    )  # fmt: skip


def _rotary(module: Any, width: int) -> Rotary | None:
    """The RoPE of a Llama-like layer, from its configuration."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        return None
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedAttention(
            f"{type(module).__name__} has scaled RoPE ({kind}); only default RoPE can be carried"
        )
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedAttention(f"{type(module).__name__} rotates a part of each head (partial_rotary_factor)")
    pairs = width // 2
    return Rotary(tuple(float(theta) ** (-p / pairs) for p in range(pairs)))


def _rate(module: Any, name: str) -> float:
    found = getattr(module, name, 0.0)
    return float(getattr(found, "p", found) or 0.0)
