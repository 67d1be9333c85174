"""Every shape of schedule on small random models, id by id against torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_harness import TOSS, Reference, engine

from manifoldkv.integrations.vllm import metrics

Tiny = Callable[..., tuple[str, Any]]
Noise = Callable[..., list[int]]
BASE: dict[str, Any] = {"block_size": 32, "skip_tokenizer_init": True}


@pytest.mark.parametrize(
    ("family", "metric", "block", "budget", "recent", "interval", "chunk"),
    [
        ("llama", "l2", 32, 64, 32, 32, 4096),
        ("llama", "cosine", 64, 100, 10, 64, 4096),
        ("llama", "l2", 32, 32, 0, 96, 100),
        ("qwen2", "l2", 32, 96, 40, 64, 64),
        ("qwen2", "cosine", 128, 128, 32, 128, 4096),
        ("qwen2", "decomposed", 32, 64, 32, 128, 77),
        ("llama", "cosine_mean", 32, 64, 64, 32, 33),
        ("qwen2", "cosine", 96, 10, 1, 96, 50),
        ("llama", "l2", 96, 10, 1, 192, 4096),
    ],
)
def test_ids_equal_torch(
    tiny: Tiny, noise: Noise, family: str, metric: str, block: int, budget: int, recent: int, interval: int, chunk: int
) -> None:
    """Prompts that end just before, on and just after a block and an event boundary, whole or in chunks.

    Served together, so rows with different gaps share a step; torch replays each one's own steps.
    """
    folder, model = tiny(family)
    plugin = {"budget": budget, "recent": recent, "interval": interval, "metric": metric}
    shape = {"sink": block, "middle": -(-budget // block) * block, "recent": -(-recent // block) * block}
    reference = Reference(model, metric=metric, interval=interval, **shape)
    event = sum(shape.values()) + interval
    lengths = [block, event - 1, event, event + 1, event + interval, event + 2 * interval + block - 1]
    settings = {**BASE, "block_size": block, "max_num_batched_tokens": chunk}
    with engine(folder, plugin=plugin, max_num_seqs=8, **settings) as made:
        start = made.free_blocks
        alone = made.generate(noise(lengths[-1], 99), max_tokens=64)
        prompts = {made.submit(noise(length, length), max_tokens=64): noise(length, length) for length in lengths}
        trace = made.run()
        assert made.free_blocks == start
    assert alone == reference.generate(noise(lengths[-1], 99), 64, chunk)
    for name, prompt in prompts.items():
        assert trace.outputs[name][0] == reference.replay(prompt, trace.chunks[name]), len(prompt)
        assert chunk < 4096 or trace.chunks[name][0] == (0, len(prompt))
    assert metrics.worker.evictions > 0
    assert metrics.worker.failures == 0
    dense = Reference(model, metric=metric, sink=block, middle=4096, recent=32, interval=32)
    longest = noise(lengths[-1], lengths[-1])
    assert dense.generate(longest, 64) != reference.generate(longest, 64)


@pytest.mark.parametrize(("family", "metric"), [("llama", "l2"), ("qwen2", "cosine")])
def test_preempted_requests_resume(tiny: Tiny, noise: Noise, family: str, metric: str) -> None:
    """A pool for three requests serves eight: some lose their blocks and start again, with that history's ids."""
    folder, model = tiny(family)
    shape = {"sink": 32, "middle": 64, "recent": 32, "interval": 32}
    reference = Reference(model, metric=metric, **shape)
    settings = {**BASE, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 256}
    with engine(folder, plugin={"budget": 64, "interval": 32, "metric": metric}, **settings) as made:
        start = made.free_blocks
        prompts = {made.submit(noise(60 + 13 * i, i), max_tokens=150): noise(60 + 13 * i, i) for i in range(8)}
        trace = made.run()
        assert made.free_blocks == start
    resumed = [name for name, chunks in trace.chunks.items() if [step[0] for step in chunks].count(0) > 1]
    assert resumed
    for name, prompt in prompts.items():
        assert trace.outputs[name][0] == reference.replay(prompt, trace.chunks[name]), name


