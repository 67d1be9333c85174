"""What must hold in any engine, on small random models of two families; SmolLM2 has the same in test_smollm2.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_harness import Engine, Reference, engine

from manifoldkv.integrations.vllm import metrics

Tiny = Callable[..., tuple[str, Any]]
Noise = Callable[..., list[int]]
PLUGIN = {"budget": 64, "interval": 32}
SHAPE = {"sink": 32, "middle": 64, "recent": 32, "interval": 32}
SETTINGS: dict[str, Any] = {"block_size": 32, "skip_tokenizer_init": True, "max_num_batched_tokens": 2048}


@pytest.fixture(params=["llama", "qwen2"], scope="module")
def small(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[str, Any]:
    """Folder and transformers model."""
    return tiny(request.param)


class TestOneEngine:
    """One engine with the l2 score for all."""

    @pytest.fixture(scope="class")
    def l2(self, small: tuple[str, Any]) -> Iterator[Engine]:
        with engine(small[0], plugin={**PLUGIN, "metric": "l2"}, **SETTINGS) as made:
            yield made

    def test_blocks_come_back_while_the_request_runs(self, l2: Engine, small: tuple[str, Any], noise: Noise) -> None:
        start = l2.free_blocks
        name = l2.submit(noise(300, 1), max_tokens=72)
        trace = l2.run()
        assert trace.outputs[name][0] == Reference(small[1], metric="l2", **SHAPE).generate(noise(300, 1), 72)
        held = [start - free for free in trace.free]
        assert held[0] == 10  # the whole prompt, while it is processed
        # A step needs room for its token, after the gap of the tokens before it was freed; the last step frees all.
        assert held[1:-1] == [-(-count // 32) - (count - 1 - 128) // 32 for count in range(301, 371)]
        assert trace.free[1] > trace.free[0]
        assert held[-1] == 0
        assert metrics.scheduler.blocks_freed == metrics.worker.blocks_freed == (300 + 71 - 128) // 32

    def test_aborts_leak_nothing(self, l2: Engine, noise: Noise) -> None:
        """Before its first step, right after it, while decoding, and behind a full batch."""
        start = l2.free_blocks
        names = [l2.submit(noise(length, length), max_tokens=100) for length in (200, 330, 150, 400)]
        trace = l2.run(aborts={0: [names[3]], 1: [names[0]], 40: [names[2]]})
        assert set(trace.outputs) == {names[1]}
        assert l2.free_blocks == start
        assert trace.outputs[names[1]][0] == l2.generate(noise(330, 330), max_tokens=100)

    def test_repeated_prompts_and_several_samples(self, l2: Engine, small: tuple[str, Any], noise: Noise) -> None:
        """The prefix cache is on (vLLM's default) and never hits: each answer is that of a fresh prompt."""
        assert l2.scheduler.kv_cache_manager.enable_caching
        prompt, start = noise(288, 5), l2.free_blocks  # 9 whole blocks
        expected = Reference(small[1], metric="l2", **SHAPE).generate(prompt, 64)
        names = [l2.submit(prompt, max_tokens=64) for _ in range(2)]
        several = l2.submit(prompt, max_tokens=64, n=4, temperature=1.0, seed=7)
        trace = l2.run()
        assert [trace.outputs[name][0] for name in names] == [expected, expected]
        assert len({tuple(sample) for sample in trace.outputs[several]}) == 4
        longer = l2.submit(prompt + expected[:32], max_tokens=32)
        trace = l2.run()
        assert trace.chunks[longer][0] == (0, 320)
        assert l2.free_blocks == start


def test_a_budget_beyond_the_longest_request_changes_nothing(small: tuple[str, Any], noise: Noise) -> None:
    prompts = [noise(length, length) for length in (64, 129, 400)]
    found = []
    for plugin in (None, {"budget": 0}, {"budget": 1024, "interval": 32}):
        with engine(small[0], plugin=plugin, **SETTINGS) as made:
            found.append([made.generate(prompt, max_tokens=64) for prompt in prompts])
    assert found[0] == found[1] == found[2]
    assert metrics.worker.evictions == 0


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_sixteen_requests_in_a_pool_too_small_for_dense(small: tuple[str, Any], noise: Noise, metric: str) -> None:
    """All finish, and every answer is torch's, which is the one the request gets when it is alone."""
    folder, model = small
    lengths, pool = [40 + (53 * i) % 330 for i in range(16)], 90
    assert sum(-(-(length + 64) // 32) for length in lengths) > 1.4 * pool
    settings = {**SETTINGS, "num_gpu_blocks_override": pool, "max_num_batched_tokens": 4096}
    reference = Reference(model, metric=metric, **SHAPE)
    with engine(folder, plugin={**PLUGIN, "metric": metric}, **settings) as made:
        start = made.free_blocks
        names = [made.submit(noise(n, i), max_tokens=64) for i, n in enumerate(lengths)]
        trace = made.run()
        assert made.free_blocks == start
    for i, name in enumerate(names):
        assert trace.outputs[name][0] == reference.generate(noise(lengths[i], i), 64), lengths[i]


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_a_request_longer_than_the_pool(small: tuple[str, Any], noise: Noise, metric: str) -> None:
    """700 + 64 tokens through 10 usable blocks of 32, in prompt chunks of 128."""
    folder, model = small
    settings = {**SETTINGS, "num_gpu_blocks_override": 11, "max_num_batched_tokens": 128}
    with engine(folder, plugin={**PLUGIN, "metric": metric}, **settings) as made:
        start = made.free_blocks
        assert 2 * 32 * start < 700 + 64
        ids = made.generate(noise(700, 9), max_tokens=64)
        assert made.free_blocks == start
    assert ids == Reference(model, metric=metric, **SHAPE).generate(noise(700, 9), 64, chunk=128)
