"""What the plug-in refuses, and what it survives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_harness import Reference, engine

from manifoldkv.config import KVConfig
from manifoldkv.integrations.vllm import backend, impl, layout, manager, metadata, metrics, plugin, refuse
from manifoldkv.integrations.vllm.config import PluginConfig

Tiny = Callable[..., tuple[str, Any]]
Noise = Callable[..., list[int]]
PLUGIN = {"budget": 64, "interval": 32, "metric": "l2"}
SHAPE = {"sink": 32, "middle": 64, "recent": 32, "interval": 32}
SETTINGS: dict[str, Any] = {"block_size": 32, "skip_tokenizer_init": True, "max_num_batched_tokens": 2048}


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Messages the plug-in logs as errors."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.manifoldkv").addHandler(handler)
    yield found
    logging.getLogger("vllm.manifoldkv").removeHandler(handler)


def test_what_this_machine_cannot_start_is_refused(tiny: Tiny, noise: Noise) -> None:
    """Parallel contexts and cascade attention, as fields of the configuration of an engine that runs.

    vLLM 0.32 has no cascade attention left. Its flag is accepted, warned about and dropped: the engine starts, and its
    ids are those of the schedule. What is refused is a configuration that has it on.
    """
    folder, model = tiny("llama")
    with engine(folder, plugin=PLUGIN, disable_cascade_attn=False, **SETTINGS) as made:
        config = copy.copy(made.engine.vllm_config)
        ids = made.generate(noise(250, 3), max_tokens=64)
    assert config.model_config.disable_cascade_attn  # dropped
    assert ids == Reference(model, metric="l2", **SHAPE).generate(noise(250, 3), 64)
    refuse.check_engine(config, PluginConfig(budget=64))
    for part, field, value, message in (
        ("parallel_config", "decode_context_parallel_size", 2, "decode context"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context"),
        ("model_config", "disable_cascade_attn", False, "cascade attention"),
    ):
        changed, owner = copy.copy(config), copy.copy(getattr(config, part))
        object.__setattr__(owner, field, value)
        object.__setattr__(changed, part, owner)
        with pytest.raises(ValueError, match=message):
            refuse.check_engine(changed, PluginConfig(budget=64))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "share another layer's KV cache"),
        ({"impl": SimpleNamespace(alibi_slopes=torch.ones(2))}, "ALiBi"),
        ({"sliding_window": 64}, "without the hybrid KV cache manager"),
    ],
)
def test_layers_that_make_eviction_unsafe_are_refused(layer: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True))
    with pytest.raises(ValueError, match=message):
        refuse.check_layers(config, [SimpleNamespace(**layer)])
    refuse.check_layers(config, [SimpleNamespace()])


class Oldest(Reference):
    """Keeps the oldest tokens of the middle region: what is left when the selection fails."""

    def _scores(self, keys: torch.Tensor) -> torch.Tensor:
        return -torch.arange(keys.shape[2], dtype=torch.float64).expand(keys.shape[:3])


@pytest.mark.parametrize(
    ("module", "function", "message"),
    [(impl, "score_keys", "selecting tokens failed"), (metadata, "_plan", "planning a step's evictions failed")],
)
def test_a_failing_selection_keeps_the_older_tokens(
    tiny: Tiny,
    noise: Noise,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[str],
    module: ModuleType,
    function: str,
    message: str,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    folder, model = tiny("llama")
    with engine(folder, plugin=PLUGIN, **SETTINGS) as made:
        start, good = made.free_blocks, made.generate(noise(250, 3), max_tokens=64)
        monkeypatch.setattr(module, function, broken)
        oldest = Oldest(model, metric="", **SHAPE).generate(noise(250, 3), 64)
        assert oldest != good
        assert made.generate(noise(250, 3), max_tokens=64) == oldest
        assert made.free_blocks == start
        assert metrics.worker.failures > 1
        assert len([error for error in errors if message in error]) == 1
        monkeypatch.undo()
        assert made.generate(noise(250, 3), max_tokens=64) == good


def test_a_failing_manager_frees_at_the_end(
    tiny: Tiny, noise: Noise, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    with engine(tiny("llama")[0], plugin=PLUGIN, **SETTINGS) as made:
        start, good = made.free_blocks, made.generate(noise(250, 3), max_tokens=64)
        monkeypatch.setattr(manager.ManifoldKVManager, "_remove_blocks_in_range", broken)
        name = made.submit(noise(250, 3), max_tokens=64)
        trace = made.run()
        assert trace.outputs[name][0] == good  # attention never depended on the blocks being gone
        assert trace.free[0] >= trace.free[-2]
        assert made.free_blocks == start
    assert len([message for message in errors if "freeing blocks failed" in message]) == 1


def test_a_layout_that_is_not_understood_means_a_dense_cache(
    tiny: Tiny, noise: Noise, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise layout.LayoutError("not a permutation")

    folder, model = tiny("llama")
    monkeypatch.setattr(backend.layout, "derive", broken)
    backend._verify_cpu_layout.cache_clear()
    with engine(folder, plugin=PLUGIN, **SETTINGS) as made:
        never = Reference(model, metric="l2", sink=32, middle=4096, recent=32, interval=32)
        assert made.generate(noise(250, 3), max_tokens=64) == never.generate(noise(250, 3), 64)
    assert metrics.worker.evictions == 0
    assert len([message for message in errors if "eviction is off" in message]) == 1
    backend._verify_cpu_layout.cache_clear()


def test_loading_twice_is_fine(tiny: Tiny, noise: Noise) -> None:
    plugin.register()
    plugin.register()
    folder, model = tiny("llama")
    with engine(folder, plugin=PLUGIN, **SETTINGS) as made:
        bases = [base.__name__ for base in type(made.core.model_executor.driver_worker.worker).__mro__]
        assert "CPUWorker" in bases  # the stock worker
        assert made.generate(noise(250, 3), max_tokens=64) == Reference(model, metric="l2", **SHAPE).generate(
            noise(250, 3), 64
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "block", "dim"), [(3, 32, 64), (2, 128, 128), (2, 64, 80), (1, 32, 256)])
def test_one_faulty_row_is_no_reason_for_its_neighbour(dtype: torch.dtype, heads: int, block: int, dim: int) -> None:
    """Compaction through the real cache operation, with a request of NaN keys next to a sound one."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block, dim, "auto")
    kernel = SimpleNamespace(head_size=dim, do_kv_cache_update=_writer(heads, block, dim, isa))
    cache = torch.zeros((9, heads, block, 2 * dim), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(8 * block, heads, dim, generator=generator).to(dtype) for _ in range(2))
    keys[4 * block :] = torch.nan
    slots = torch.arange(block, 9 * block)
    kernel.do_kv_cache_update(None, keys, values, cache, slots)
    source = torch.tensor([[2, 1, 4, 3], [5, 6, 7, 8]])
    before = cache.clone()
    scoring = KVConfig(metric="l2", budget=2 * block, n_sink=0, n_recent=0)
    plan = metadata.Plan((metadata.Eviction(source, source[:, :2]),), scoring)
    impl.evict(kernel, None, cache, plan)
    assert metrics.worker.failures == 1
    assert torch.equal(cache[5:].nan_to_num(7.0), before[5:].nan_to_num(7.0))
    assert torch.equal(cache[3:5], before[3:5])
    found = impl.layout_of(kernel, None, cache).read(cache, source[:1, :2])
    order = torch.cat([torch.arange(b * block, (b + 1) * block) for b in (1, 0, 3, 2)])
    region, worth = keys[order].transpose(0, 1), values[order].transpose(0, 1)
    distance = (region.double() - region.double().mean(1, keepdim=True)).norm(dim=-1)
    kept = distance.topk(2 * block).indices.sort().values[..., None].expand(-1, -1, dim)
    assert torch.equal(found[0][0], region.gather(1, kept))
    assert torch.equal(found[1][0], worth.gather(1, kept))


def _writer(heads: int, block: int, dim: int, isa: str) -> Callable[..., None]:
    from vllm import _custom_ops as ops

    def write(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        halves = cache.view(cache.shape[0], heads, block * 2, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    return write
