"""Models for the engine tests. Everything runs on the CPU build of vLLM, in float32."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread that may run anywhere: pinned ones (the default) all wait where another program has the core of one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in [name for name in os.environ if name.startswith("MANIFOLDKV_")]:
    del os.environ[_name]
sys.path.insert(0, str(Path(__file__).parent))  # the harness, also for the processes that tests start

ESSAY = (
    "The harbour master kept {a} lanterns in the {b} shed, and every evening he counted them twice before the boats "
    "came. Rain had washed the road to the mill away, so the letters arrived by water on day {a} of the month. Nobody "
    "in the village could say who had planted the {b} orchard, but its apples were sold as far as the coast. When the "
    "bell of the {b} chapel cracked, {a} families gave a spoon each, and the new one rang a little lower. "
)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of SmolLM2-135M-Instruct."""
    from icml26_shared import models
    from icml26_shared.errors import UserError

    try:
        return str(models.path("smollm2"))
    except UserError as error:
        pytest.skip(f"SmolLM2 can't be had here: {error}")


@pytest.fixture(scope="session")
def smollm2_torch(smollm2: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prose(smollm2: str) -> Callable[[int, int], list[int]]:
    """``prose(length, seed)``: token ids of running English text, different for each seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def make(length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        colours = ["red", "old", "northern", "white", "narrow", "stone"]
        text = " ".join(ESSAY.format(a=rng.randint(2, 99), b=rng.choice(colours)) for _ in range(length // 80 + 2))
        return tokenizer(text).input_ids[rng.randint(0, 20) :][:length]

    return make


SMALL = {"vocab_size": 4096, "max_position_embeddings": 2048, "intermediate_size": 256, "initializer_range": 0.2}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "use_sliding_window": False},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, Any]]:
    """``tiny(family)``: folder and transformers model of a small random model.

    Its weights are ten times larger than usual, so that attention is sharp and the ids show which tokens were kept.
    """
    from icml26_shared.tiny_models import tiny as make

    made: dict[str, tuple[str, Any]] = {}

    def get(family: str, **overrides: Any) -> tuple[str, Any]:
        key = f"{family}{sorted(overrides.items())}"
        if key not in made:
            model = make(family, **{**SMALL, **TINY.get(family, {}), **overrides})
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder, safe_serialization=True)
            made[key] = str(folder), model
        return made[key]

    return get


@pytest.fixture(scope="session")
def noise() -> Callable[[int, int], list[int]]:
    """``noise(length, seed)``: different random ids (0 is left out: the padding id, whose embedding is zero)."""
    return lambda length, seed=0: random.Random(seed).sample(range(1, 4096), length)


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    from manifoldkv.integrations.vllm import metrics

    metrics.worker.__init__()  # type: ignore[misc]
    metrics.scheduler.__init__()  # type: ignore[misc]
    metrics._seen.clear()
