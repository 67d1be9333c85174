"""``manifoldkv vllm-check`` and the jobs that it and the bench run."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import Reference

from icml26_shared.console import Context
from icml26_shared.errors import UserError
from manifoldkv.integrations.vllm import check
from manifoldkv.integrations.vllm.engine_job import Job, run_job

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
