"""A GRPO run small enough for tests: words as tokens, a two-layer Llama, rollouts that depend on nothing but the
prompt."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from icml26_shared.models import tiny_llama

WORDS = ["<pad>", "<eos>", *[f"w{i}" for i in range(30)]]
GENERATIONS = 4


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=64
    )


@functools.cache
def model_folder() -> str:
    """TRL loads the reference model from where the model came from, so it must have come from somewhere."""
    if "DPPO_TEST_MODEL" in os.environ:  # made by the parent: a process of rank 1 saves nothing
        return os.environ["DPPO_TEST_MODEL"]
    torch.manual_seed(0)
    made = tiny_llama(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, bos_token_id=None,
    ).float()  # fmt: skip
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 1
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made.save_pretrained(folder)
    return folder


def model() -> Any:
    return LlamaForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


def prompts(n: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{i % 30} w{(7 * i + 1) % 30} w{i // 30}" for i in range(n)]})


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def rollouts(texts: list[str], trainer: Any) -> dict[str, Any]:
    """Completion i of a prompt is a function of the prompt's text, i and nothing else."""
    words = trainer.processing_class
    prompt_ids, completion_ids = [], []
    process = trainer.accelerator.process_index
    for place, text in enumerate(texts):
        index = (process * len(texts) + place) % trainer.num_generations
        start, length = _number(f"{text}/{index}"), 1 + _number(f"{text}/{index}/n") % 6
        prompt_ids.append(words(text)["input_ids"])
        completion_ids.append([2 + (start + 5 * t) % 30 for t in range(length)] + [1])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def reward(completions: list[str], **_: Any) -> list[float]:
    """0, 1 or 2 by the first word; a third of all groups come out equal."""
    return [float(int(c.split()[0][1:]) % 3 == 0) if c.split() else 0.0 for c in completions]


def config(cls: Any, folder: Any, **options: Any) -> Any:
    base = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": GENERATIONS,
        "max_completion_length": 8, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "bf16": False, "seed": 3,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_steps": 3,
        "lr_scheduler_type": "constant", "beta": 0.0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(**{**base, **options})


def trainer(cls: Any, args: Any, *, n: int = 24, reward_funcs: Any = reward, **more: Any) -> Any:
    return cls(
        model=model(), reward_funcs=reward_funcs, args=args, train_dataset=prompts(n), processing_class=tokenizer(),
        rollout_func=rollouts, **more,
    )  # fmt: skip
