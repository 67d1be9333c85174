"""The plug-in on SmolLM2 in a real engine, against torch and against the engine without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_harness import Engine, Reference, engine

from manifoldkv.integrations.vllm import metrics

PLUGIN = {"budget": 64, "sink": 4, "recent": 32, "interval": 32}
SHAPE = {"sink": 32, "middle": 64, "recent": 32, "interval": 32}  # rounded to blocks of 32
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 96, "block_size": 32}
Prose = Callable[..., list[int]]


@pytest.fixture(scope="module")
def dense_ids(smollm2: str, prose: Prose) -> dict[int, list[int]]:
    """Greedy ids of the stock cache, per prompt length."""
    with engine(smollm2, **SETTINGS) as made:
        return {length: made.generate(prose(length, length), max_tokens=64) for length in (90, 300)}


class TestOneEngine:
    """One engine for all; the stock one is done by then, since two in a process share their groups."""

    @pytest.fixture(scope="class")
    def l2(self, smollm2: str, dense_ids: Any) -> Iterator[Engine]:
        with engine(smollm2, plugin={**PLUGIN, "metric": "l2"}, **SETTINGS) as made:
            yield made

    def test_ids_equal_torch_and_blocks_come_back_while_running(
        self, l2: Engine, smollm2_torch: Any, prose: Prose
    ) -> None:
        prompt, start = prose(300, 1), l2.free_blocks
        name = l2.submit(prompt, max_tokens=72)
        trace = l2.run()
        assert trace.outputs[name][0] == Reference(smollm2_torch, metric="l2", **SHAPE).generate(prompt, 72)
        held = [start - free for free in trace.free]
        assert held[0] == 10  # the whole prompt, while it is processed
        assert all(count <= 5 for count in held[1:-1])  # S + M + W + I = 160 tokens at the most, of up to 371
        assert held[-1] == 0
        assert metrics.worker.failures == 0
        assert metrics.worker.tokens_evicted == 32 * ((300 + 71 - 128) // 32)
        assert metrics.scheduler.blocks_freed == metrics.worker.blocks_freed == metrics.worker.tokens_evicted // 32

    def test_the_selection_matters(
        self, l2: Engine, smollm2_torch: Any, prose: Prose, dense_ids: dict[int, list[int]]
    ) -> None:
        """The comparison above could fail: other metrics and the full cache give other ids for the same prompt."""
        prompt = prose(300, 300)
        ours = l2.generate(prompt, max_tokens=64)
        assert ours != dense_ids[300]
        assert ours != Reference(smollm2_torch, metric="knorm", **SHAPE).generate(prompt, 64)

    def test_repeated_prompts_several_samples_and_stop_strings(self, l2: Engine, prose: Prose) -> None:
        """With the prefix cache flag on (vLLM's default), nothing is shared and nothing leaks."""
        assert l2.scheduler.kv_cache_manager.enable_caching
        prompt, start = prose(260, 2), l2.free_blocks
        first, second = (l2.generate(prompt, max_tokens=40) for _ in range(2))
        assert first == second
        greedy, several = l2.submit(prompt, max_tokens=40), l2.submit(prompt, max_tokens=40, n=3, temperature=1.0)
        trace = l2.run()
        assert trace.outputs[greedy][0] == first
        assert [len(sample) for sample in trace.outputs[several]] == [40, 40, 40]
        assert len({tuple(sample) for sample in trace.outputs[several]}) == 3
        text = trace.texts[greedy][0]
        word = text.split()[6]
        stopped = l2.submit(prompt, max_tokens=40, stop=[word])
        assert l2.run().texts[stopped][0] == text[: text.index(word)]
        assert l2.free_blocks == start

    def test_abort_leaks_nothing(self, l2: Engine, prose: Prose) -> None:
        start = l2.free_blocks
        names = [l2.submit(prose(length, length), max_tokens=40) for length in (200, 330, 150)]
        trace = l2.run(aborts={3: [names[0]], 30: [names[2]]})
        assert set(trace.outputs) == {names[1]}
        assert trace.outputs[names[1]][0] == l2.generate(prose(330, 330), max_tokens=40)
        assert l2.free_blocks == start


def test_sixteen_requests_in_a_pool_too_small_for_dense(smollm2: str, prose: Prose) -> None:
    """Mixed lengths; every answer is the one the request gets when it is alone."""
    lengths = [40 + (53 * i) % 330 for i in range(16)]
    new = [12 + (7 * i) % 17 for i in range(16)]
    pool = 84
    dense = sum(-(-(length + more) // 32) for length, more in zip(lengths, new, strict=True))
    assert dense > 1.3 * pool
    settings = {**SETTINGS, "num_gpu_blocks_override": pool, "max_num_batched_tokens": 4096}
    with engine(smollm2, plugin={**PLUGIN, "metric": "cosine"}, **settings) as made:
        start = made.free_blocks
        names = [made.submit(prose(n, i), max_tokens=new[i]) for i, n in enumerate(lengths)]
        trace = made.run()
        assert sorted(trace.outputs) == sorted(names)
        for i, name in enumerate(names):
            assert trace.outputs[name][0] == made.generate(prose(lengths[i], i), max_tokens=new[i]), lengths[i]
        assert made.free_blocks == start


def test_a_preempted_request_resumes(smollm2: str, smollm2_torch: Any, prose: Prose) -> None:
    """Nine blocks for two requests of five: the later one loses its blocks and starts again, as torch replays it."""
    settings = {**SETTINGS, "num_gpu_blocks_override": 10, "max_num_batched_tokens": 256, "max_model_len": 256}
    with engine(smollm2, plugin={**PLUGIN, "metric": "l2"}, **settings) as made:
        start = made.free_blocks
        prompts = {made.submit(prose(length, length), max_tokens=64): prose(length, length) for length in (120, 115)}
        trace = made.run()
        assert made.free_blocks == start
    first, second = prompts
    starts = {name: [step[0] for step in chunks].count(0) for name, chunks in trace.chunks.items()}
    assert starts == {first: 1, second: 2}
    reference = Reference(smollm2_torch, metric="l2", **SHAPE)
    for name, prompt in prompts.items():
        assert trace.outputs[name][0] == reference.replay(prompt, trace.chunks[name]), name


def test_a_request_longer_than_the_pool(smollm2: str, smollm2_torch: Any, prose: Prose) -> None:
    """700 + 64 tokens through 10 usable blocks of 32, in prompt chunks of 128; cosine against torch."""
    settings = {**SETTINGS, "num_gpu_blocks_override": 11, "max_num_batched_tokens": 128}
    with engine(smollm2, plugin={**PLUGIN, "metric": "cosine"}, **settings) as made:
        prompt, start = prose(700, 9), made.free_blocks
        assert len(prompt) + 64 > 2 * 32 * start
        ids = made.generate(prompt, max_tokens=64)
        assert made.free_blocks == start
    assert ids == Reference(smollm2_torch, metric="cosine", **SHAPE).generate(prompt, 64, chunk=128)


def test_a_budget_beyond_the_longest_request_changes_nothing(
    smollm2: str, prose: Prose, dense_ids: dict[int, list[int]]
) -> None:
    with engine(smollm2, plugin={"budget": 1024, "metric": "l2"}, **{**SETTINGS, "block_size": 128}) as made:
        assert {n: made.generate(prose(n, n), max_tokens=64) for n in dense_ids} == dense_ids
    assert metrics.worker.evictions == 0


def test_without_a_budget_the_engine_is_the_stock_one(smollm2_torch: Any, prose: Prose, dense_ids: Any) -> None:
    """The reference with nothing to evict decodes greedily; the engine with the plug-in loaded gives its ids."""
    never = Reference(smollm2_torch, metric="l2", sink=32, middle=4096, recent=32, interval=32)
    assert dense_ids[90] == never.generate(prose(90, 90), 64)
