"""Arithmetic and settings of the vLLM plug-in; runs without vLLM."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.integrations.vllm import config, layout
from manifoldkv.integrations.vllm.schedule import Schedule

WORKED = Schedule.rounded(sink=16, budget=64, recent=32, interval=32, block=16)


@pytest.mark.parametrize(
    ("computed", "events", "gap"), [(112, 0, (5, 5)), (144, 1, (5, 7)), (145, 1, (5, 7)), (208, 3, (5, 11))]
)
def test_worked_example(computed: int, events: int, gap: tuple[int, int]) -> None:
    assert WORKED.events(computed) == events
    assert WORKED.gap_blocks(computed, 16) == gap


def test_rounding_to_blocks() -> None:
    schedule = Schedule.rounded(sink=4, budget=1000, recent=32, interval=128, block=128)
    assert (schedule.sink, schedule.middle, schedule.recent, schedule.interval) == (128, 1024, 128, 128)
    assert Schedule.rounded(sink=0, budget=1, recent=0, interval=32, block=32).gap_start == 32


def test_interval_must_hold_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"interval of 100 tokens .* of 32 tokens; set MANIFOLDKV_INTERVAL to 128"):
        Schedule.rounded(sink=4, budget=64, recent=32, interval=100, block=32)


schedules = st.builds(
    lambda sink, budget, recent, steps, block: Schedule.rounded(
        sink=sink, budget=budget, recent=recent, interval=steps * block, block=block
    ),
    st.integers(0, 100),
    st.integers(1, 500),
    st.integers(0, 100),
    st.integers(1, 6),
    st.sampled_from([16, 32, 64, 128]),
)


@given(schedules, st.integers(0, 5000), st.integers(0, 600))
def test_gap_grows_and_never_reaches_the_recent_tokens(schedule: Schedule, computed: int, new: int) -> None:
    start, stop = schedule.gap(computed)
    later_start, later_stop = schedule.gap(computed + new)
    assert start == later_start == schedule.sink + schedule.middle
    assert stop <= later_stop  # what is free once stays free
    assert start == stop or computed - stop >= schedule.recent
    assert start % schedule.block == stop % schedule.block == 0
    assert schedule.stored(computed) == computed - (stop - start)
    assert schedule.stored(computed) <= max(schedule.peak_tokens(0) - 1, 0)


@given(schedules, st.integers(0, 5000), st.sampled_from([16, 32, 64, 96, 128, 256]))
def test_blocks_of_another_size_stay_inside_the_gap(schedule: Schedule, computed: int, block: int) -> None:
    first, last = schedule.gap_blocks(computed, block)
    start, stop = schedule.gap(computed)
    assert first <= last
    assert first == last or (first * block >= start and last * block <= stop)
    if schedule.block % block == 0:
        assert (last - first) * block == stop - start


@given(schedules, st.lists(st.integers(1, 700), min_size=1, max_size=30), st.integers(0, 2))
def test_a_lagging_scheduler_frees_nothing_that_a_step_reads(schedule: Schedule, steps: list[int], lag: int) -> None:
    """With up to ``lag`` steps in flight, freed blocks are in every running step's gap, and memory is bounded."""
    counts = [0]
    for step in steps:
        counts.append(counts[-1] + step)
    block = schedule.block
    for now in range(len(steps)):
        processed = counts[max(now - lag, 0)]
        freed = set(range(*schedule.gap_blocks(processed, block)))
        for running in range(max(now - lag, 0), now + 1):
            assert freed <= set(range(*schedule.gap_blocks(counts[running], block)))
        in_flight = counts[now + 1] - processed
        held = -(-counts[now + 1] // block) - len(freed)
        assert held <= -(-schedule.peak_tokens(in_flight) // block)


def test_settings_come_from_additional_config_then_environment_then_defaults() -> None:
    environ = {"MANIFOLDKV_BUDGET": "256", "MANIFOLDKV_METRIC": "l2", "MANIFOLDKV_WINDOW": ""}
    found = config.resolve({"manifoldkv": {"metric": "knorm", "interval": 64}}, environ)
    assert found == config.PluginConfig(budget=256, metric="knorm", interval=64, sink=4, recent=32, window=None)
    assert found.enabled
    assert not config.resolve({}, {}).enabled
    assert not config.resolve({"manifoldkv": {"budget": 64}}, {"MANIFOLDKV_BUDGET": "0"}).enabled


@pytest.mark.parametrize(
    ("additional", "environ", "message"),
    [
        ({}, {"MANIFOLDKV_BUDGET": "many"}, r"MANIFOLDKV_BUDGET='many' must be an integer >= 0"),
        ({}, {"MANIFOLDKV_BUDGET": "-1"}, r"budget=-1 must be an integer >= 0"),
        ({}, {"MANIFOLDKV_METRIC": "attention"}, r"metric='attention' is not one of auto, l2, cosine"),
        ({}, {"MANIFOLDKV_METRIC": "streaming"}, r"metric='streaming' is not one of"),
        ({}, {"MANIFOLDKV_INTERVAL": "0"}, r"interval=0 must be an integer >= 1"),
        ({}, {"MANIFOLDKV_WINDOW": "1"}, r"window=1 must be an integer >= 2"),
        ({"manifoldkv": {"budget": 1.5}}, {}, r"budget=1.5 must be an integer"),
        ({"manifoldkv": {"budgets": 64}}, {}, r"no setting budgets; known: budget, diagnosis"),
        ({"manifoldkv": 64}, {}, r"must be an object like"),
        ({"manifoldkv": {"metric": "knorm", "window": 64}}, {}, r"window=64 has no meaning for metric='knorm'"),
    ],
)
def test_bad_settings_are_named(additional: object, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.resolve(additional, environ)


def test_auto_takes_the_diagnosis_or_falls_back_with_one_line(tmp_path, caplog) -> None:
    file = tmp_path / "diagnosis.json"
    file.write_text(json.dumps({"metric": "l2", "cv": 0.1}))
    assert config.PluginConfig(budget=64, diagnosis=str(file)).resolved_metric() == "l2"
    with caplog.at_level(logging.WARNING, "vllm.manifoldkv"):
        assert config.PluginConfig(budget=64).resolved_metric() == "cosine"
    assert [record.message.count("manifoldkv diagnose") for record in caplog.records] == [1]
    file.write_text("{")
    with pytest.raises(ValueError, match="can't be read as JSON"):
        config.PluginConfig(budget=64, diagnosis=str(file)).resolved_metric()
    file.write_text("{}")
    with pytest.raises(ValueError, match=r'"metric" one of l2, cosine.*it has None'):
        config.PluginConfig(budget=64, diagnosis=str(file)).resolved_metric()


def test_budget_0_imports_nothing_heavy() -> None:
    code = "import sys; from manifoldkv.integrations.vllm.plugin import register; register(); print(*sys.modules)"
    env = {**os.environ, "MANIFOLDKV_BUDGET": "0"}
    loaded = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    heavy = {"vllm", "torch", "numpy", "transformers", "manifoldkv.scoring", "manifoldkv.integrations.vllm.backend"}
    assert heavy.isdisjoint(loaded.split())


def _permuted(heads: int, block: int, dim: int, value_dim: int) -> tuple[layout.WriteOp, torch.Tensor]:
    """A cache whose blocks are scrambled by a fixed permutation."""
    order = torch.randperm(heads * block * (dim + value_dim), generator=torch.Generator().manual_seed(3))

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        flat = cache.view(cache.shape[0], -1)
        for token, slot in enumerate(slots.tolist()):
            number, place = divmod(slot, block)
            cells = torch.empty_like(flat[number])
            cells[order] = flat[number]  # plain order
            cells[: heads * block * dim].view(heads, block, dim)[:, place] = key[token]
            cells[heads * block * dim :].view(heads, block, value_dim)[:, place] = value[token]
            flat[number] = cells[order]

    return write, order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "block", "dim", "value_dim"), [(2, 8, 4, 4), (3, 16, 5, 7), (1, 130, 3, 3)])
def test_any_permutation_is_found(dtype: torch.dtype, heads: int, block: int, dim: int, value_dim: int) -> None:
    write, order = _permuted(heads, block, dim, value_dim)
    found = layout.derive(write, torch.empty((4, heads, block, dim + value_dim), dtype=dtype), dim)
    assert torch.equal(found.inverse, order)


def test_a_cache_that_loses_or_mixes_numbers_is_refused() -> None:
    def forgets_values(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1, 8)[slots, :4] = key[:, 0]

    def rounds(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1, 8)[slots] = torch.cat([key, value], -1)[:, 0].round()

    for write, message in ((forgets_values, "not a permutation"), (rounds, "don't come back")):
        with pytest.raises(layout.LayoutError, match=message):
            layout.derive(write, torch.empty((4, 1, 8, 8)), 4)
