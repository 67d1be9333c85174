"""Tests inside an environment where kvpress's presses run: kvpress 0.5 with transformers 5.2."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,  # attention far from uniform, so that a missing token shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    """``tiny(family)``: a random model of two layers in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            torch.manual_seed(0)
            made[family] = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SMALL)).eval()
        return made[family]

    return make


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """A prompt of 120 tokens."""
    return torch.randint(3, 80, (1, 120), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def prefill() -> Callable[..., Any]:
    """``prefill(model, ids, press)``: the cache after a prompt under a press, or without one."""
    from contextlib import nullcontext

    from transformers import DynamicCache

    def run(model: Any, prompt: torch.Tensor, press: Any = None) -> Any:
        cache = DynamicCache()
        with torch.no_grad(), press(model) if press is not None else nullcontext():
            model(prompt, past_key_values=cache)
        return cache

    return run
