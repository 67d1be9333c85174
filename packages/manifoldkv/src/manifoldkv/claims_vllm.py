"""The claim about vLLM, checked in its environment: blocks of evicted tokens are freed, and nothing else changes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

from icml26_shared.claims import ClaimContext, Measurement

if TYPE_CHECKING:
    from manifoldkv.integrations.vllm.engine_job import JobResult

PYTHON = ".venv-vllm/bin/python"
_BLOCK = 32  # tokens
_POOL = 20  # blocks, too few for the load below
_PLUGIN = {"budget": 64, "sink": 32, "recent": 32, "interval": 32, "metric": "l2"}
_HEAD_DIM, _LAYERS, _KV_HEADS = 32, 2, 2


def needs(ctx: ClaimContext) -> str | None:
    """What is missing here."""
    return None if Path(PYTHON).exists() else "vLLM 0.32 in .venv-vllm"


def check(ctx: ClaimContext) -> dict[str, Measurement]:
    """16 mixed requests in a pool too small for them, the same one at a time, and one request longer than the pool."""
    together, alone, long = engine_runs(ctx)
    equal = [float(a == b) for a, b in zip(together.ids, alone.ids, strict=True)]
    rises = sum(after > before for before, after in itertools.pairwise(long.free[:-1]))
    return {
        "answers equal to one at a time": Measurement(equal),
        "blocks not returned": Measurement([run.pool - run.free[-1] for run in (together, alone, long)]),
        "times the free blocks rose during one request": Measurement(rises),
        "tokens of the long request / tokens in the pool": Measurement(sum(long.tokens) / (_BLOCK * long.pool)),
        "most blocks of a request / bound": Measurement(together.peak_blocks / together.bound),
        "preemptions": Measurement(together.preemptions),
    }


def engine_runs(ctx: ClaimContext) -> list[JobResult]:
    """Each in a process of vLLM's environment, on a small random Llama in float32."""
    from icml26_shared.models import tiny_llama
    from manifoldkv.integrations.vllm.engine_job import Job, run_job

    folder = str(ctx.out_file("claims-vllm-model"))
    heads = {"num_hidden_layers": _LAYERS, "num_key_value_heads": _KV_HEADS, "num_attention_heads": 4}
    model = tiny_llama(vocab_size=2048, max_position_embeddings=2048, hidden_size=4 * _HEAD_DIM, **heads)
    model.save_pretrained(folder)
    draw = random.Random(ctx.seed)
    mixed = [draw.sample(range(3, 2048), draw.randint(20, 400)) for _ in range(16)]
    long = [draw.sample(range(3, 2048), 1000)]
    settings = {"block_size": _BLOCK, "max_model_len": 2048, "skip_tokenizer_init": True}
    settings["kv_cache_memory_bytes"] = 256 << 20  # an upper limit only: the pool's size is given in blocks
    small = {**settings, "num_gpu_blocks_override": _POOL + 1}
    large = {**settings, "num_gpu_blocks_override": 16 * _POOL + 1, "max_num_seqs": 1}
    # A prompt in chunks is compressed chunk by chunk, and under load the chunks depend on the other requests.
    # A step takes the longest request whole, and no more, for which the small pool would be refused.
    whole = {"enable_chunked_prefill": False, "max_model_len": 480, "max_num_batched_tokens": 480}
    jobs = [
        Job(folder, mixed, 40, _PLUGIN, {**small, **whole}),
        Job(folder, mixed, 40, _PLUGIN, {**large, **whole}),
        Job(folder, long, 200, _PLUGIN, {**small, "max_num_batched_tokens": 256}),
    ]
    return [run_job(job, PYTHON) for job in ctx.track(jobs, "vLLM engines")]
