"""The command line: rollouts of any trainer, curves, mazes, claims, a training run that is killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxrl.cli import app


def run(capsys, *argv):
    """Exit code, JSON result, stderr."""
    code = app.run([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.strip() else None, err


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_score_of_unequal_interleaved_groups(tmp_path, capsys):
    rows = [
        {"prompt_id": "b", "reward": 1, "text": "extra fields are fine"},
        {"prompt_id": "a", "reward": 0},
        {"prompt_id": "b", "reward": 0},
        {"prompt_id": "a", "reward": False},
        {"prompt_id": "b", "reward": 0},
        {"prompt_id": 7, "reward": 1.0},
        {"prompt_id": 7, "reward": True},
        {"prompt_id": "a", "reward": None},
    ]
    code, result, _ = run(capsys, "score", write(tmp_path / "r.jsonl", rows))
    assert code == 0
    assert (result["rollouts"], result["prompts"], result["unscored"]) == (8, 3, 1)
    assert result["histogram"] == [
        {"n": 2, "k": 0, "prompts": 1},
        {"n": 2, "k": 2, "prompts": 1},
        {"n": 3, "k": 1, "prompts": 1},
    ]
    assert result["share_without_success"] == pytest.approx(1 / 3)
    by_name = {row["estimator"]: row for row in result["estimators"]}
    assert by_name["maxrl"]["order"] == "1 to 2"
    assert by_name["maxrl"]["largest"] == 2
    assert by_name["maxrl"]["live_percent"] == pytest.approx(100 * 3 / 8)
    assert by_name["conditional"]["order"] == "2 to 3"
    assert by_name["grpo"]["order"] == "none"


def test_score_says_when_a_group_size_is_rloo(tmp_path, capsys):
    rows = [{"prompt_id": i // 2, "reward": i % 2} for i in range(6)]
    _, result, _ = run(capsys, "score", write(tmp_path / "r.jsonl", rows))
    assert {r["estimator"]: r["note"] for r in result["estimators"]}["maxrl"] == "with two rollouts this is RLOO"


def test_score_of_lists_thresholds_and_one_enormous_group(tmp_path, capsys):
    rows = [{"uid": "x", "score": [0.2, 0.9, 0.5]}, {"uid": "y", "score": [0.1, 0.1, 0.95]}]
    file = write(tmp_path / "r.jsonl", rows)
    options = ("--prompt-field", "uid", "--reward-field", "score")
    code, result, _ = run(capsys, "score", file, *options, "--threshold", 0.5, "--order", 2)
    assert code == 0
    assert result["histogram"] == [{"n": 3, "k": 1, "prompts": 1}, {"n": 3, "k": 2, "prompts": 1}]
    assert {r["estimator"]: r["order"] for r in result["estimators"]}["loo"] == "2"
    code, _, err = run(capsys, "score", file, *options)
    assert code == 2
    assert "reward 0.2 at row 0 is neither 0 nor 1" in err
    big = write(tmp_path / "big.jsonl", [{"prompt_id": 0, "reward": [int(i % 1000 == 0) for i in range(100_000)]}])
    code, result, _ = run(capsys, "score", big)
    assert code == 0
    assert {r["estimator"]: r["largest"] for r in result["estimators"]}["maxrl"] == pytest.approx(999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rollouts"),
        ("{}\n", "lacks 'prompt_id'"),
        ('{"prompt_id": 1, "reward": "high"}\n', "reward 'high' is no number"),
        ('{"prompt_id": 1, "reward": 1}\nnot json\n', "line 2 is not JSON"),
        ("[1, 2]\n", "an object with 'prompt_id'"),
        ('{"prompt_id": 1, "reward": -1}\n', "is negative"),
    ],
)
def test_score_of_bad_files(tmp_path, capsys, text, message):
    (tmp_path / "r.jsonl").write_text(text)
    code = app.run(["score", str(tmp_path / "r.jsonl")])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert app.run(["score", str(tmp_path / "absent.jsonl")]) == 2


def test_compare(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a = {"ks": [1, 16], "per_prompt": [[0.2, 0.6], [0.2, 0.6]]}
    b = {"ks": [1, 16], "per_prompt": [[0.1, 0.4], [0.1, 0.4]]}
    for name, curve in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(curve))
    code, result, _ = run(capsys, "compare", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "out")
    assert code == 0
    assert result["speedup"] == pytest.approx(4)
    assert "4.00 times fewer attempts" in result["conclusion"]
    assert Path(result["plot"]).stat().st_size > 1000
    code, result, _ = run(capsys, "compare", tmp_path / "b.json", tmp_path / "a.json", "--out", tmp_path / "out")
    assert result["speedup"] is None
    (tmp_path / "c.json").write_text('{"ks": [1]}')
    code, _, err = run(capsys, "compare", tmp_path / "c.json", tmp_path / "a.json")
    assert code == 2
    assert "not a coverage curve" in err


def test_maze_make_and_play(tmp_path, capsys):
    options = ("--size", 7, "--n", 5, "--seed", 3, "--out", tmp_path)
    code, made, _ = run(capsys, "maze", "make", *options)
    assert code == 0
    assert len(Path(made["file"]).read_text().splitlines()) == 5
    code, played, _ = run(capsys, "maze", "play", "--file", made["file"], "--index", 4)
    assert (code, played["passed"]) == (0, True)
    code, played, _ = run(capsys, "maze", "play", "--file", made["file"], "--actions", "UP DONE")
    assert played["passed"] is False
    code, _, err = run(capsys, "maze", "play", "--file", made["file"], "--index", 5)
    assert code == 2
    assert "holds 5 mazes" in err
    assert run(capsys, "maze", "make", "--size", 8)[0] == 2


def test_claims_list_and_a_quick_one(tmp_path, capsys):
    code, listed, _ = run(capsys, "claims", "--list")
    assert code == 0
    assert len(listed) == 11
    assert all(claim["rule"] for claim in listed)
    code, report, _ = run(capsys, "claims", "--only", "equivalence", "--out", tmp_path)
    assert code == 0
    (claim,) = report["claims"]
    assert claim["verdict"] == "holds"


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a tiny real model and tokenizer, and prompts for it."""
    pytest.importorskip("trl")
    sys.path.insert(0, str(Path(__file__).parent))
    import trl_setup

    folder = tmp_path_factory.mktemp("policy")
    trl_setup.model().save_pretrained(folder / "model")
    trl_setup.tokenizer().save_pretrained(folder / "model")
    write(folder / "data.jsonl", [{"prompt": f"{i} + {i} =", "answer": "[0-4]"} for i in range(8)])
    (folder / "config.yaml").write_text(
        "per_device_train_batch_size: 8\nnum_generations: 4\nmax_completion_length: 4\nlearning_rate: 0.003\n"
        "save_steps: 2\ngradient_checkpointing: false\n"
    )
    return folder


