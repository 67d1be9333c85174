"""A small language model trained here to recall: which metric suits it is decided by its training, not by us.

A context is filler with pairs at random places; a pair is one position that carries a key and a value (the sum of their
embeddings). Twice as many positions carry a value beside filler, which nobody asks for: a metric that only tells filler
from the rest is not enough. Queries are keys of the pairs; the model answers each with its value. With ``qk_norm``
queries and keys are normalised per head (Qwen3), so cached keys have nearly constant norms; without it (Llama) they may
take any.
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
LONE_VALUES = 12
QUERIES = 6
CONTEXT = 64
_KEYS, _VALUES, _FILLER = 32, 32, 8
_NOTHING, _FIRST_KEY = 0, 1
_FIRST_VALUE = _FIRST_KEY + _KEYS
_FIRST_FILLER = _FIRST_VALUE + _VALUES
VOCABULARY = _FIRST_FILLER + _FILLER
_LEARNING_RATE = 3e-3
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
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return model_class(config)


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """``(contexts, queries, answers)``: ``[count, CONTEXT, 2]``, ``[count, QUERIES, 2]`` and ``[count, QUERIES]``.

    The second token of a position is a value, or nothing.
    """
    first = _FIRST_FILLER + torch.randint(_FILLER, (count, CONTEXT), generator=generator)
    second = torch.full((count, CONTEXT), _NOTHING)
    keys = _FIRST_KEY + torch.rand((count, _KEYS), generator=generator).argsort(-1)[:, :PAIRS]
    values = _FIRST_VALUE + torch.randint(_VALUES, (count, PAIRS), generator=generator)
    lone = _FIRST_VALUE + torch.randint(_VALUES, (count, LONE_VALUES), generator=generator)
    slots = torch.rand((count, CONTEXT), generator=generator).argsort(-1)[:, : PAIRS + LONE_VALUES]
    first.scatter_(1, slots[:, :PAIRS], keys)
    second.scatter_(1, slots, torch.cat((values, lone), 1))
    order = torch.rand((count, PAIRS), generator=generator).argsort(-1)[:, :QUERIES]
    asked = keys.gather(1, order)
    queries = torch.stack((asked, torch.full_like(asked, _NOTHING)), -1)
    return torch.stack((first, second), -1), queries, values.gather(1, order)


def embed(model: Any, tokens: Tensor) -> Tensor:
    """Sum of the two embeddings of each position: ``[B, T, 2]`` to ``[B, T, hidden]``."""
    return model.get_input_embeddings()(tokens).sum(2)


def train(qk_norm: bool, seed: int, steps: int, path: Path, advance: Callable[[int], None] | None = None) -> Any:
    """Train with AdamW for ``steps``, saving every 250 steps to ``path``; an interrupted run goes on from there."""
    model = build(qk_norm, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    start = 0
    if path.is_file():
        saved = load_state(path)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        start = int(saved["step"])
        if advance is not None:
            advance(start)
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        context, queries, answers = sequences(16, generator)
        for group in optimiser.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / steps)
        logits = model(inputs_embeds=embed(model, torch.cat((context, queries), 1)), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, -QUERIES:].flatten(0, 1), answers.flatten())
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
def keys_of(model: Any, context: Tensor) -> list[Tensor]:
    """Cached keys of each layer, for the diagnosis."""
    return [layer.keys for layer in model(inputs_embeds=embed(model, context), use_cache=True).past_key_values.layers]


@torch.no_grad()
def accuracy(model: Any, context: Tensor, queries: Tensor, answers: Tensor, cfg: KVConfig | None) -> float:
    """Share of queries answered after the context was compressed (``None``: the full cache)."""
    from transformers import DynamicCache

    from manifoldkv.integrations.transformers import ManifoldCache

    cache = DynamicCache(config=model.config) if cfg is None else ManifoldCache(model.config, cfg)
    model(inputs_embeds=embed(model, context), past_key_values=cache)
    logits = model(inputs_embeds=embed(model, queries), past_key_values=cache).logits
    return float((logits.argmax(-1) == answers).double().mean())
