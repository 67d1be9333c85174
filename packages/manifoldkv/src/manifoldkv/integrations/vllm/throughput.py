"""Throughput under memory pressure: the same load in the same pool with the plug-in on and off."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manifoldkv.integrations.vllm.engine_job import Job, JobResult, run_job

BLOCK = 32


@dataclass(frozen=True)
class Throughput:
    """Runs of both sides, pair by pair; every run is a process of its own.

    Attributes:
        on, off: with the plug-in and without.
        dense_requests: requests that the pool holds, half way through their answers, when nothing is evicted.
    """

    on: tuple[JobResult, ...]
    off: tuple[JobResult, ...]
    dense_requests: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Throughput with the plug-in over throughput without it: the seconds of the same work, inverted."""
        return tuple(off.seconds / on.seconds for on, off in zip(self.on, self.off, strict=True))


def measure(
    model: str,
    *,
    requests: int = 8,
    prompt_tokens: int = 2048,
    new_tokens: int = 128,
    dense_requests: int = 3,
    budget: int = 384,
    metric: str = "l2",
    pairs: int = 3,
    chunk: int = 512,
    seed: int = 0,
    python: str = sys.executable,
    progress: Callable[[str], None] = lambda _: None,
) -> Throughput:
    """Serve ``requests`` prompts at once in a pool for ``dense_requests`` of them half way through their answers.

    Half way, so that the engine without the plug-in has to preempt. vLLM 0.32 admits a request only where its whole
    prompt fits into the free blocks: a pool of three bare prompts serves two and queues the third for good, and one
    of three whole requests never runs out.

    Args:
        model: folder of the model; its vocabulary must have at least 4,096 ids, of which the prompts are random ones.
        budget, metric: of the plug-in; intervals of 128 tokens, blocks of 32.
        chunk: ``max_num_batched_tokens``, the same on both sides.
        pairs: runs of each side; their order is swapped from pair to pair.
        python: of an environment with vLLM.
        progress: told what is running.

    Raises:
        UserError: an engine ended with an error.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 4096) for _ in range(prompt_tokens)] for _ in range(requests)]
    settings = {
        "block_size": BLOCK,
        "num_gpu_blocks_override": dense_requests * -(-(prompt_tokens + new_tokens // 2) // BLOCK) + 1,
        "kv_cache_memory_bytes": 4 << 30,  # an upper limit only: the pool's size is given in blocks
        "max_model_len": prompt_tokens + new_tokens,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": requests,
    }
    plugins: dict[str, dict[str, Any]] = {"on": {"budget": budget, "metric": metric}, "off": {"budget": 0}}
    runs: dict[str, list[JobResult]] = {"on": [], "off": []}
    for pair in range(pairs):
        for side in ("on", "off") if pair % 2 == 0 else ("off", "on"):
            progress(f"pair {pair + 1} of {pairs}, plug-in {side}")
            job = Job(model, prompts, new_tokens, plugins[side], settings)
            runs[side].append(run_job(job, python))
    return Throughput(tuple(runs["on"]), tuple(runs["off"]), dense_requests)
