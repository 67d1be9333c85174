"""A small language model that learns to recall: which metric suits it is decided by how it was trained, not by us.

A sequence is filler with key-value pairs at random places, then queries: keys of the pairs, drawn with replacement,
each followed by its value. The loss is on the values of the queries; accuracy is that of the first query, which nothing
after the context answers. With ``qk_norm`` the model normalises queries and keys per head (Qwen3), so its cached keys
have nearly constant norms; without it (Llama) they may take any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml26_shared.checkpoint import load_state, save_state
from manifoldkv.config import KVConfig

PAIRS = 6
QUERIES = 16
CONTEXT = 48
_KEYS, _VALUES, _FILLER = 24, 24, 8
_BOS, _QUERY = 0, 1
_FIRST_KEY, _FIRST_VALUE, _FIRST_FILLER = 2, 2 + _KEYS, 2 + _KEYS + _VALUES
VOCABULARY = 2 + _KEYS + _VALUES + _FILLER
_SAVE_EVERY = 250


def build(qk_norm: bool, seed: int) -> Any:
    """A random model of two layers, 4 query and 2 key-value heads of 16: Qwen3 with QK-norm, Llama without."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if qk_norm else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=_BOS,
        eos_token_id=None,
        pad_token_id=None,
    )
    return model_class(config)


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(contexts, queries)``: ``[count, CONTEXT]`` and ``[count, 1 + 2 QUERIES]`` (mark, key, value, key, ...)."""
    context = _FIRST_FILLER + torch.randint(_FILLER, (count, CONTEXT), generator=generator)
    context[:, 0] = _BOS
    keys = _FIRST_KEY + torch.rand((count, _KEYS), generator=generator).argsort(-1)[:, :PAIRS]
    values = _FIRST_VALUE + torch.randint(_VALUES, (count, PAIRS), generator=generator)
    slots = torch.rand((count, (CONTEXT - 2) // 2), generator=generator).argsort(-1)[:, :PAIRS] * 2 + 1
    context.scatter_(1, slots, keys).scatter_(1, slots + 1, values)
    order = torch.randint(PAIRS, (count, QUERIES), generator=generator)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), -1).flatten(1)
    return context, torch.cat((torch.full((count, 1), _QUERY), asked), 1)


def train(
    qk_norm: bool,
    seed: int,
    steps: int,
    path: Path,
    batch: int = 32,
    advance: Callable[[int], None] | None = None,
) -> Any:
    """Train with AdamW for ``steps``, saving every 250 steps to ``path``; an interrupted run goes on from there."""
    model = build(qk_norm, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    start = 0
    if path.is_file():
        saved = load_state(path)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        start = int(saved["step"])
        if advance is not None:
            advance(start)
    for step in range(start, steps):
        context, queries = sequences(batch, torch.Generator().manual_seed(seed * 1_000_003 + step))
        tokens = torch.cat((context, queries), 1)
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / steps)
        logits = model(input_ids=tokens, use_cache=False).logits[:, CONTEXT + 1 : -1 : 2]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), queries[:, 2::2].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == steps:
            save_state(path, {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1})
        if advance is not None:
            advance(1)
    return model.eval()


@torch.no_grad()
def accuracy(model: Any, context: Tensor, queries: Tensor, cfg: KVConfig | None) -> float:
    """Share of first queries answered after the context was compressed (``None``: the full cache)."""
    from transformers import DynamicCache

    from manifoldkv.integrations.transformers import ManifoldCache

    right = 0
    for start in range(0, len(context), 40):
        own, asked = context[start : start + 40], queries[start : start + 40]
        cache = DynamicCache(config=model.config) if cfg is None else ManifoldCache(model.config, cfg)
        model(input_ids=own, past_key_values=cache)
        logits = model(input_ids=asked[:, :2], past_key_values=cache).logits[:, -1]
        right += int((logits.argmax(-1) == asked[:, 2]).sum())
    return right / len(context)