def train_command(policy, out, steps):
    return [
        *("train", "--model", str(policy / "model"), "--data", str(policy / "data.jsonl"), "--verifier", "regex"),
        *("--config", str(policy / "config.yaml"), "--steps", str(steps), "--out", str(out), "--dtype", "float32"),
    ]


def rows(out):
    keep = ("step", "reward", "maxrl/max_advantage", "grad_norm", "loss")
    text = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: json.loads(line)[k] for k in keep} for line in text]


@pytest.mark.slow  # a process of its own, and three training runs
def test_a_killed_training_run_resumes_to_the_same_result(policy, tmp_path, capsys):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run(capsys, *train_command(policy, straight, 8))[0] == 0
    assert (
        "8 steps of maxrl with 4 rollouts a prompt ascended the likelihood of success to order 3"
        in (straight / "report.md").read_text()
    )
    command = [sys.executable, "-c", "from maxrl.cli import main; main()", *train_command(policy, killed, 8)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if (killed / "checkpoint-2" / "maxrl_state.json").is_file():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    else:
        process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    code, result, err = run(capsys, *train_command(policy, killed, 8))
    assert code == 0, err
    assert "going on from" in err
    assert result["steps"] == 8
    assert rows(killed) == rows(straight)


def test_evaluate_and_resume(policy, tmp_path, capsys):
    command = ["evaluate", "--model", policy / "model", "--data", policy / "data.jsonl", "--verifier", "regex", "-n", 8]
    command += ["--k", "1,4,8", "--new-tokens", 3, "--temperature", 1.0, "--top-p", 1.0, "--dtype", "float32"]
    code, result, _ = run(capsys, *command, "--out", tmp_path / "a")
    assert code == 0
    assert result["ks"] == [1, 4, 8]
    assert result["mean"] == sorted(result["mean"])
    assert 0 < result["mean"][0] < 1
    partial = [*command, "--limit", 3, "--out", tmp_path / "b"]
    assert run(capsys, *partial)[0] == 0
    code, resumed, _ = run(capsys, *command, "--out", tmp_path / "b")
    assert resumed["passed"] == result["passed"]
    code, _, err = run(capsys, *command[:-8], "--k", "1,9")
    assert code == 2
    assert "every k must lie in 1..n" in err


def test_bad_training_input(policy, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("estimater: loo\n")
    command = train_command(policy, tmp_path / "o", 1)
    command[command.index("--config") + 1] = str(tmp_path / "bad.yaml")
    code, _, err = run(capsys, *command)
    assert (code, "MaxRLConfig has no estimater" in err) == (2, True)
    (tmp_path / "bad.yaml").write_text("scale_rewards: none\n")
    code, _, err = run(capsys, *command)
    assert (code, "would be ignored" in err) == (2, True)
    code, _, err = run(capsys, *train_command(policy, tmp_path / "o", 1), "--resume", "nowhere")
    assert (code, "auto, no, or a checkpoint folder" in err) == (2, True)
