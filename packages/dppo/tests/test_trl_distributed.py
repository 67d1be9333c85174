"""Two gloo processes train like one: same masks, same history, same parameters; empty micro-batches do not hang."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from dppo_trl import model_folder

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder: Path, world: int, options: dict) -> list[dict]:
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1",
        "DPPO_TEST_MODEL": model_folder(),
    }  # fmt: skip
    if world == 1:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name)
    processes = []
    for rank in range(world):
        ranks = {} if world == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(HERE / "dppo_gloo.py"), str(folder), json.dumps(options)]
        processes.append(
            subprocess.Popen(
                command,
                env={**environment, **ranks},
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=240)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, output in zip(processes, outputs, strict=True):
        assert p.returncode == 0, output[-3000:]
    return [json.loads((folder / f"result-{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """SGD-like steps at a small rate, two micro-batches a process, high rates: some process gets nothing to do."""
    options = {
        "per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 14,
        "completion_rate": 0.9, "learning_rate": 1e-3, "loss_type": "dapo", "optim": "sgd", "max_grad_norm": 0.0,
    }  # fmt: skip
    model_folder()  # before the threads: both runs start from the same model
    with ThreadPoolExecutor() as pool:  # at the same time: most of it is imports
        (one,), two = pool.map(lambda world: run(tmp_path, world, options), (1, 2))
    assert one["steps"] == two[0]["steps"] == two[1]["steps"] == 14
    assert one["masks"] == two[0]["masks"] == two[1]["masks"]
    assert one["history"] == two[0]["history"] == two[1]["history"]
    assert two[0]["empty"] + two[1]["empty"] > 0, "the case of interest occurred"
    for other in two:
        torch.testing.assert_close(
            torch.tensor(other["parameters"]), torch.tensor(one["parameters"]), rtol=1e-4, atol=1e-6
        )
    assert any(pulled > 4 for _, _, pulled in one["masks"])
