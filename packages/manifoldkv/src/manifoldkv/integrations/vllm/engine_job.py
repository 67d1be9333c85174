"""One engine, one load, one process: what ``manifoldkv vllm-check`` and the throughput bench start.

``python -m manifoldkv.integrations.vllm.engine_job JOB.json RESULT.json`` runs a :class:`Job`; :func:`run_job` does so
from another Python. An engine of its own for each run, since an engine leaves threads and memory behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from icml26_shared.checkpoint import atomic_write_json
from icml26_shared.errors import UserError

SETTINGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "seed": 0, "disable_log_stats": True}


@dataclass(frozen=True)
class Job:
    """A load of requests that all arrive at once.

    Attributes:
        model: folder of the model.
        prompts: texts or lists of token ids.
        new_tokens: tokens generated for each, greedily and to the end.
        plugin: settings of the plug-in, ``{"budget": 0}`` for off; whatever the environment says.
        settings: of ``vllm.LLM``.
    """

    model: str
    prompts: list[Any]
    new_tokens: int
    plugin: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobResult:
    """What happened.

    Attributes:
        pool: blocks the requests share.
        free: free blocks after each step.
        seconds: from the first step to the last, after a warm-up request.
        ids: generated token ids of each request.
        preemptions: times a request lost its blocks and had to start again.
        peak_blocks: most blocks of one request, where the plug-in is on.
        bound: most blocks of one request that the schedule allows, where the plug-in is on.
        tokens: prompt tokens and generated tokens of all requests.
    """

    pool: int
    free: list[int]
    seconds: float
    ids: list[list[int]]
    preemptions: int
    peak_blocks: int
    bound: int
    tokens: tuple[int, int]


def run_job(job: Job, python: str = sys.executable) -> JobResult:
    """Run the job in a child of its own and return what happened.

    Args:
        python: of an environment with vLLM 0.32 and this package.

    Raises:
        UserError: the child failed; the message has the last error it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        order, result = Path(folder) / "job.json", Path(folder) / "result.json"
        atomic_write_json(order, asdict(job))
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment.pop("MANIFOLDKV_BUDGET", None)
        command = [python, "-m", __name__, str(order), str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not result.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = [line for line in lines if "Error: " in line] or lines or ["no message"]
            raise UserError(f"the engine's process ended with {done.returncode}: {said[-1]}")
        found = json.loads(result.read_text(encoding="utf-8"))
    return JobResult(**{**found, "tokens": tuple(found["tokens"])})


def execute(job: Job) -> JobResult:
    """Run the job in this process."""
    from vllm import LLM, SamplingParams

    from manifoldkv.integrations.vllm import metrics

    llm = LLM(job.model, additional_config={"manifoldkv": job.plugin}, **{**SETTINGS, **job.settings})
    engine: Any = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    sampling = {"temperature": 0.0, "ignore_eos": True}
    llm.generate(_given(job.prompts[0], 64), SamplingParams(max_tokens=4, **sampling), use_tqdm=False)
    metrics.scheduler.__init__()  # type: ignore[misc]
    requests = []
    for number, prompt in enumerate(job.prompts):
        params = SamplingParams(max_tokens=job.new_tokens, **sampling)
        requests.append(engine.add_request(str(number), _given(prompt), params))
    live, free, answers, prompt_tokens = list(scheduler.requests.values()), [], {}, 0
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
                prompt_tokens += len(output.prompt_token_ids)
        free.append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    seconds = time.perf_counter() - start
    [group] = scheduler.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    bound = getattr(spec, "admission_blocks", lambda _: 0)(engine.vllm_config.max_in_flight_tokens)
    return JobResult(
        pool=scheduler.kv_cache_config.num_blocks - 1,  # the null block is nobody's
        free=free,
        seconds=seconds,
        ids=[answers[str(number)] for number in range(len(job.prompts))],
        preemptions=sum(request.num_preemptions for request in live),
        peak_blocks=metrics.scheduler.peak_blocks,
        bound=bound,
        tokens=(prompt_tokens, sum(map(len, answers.values()))),
    )


def _given(prompt: Any, length: int | None = None) -> Any:
    """As vLLM takes it, cut to ``length`` ids or characters."""
    return prompt[:length] if isinstance(prompt, str) else {"prompt_token_ids": prompt[:length]}


def main(order: str, result: str) -> None:
    job: Mapping[str, Any] = json.loads(Path(order).read_text(encoding="utf-8"))
    atomic_write_json(result, asdict(execute(Job(**job))))


if __name__ == "__main__":
    main(*sys.argv[1:])
