"""``manifoldkv vllm-check`` and the jobs that it and the bench run."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import Reference, clean_up

from icml26_shared.console import Context
from icml26_shared.errors import UserError
from manifoldkv.integrations.vllm import check, throughput
from manifoldkv.integrations.vllm.engine_job import Job, JobResult, execute, run_job

Tiny = Callable[..., tuple[str, Any]]


def test_vllm_check_shows_where_the_blocks_went(
    smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    check.arguments(parser)
    args = parser.parse_args(["--model", smollm2, "--new-tokens", "24", "--budget", "256", "--metric", "l2"])
    found = check.run(Context("manifoldkv", out=tmp_path, quiet=True), args)
    prompt, new = found["tokens"]
    assert new == 24
    dense = -(-(prompt + new - 2) // 32)  # after the last step but one
    gone = (prompt + new - 3 - 32 - 256 - 32) // 128 * 4  # freed before that step
    assert found["blocks_before_the_end"] == {"off": dense, "on": dense - gone}
    assert found["blocks_after_the_end"] == {"off": 0, "on": 0}
    assert found["free"]["off"][0] == found["free"]["on"][0]  # the prompt itself is dense on both sides
    assert (tmp_path / "vllm-check.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert f"held {dense - gone} blocks at its last token, without it {dense}" in shown


def test_without_matplotlib_the_check_says_so_once_and_shows_the_table(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Job] = []

    def served(job: Job) -> JobResult:
        ran.append(job)
        free = [6, 6, 10] if job.plugin["budget"] == 0 else [6, 8, 10]
        return JobResult(10, free, 1.0, [[1, 2, 3]], 0, 4, 5, (100, 3))

    monkeypatch.setattr(check, "run_job", served)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    parser = ArgumentParser()
    check.arguments(parser)
    found = check.run(Context("manifoldkv", out=tmp_path), parser.parse_args(["--model", tiny("llama")[0]]))
    assert [job.plugin["budget"] for job in ran] == [0, 256]
    assert found["blocks_before_the_end"] == {"off": 4, "on": 2}
    assert found["equal_ids"] == 3
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr()
    assert shown.err.count("no picture") == 1
    assert "matplotlib" in shown.err
    assert "held 2 blocks at its last token, without it 4" in shown.out


def test_a_job_in_a_process_of_its_own(tiny: Tiny, noise: Callable[..., list[int]]) -> None:
    folder, model = tiny("llama")
    prompts = [noise(200, seed) for seed in range(3)]
    settings = {"block_size": 32, "skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    plugin = {"budget": 64, "interval": 32, "metric": "cosine"}
    result = run_job(Job(folder, prompts, 40, plugin, {**settings, "num_gpu_blocks_override": 41}))
    reference = Reference(model, metric="cosine", sink=32, middle=64, recent=32, interval=32)
    assert result.ids == [reference.generate(prompt, 40) for prompt in prompts]
    assert result.tokens == (600, 120)
    assert result.pool == result.free[-1] == 40
    assert (result.preemptions, result.peak_blocks) == (0, 7)
    assert result.peak_blocks <= result.bound
    with pytest.raises(UserError, match=r"the engine's process ended with 1: .*block size of 32"):
        run_job(Job(folder, prompts, 40, {**plugin, "interval": 33}, settings))


def test_the_load_of_the_bench_preempts_without_the_plugin_only(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's own prompts, pool and steps, which don't depend on the model, on a small one."""

    def here(job: Job, python: str) -> JobResult:
        try:
            return execute(replace(job, settings={**job.settings, "skip_tokenizer_init": True}))
        finally:
            clean_up()

    monkeypatch.setattr(throughput, "run_job", here)
    folder, _ = tiny("llama", max_position_embeddings=4096)
    found = throughput.measure(folder, pairs=1)
    [on], [off] = found.on, found.off
    assert on.tokens == off.tokens == (8 * 2048, 8 * 128)
    assert on.pool == off.pool == 3 * (2048 + 64) // 32
    assert on.preemptions == 0
    assert off.preemptions >= 1
    assert 0 < on.peak_blocks <= on.bound < 2048 // 32
    assert on.free[-1] == off.free[-1] == on.pool
    assert found.ratios == (off.seconds / on.seconds,)
