"""Language models built so that the winning metric is known: they cache the keys of :mod:`manifoldkv.synthetic`.

One attention layer without rotary embedding (a NoPE layer of the SmolLM3 class), no training. Token ``i`` of the
context has key ``k_i``; a needle's value is its number. Query token ``j`` looks along ``k_j - mean(k)`` and the model
answers with the number that it reads: right only if needle ``j`` is still in the cache.

The embedding has the parts [key | query | number | rest]; ``rest`` makes every embedding equally long, so that RMSNorm,
which divides by that length, leaves the keys as they were given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from manifoldkv.config import KVConfig

_SHARPNESS = 30.0  # of the query vectors, in units of the softmax's logits per unit of key: close to an argmax
_NUMBER = 1.0  # length of a needle's number beside a key
_DOMINANT = 1e3  # what the layer adds, over the embedding it is added to


@dataclass(frozen=True)
class BuiltModel:
    """A model, its context ``[1, T]``, one query token per needle ``[1, N]`` and the right answers ``[1, N]``."""

    model: Any
    context: Int64[Tensor, "1 tokens"]
    queries: Int64[Tensor, "1 needles"]
    answers: Int64[Tensor, "1 needles"]

    @torch.no_grad()
    def accuracy(self, cfg: KVConfig | None) -> float:
        """Share of right answers after the context was compressed before any query is seen; ``None``: full cache."""
        from transformers import DynamicCache

        from manifoldkv.integrations.transformers import ManifoldCache

        config = self.model.config
        cache = DynamicCache(config=config) if cfg is None else ManifoldCache(config, cfg)
        self.model(self.context, past_key_values=cache)
        said = self.model(self.queries, past_key_values=cache).logits.argmax(-1)
        return float((said == self.answers).double().mean())


def build(keys: Float[Tensor, "1 1 tokens dim"], needles: Int64[Tensor, " needles"]) -> BuiltModel:
    """The model whose cache holds these very keys; at most ``dim`` needles (each has a value direction of its own)."""
    given = keys[0, 0]
    tokens, dim = given.shape
    count = len(needles)
    if count > dim:
        raise ValueError(f"{count} needles were given for values of {dim} dimensions; at most {dim} are possible")
    looks = torch.nn.functional.normalize(given[needles] - given.mean(0), dim=-1)
    key, query, number, rest = slice(0, dim), slice(dim, 2 * dim), slice(2 * dim, 3 * dim), 3 * dim
    hidden = 3 * dim + dim  # a multiple of the head dimension; only the first of the last part is used
    embedding = torch.zeros(tokens + 2 * count, hidden)
    embedding[:tokens, key] = given
    embedding[needles, number] = _NUMBER * torch.eye(dim)[:count]
    embedding[tokens : tokens + count, query] = looks
    length = 1.01 * float(embedding.norm(dim=-1).max())
    embedding[:, rest] = (length**2 - embedding.square().sum(-1)).sqrt()
    model = _empty(len(embedding), hidden, dim)
    scale = length / math.sqrt(hidden)  # RMSNorm multiplies by its inverse
    layer = model.model.layers[0].self_attn
    parts = {"k_proj": (key, scale), "q_proj": (query, _SHARPNESS * math.sqrt(dim) * scale), "v_proj": (number, scale)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, norm in model.named_modules():
            if name.endswith("norm"):
                norm.weight.fill_(1.0)
        model.get_input_embeddings().weight.copy_(embedding)
        for name, (part, factor) in parts.items():
            getattr(layer, name).weight[:, part] = factor * torch.eye(dim)
        layer.o_proj.weight[number] = _DOMINANT * length * torch.eye(dim)
        model.get_output_embeddings().weight[tokens + count :, number] = torch.eye(dim)[:count]
    queries = torch.arange(tokens, tokens + count)[None]
    return BuiltModel(model, torch.arange(tokens)[None], queries, queries + count)


def _empty(vocabulary: int, hidden: int, dim: int) -> Any:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    config = SmolLM3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=dim,
        max_position_embeddings=2 * vocabulary,
        no_rope_layers=[0],
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return SmolLM3ForCausalLM(config).eval()
