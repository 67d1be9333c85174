"""Two gloo processes train like one: same masks, same history, same parameters; empty micro-batches do not hang."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from dppo_gloo import train
from dppo_trl import model, model_folder

HERE = Path(__file__).parent
# SGD at a small rate, two micro-batches a process, high rates: some process gets nothing to do.
COMMON = {
    "per_device_train_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 14,
    "completion_rate": 0.9, "learning_rate": 1e-3, "loss_type": "dapo", "optim": "sgd", "max_grad_norm": 0.0,
}  # fmt: skip
SCENARIOS = {
    "padded": COMMON,
    # Rows of at most 16 tokens: the processes need different numbers of them for a micro-batch.
    "packed": {**COMMON, "pack": True, "pack_capacity": 16, "completion_rate": 0.5, "loss_type": "grpo"},
    "dead": {**COMMON, "equal_rewards": True, "max_steps": 2, "pack": True},
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By scenario: (what one process found, what each of two found). All scenarios in the same two processes."""
    folder = tmp_path_factory.mktemp("gloo")
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1",
        "DPPO_TEST_MODEL": model_folder(),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "dppo_gloo.py"), str(folder), json.dumps(SCENARIOS)]
    log = folder / "log.txt"
    with log.open("w") as file:
        pair = subprocess.Popen(
            command, env=environment, cwd=HERE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        one = {name: train(folder / f"one-{name}", options, 1) for name, options in SCENARIOS.items()}
        assert pair.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pair.pid, signal.SIGKILL)
    two = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]
    return {name: (one[name], [each[name] for each in two]) for name in SCENARIOS}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_equal_one(runs, scenario):
    one, two = runs[scenario]
    assert one["steps"] == two[0]["steps"] == two[1]["steps"] == SCENARIOS[scenario]["max_steps"]
    assert one["masks"] == two[0]["masks"] == two[1]["masks"]
    assert one["history"] == two[0]["history"] == two[1]["history"]
    assert two[0]["forwards"] == two[1]["forwards"], "collectives within a forward pass would not match"
    for other in two:
        torch.testing.assert_close(
            torch.tensor(other["parameters"]), torch.tensor(one["parameters"]), rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
def test_the_cases_of_interest_occurred(runs):
    one, two = runs["padded"]
    assert two[0]["empty"] + two[1]["empty"] > 0, "a micro-batch without a row"
    assert any(pulled > 4 for _, _, pulled in one["masks"]), "skipped prompts"
    one, two = runs["dead"]
    assert not any(any(weight) for _, weight, _ in one["masks"]), "no row on any process"
    assert two[0]["empty"] == two[1]["empty"] == 4
    start = torch.cat([p.flatten() for p in model().parameters()])
    assert torch.equal(torch.tensor(one["parameters"]), start), "zero gradients, and the steps went on"
