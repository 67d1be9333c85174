"""Tiny random models for structural tests: the real classes of transformers, small enough to run in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icml26_shared.errors import UserError, require
from icml26_shared.model_conversion import EXTRA, as_dtype

if TYPE_CHECKING:
    import torch

_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Ten times the usual spread: with 0.02 the logits of so small a model are all but equal, and argmax tests blind.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(family: str, *, seed: int = 0, dtype: str | torch.dtype = "float32", **overrides: Any) -> Any:
    """A small random causal language model of a family, for structural tests; the same seed gives the same weights.

    Args:
        family: transformers' model type: `"llama"`, `"qwen2"`, `"qwen3"`, `"phi3"`, `"gemma2"`, `"mistral"`, ...
        seed: seed of the weights; the global random state is left as it was.
        dtype: dtype of the weights.
        **overrides: fields of the model's config; default 2 layers, width 64, 4 heads over 2 KV heads, 256 tokens.

    Returns:
        The model in `eval` mode.

    Raises:
        UserError: transformers knows no such family.
    """
    torch = require("torch", EXTRA)
    transformers = require("transformers", EXTRA)
    settings = {**_TINY, **overrides}
    try:
        config = transformers.AutoConfig.for_model(family, **settings)
    except (ValueError, KeyError) as error:
        raise UserError(f"transformers knows no model family {family!r}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(as_dtype(dtype)).eval()


def tiny_llama(**overrides: Any) -> Any:
    """`tiny("llama", ...)`."""
    return tiny("llama", **overrides)


def tiny_qwen2(**overrides: Any) -> Any:
    """`tiny("qwen2", ...)`."""
    return tiny("qwen2", **overrides)


def tiny_phi3(**overrides: Any) -> Any:
    """`tiny("phi3", ...)`."""
    return tiny("phi3", **overrides)