def test_a_prompt_gives_its_blocks_back_before_others_ask(tiny: Tiny, noise: Noise) -> None:
    """The pool is full after a prompt of 9 blocks, a running request needs one more: nobody is preempted for it."""
    folder, model = tiny("llama")
    reference = Reference(model, metric="l2", sink=32, middle=64, recent=32, interval=32)
    settings = {**BASE, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 330, "max_model_len": 416}
    with engine(folder, plugin={"budget": 64, "interval": 32, "metric": "l2"}, **settings) as made:
        first = made.submit(noise(127, 1), max_tokens=64)
        made.engine.step()
        second = made.submit(noise(280, 2), max_tokens=64)
        trace = made.run()
    assert trace.free[0] == 0
    assert trace.chunks[second][:2] == [(0, 280), (280, 1)]
    assert trace.outputs[first][0] == reference.generate(noise(127, 1), 64)
    assert trace.outputs[second][0] == reference.generate(noise(280, 2), 64)


def test_a_long_mixed_load_with_aborts(tiny: Tiny, noise: Noise) -> None:
    """60 requests, chunked prompts, several samples, aborts at random steps: all others finish and no block is lost."""
    folder, model = tiny("qwen2")
    reference = Reference(model, metric="cosine", sink=32, middle=64, recent=32, interval=64)
    rng = random.Random(0)
    settings = {**BASE, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 192}
    with engine(folder, plugin={"budget": 64, "interval": 64, "metric": "cosine"}, max_num_seqs=12, **settings) as made:
        start, alone, gone, aborts = made.free_blocks, {}, set(), {}
        for i in range(60):
            prompt, new = noise(rng.randint(1, 500), i), rng.randint(1, 120)
            several = i % 10 == 3
            name = made.submit(prompt, max_tokens=new, **({"n": 2, "temperature": 0.7} if several else {}))
            if i % 6 == 5:
                aborts.setdefault(rng.randint(1, 150), []).append(name)
                gone.add(name)
            elif not several:
                alone[name] = prompt
        trace = made.run(aborts=aborts)
        assert made.free_blocks == start
    assert len(trace.outputs) >= 50
    decided = 0
    for name, prompt in alone.items():
        expected = reference.replay(prompt, trace.chunks[name])
        if reference.margin > TOSS:
            assert trace.outputs[name][0] == expected, name
            decided += 1
    assert decided >= 0.9 * len(alone)


def test_hybrid_models_keep_their_sliding_layers(tiny: Tiny, noise: Noise) -> None:
    """Gemma 3: full-attention layers are compacted, sliding-window layers are the stock ones, ids equal torch."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    folder, model = tiny(
        "gemma3_text",
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=4,
        layer_types=kinds,
        sliding_window=48,
    )
    reference = HybridReference(model, kinds, 48, metric="l2", sink=32, middle=64, recent=32, interval=32)
    settings = {**BASE, "max_num_batched_tokens": 2048}
    with engine(folder, plugin={"budget": 64, "interval": 32, "metric": "l2"}, **settings) as made:
        groups = [type(group.kv_cache_spec).__name__ for group in made.scheduler.kv_cache_config.kv_cache_groups]
        assert sorted(groups) == ["ManifoldKVSpec", "SlidingWindowSpec"]
        start = made.free_blocks
        for length in (300, 129):
            assert made.generate(noise(length, length), max_tokens=64) == reference.generate(noise(length, length), 64)
        assert made.free_blocks == start
    assert metrics.worker.evictions > 0


class HybridReference(Reference):
    """Evicts from full-attention layers only; sliding layers keep every token and see a window of logical places."""

    def __init__(self, model: Any, kinds: list[str], window: int, **shape: Any) -> None:
        super().__init__(model, **shape)
        self.full = [kind == "full_attention" for kind in kinds]
        self.window = window

    def _evict(self, cache: Any, before: int, after: int) -> None:
        new = self.interval * (after - before)
        for layer, full in zip(cache.layers, self.full, strict=True):
            if full and new:
                layer.keys, layer.values = self._kept(layer.keys, layer.values, self.sink, self.middle + new)

    @torch.inference_mode()
    def replay(self, prompt: list[int], chunks: list[tuple[int, int]]) -> list[int]:
        from transformers import DynamicCache

        tokens, cache = list(prompt), DynamicCache()
        for computed, new in chunks:
            ids = torch.tensor([tokens[computed : computed + new]])
            position = torch.arange(computed, computed + new)[None]
            stored = computed - self.interval * self.events(computed)
            query = torch.arange(new)[:, None]
            full = torch.arange(stored + new)[None] <= query + stored
            past = torch.arange(computed + new)[None]
            near = (past <= query + computed) & (past > query + computed - self.window)
            mask = {"full_attention": full[None, None], "sliding_attention": near[None, None]}
            logits = self.model(
                input_ids=ids, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True
            ).logits
            self._evict(cache, self.events(computed), self.events(computed + new))
            if computed + new == len(tokens):
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]
