"""The command line: help, audit, pack, train, demo, and their errors."""

import json
import subprocess
import sys

import pytest

from dppo import __version__
from dppo.cli import app
from dppo.cli_train import find_checkpoint, find_verifier, read_config, read_data
from dppo.demo import _conclusion as conclusion
from dppo.learning import Curve


def run_json(capsys, *argv):
    code = app.run([*argv, "--json", "--quiet"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def log(path):
    rows = [
        {"prompt_id": p, "reward": r, "length": 10}
        for p in "abab"
        for r in ((1, 0, 0, 0) if p == "a" else (1, 1, 0, 0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_version_help_and_import_weight():
    done = subprocess.run([sys.executable, "-m", "dppo", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout
    code = (
        "import dppo, sys; from dppo import pack_window, prune_completions, PromptHistory, audit_unbiasedness; "
        "print([m for m in ('transformers', 'trl', 'datasets', 'sklearn', 'matplotlib', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.strip()
    assert loaded in ("[]", "['triton']"), loaded


def test_audit(tmp_path, capsys):
    result = run_json(capsys, "audit", log(tmp_path / "run.jsonl"), "--batch-prompts", "2")
    assert result["completions"] == 16
    assert result["bias"]["dppo"]["signal_lost"] == 0
    assert result["bias"]["cppo"]["signal_lost"] > 0
    assert result["speedup_tokens"] > 1
    assert app.run(["audit", log(tmp_path / "run.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "without bias" in text
    assert "CPPO would lose" in text


def test_audit_errors(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert app.run(["audit", str(tmp_path / "bad.jsonl")]) == 2
    assert "line 1: no 'prompt_id'" in capsys.readouterr().err
    assert app.run(["audit", log(tmp_path / "run.jsonl"), "--prompt-rate", "1"]) == 2
    assert "support condition" in capsys.readouterr().err
    assert app.run(["audit", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_pack(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [6, 5, 4, 3, 3, 2, 7, 1, 4, 5])))
    result = run_json(capsys, "pack", str(path), "--capacity", "10", "--window", "4")
    rows = {r["packer"]: (r["rows"], r["density"]) for r in result["packers"]}
    assert rows["window 4"] == (4, 1.0)
    assert rows["next fit (window 1)"] == (5, 0.8)
    assert app.run(["pack", str(path), "--capacity", "5"]) == 2
    assert "raise the capacity" in capsys.readouterr().err
    assert app.run(["pack", str(path), "--capacity", "5", "--overflow", "own_row"]) == 0


def test_demo_writes_figure_and_result(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    result = run_json(capsys, "demo", "--steps", "26", "--out", str(tmp_path))
    assert set(result["runs"]) == {"GRPO (full batch)", "DPPO .5/.5", "DPPO .7/.7", "CPPO .5", "GRESO"}
    assert result["runs"]["GRPO (full batch)"]["updated"] == result["runs"]["GRPO (full batch)"]["generated"]
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert len(saved["curves"]["GRESO"]["accuracy"]) == 3
    assert app.run(["demo", "--steps", "-1"]) == 2


def test_demo_concludes_from_the_figures():
    def curve(accuracy, cost):
        return Curve([0, 1, 2], accuracy, [0, cost, 2 * cost], [0, 0, 0], [0] * 3, [0.0] * 3, [0.0] * 3, [0] * 3)

    names = ("GRPO (full batch)", "DPPO .5/.5")
    same = dict(zip(names, (curve([0.0, 0.3, 0.6], 100), curve([0.0, 0.3, 0.6], 60)), strict=True))
    assert "reached accuracy 0.300 with 60% of the tokens" in conclusion(same)
    dearer = dict(zip(names, (curve([0.0, 0.3, 0.6], 100), curve([0.0, 0.3, 0.6], 150)), strict=True))
    assert "with 150% of the tokens" in conclusion(dearer)
    worse = dict(zip(names, (curve([0.5, 0.3, 0.1], 100), curve([0.5, 0.6, 0.7], 60)), strict=True))
    assert "gained nothing" in conclusion(worse)


def test_claims_are_listed(capsys):
    from dppo.claims import CLAIMS

    ids = [claim.id for claim in CLAIMS]
    assert ids == [
        "unbiased",
        "same-path",
        "faster",
        "equal-budget",
        "qwen3-4b-math",
        "packing",
        "variance",
        "loss-types",
    ]
    assert app.run(["claims", "--list"]) == 0
    out = capsys.readouterr().out
    assert "unbiased" in out


@pytest.mark.parametrize("claim", ["unbiased", "loss-types"])
def test_exact_claims_hold(claim, tmp_path, capsys):
    result = run_json(capsys, "claims", "--only", claim, "--out", str(tmp_path))
    (only,) = result["claims"]
    assert only["verdict"] == "holds", only


def test_train_end_to_end_and_resume(tmp_path, capsys):
    pytest.importorskip("trl")
    import dppo_trl as small

    folder = tmp_path / "model"
    small.model().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": "w3"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = {
        "model": str(folder), "data": str(tmp_path / "data.jsonl"), "verifier": "contains",
        "output_dir": str(tmp_path / "run"),
        "trainer": {
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 2,
            "save_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True, "logging_steps": 1, "pack": True,
            "gradient_accumulation_steps": 1,
        },
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    assert app.run(["train", "--config", str(path), "--quiet"]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2]
    assert "speedup_tokens" in (tmp_path / "run" / "report.md").read_text()
    for step, state in ((7, None), (8, '{"epoch": 0.')):  # killed while it saved
        (tmp_path / "run" / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    config["trainer"]["max_steps"] = 3
    path.write_text(json.dumps(config))
    assert app.run(["train", "--config", str(path)]) == 0
    assert f"resuming from {tmp_path / 'run' / 'checkpoint-2'}" in capsys.readouterr().err.replace("\n", "")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3]
    config["trainer"]["learning_speed"] = 3
    path.write_text(json.dumps(config))
    assert app.run(["train", "--config", str(path)]) == 2
    assert "learning_speed" in capsys.readouterr().err


def test_training_config_errors(tmp_path):
    path = tmp_path / "c.yaml"
    for text, message in (
        ("a: [", "is not YAML"),
        ("- 1", "must hold keys and values"),
        ("model: x\nspeed: 3", "unknown speed; missing data, output_dir"),
    ):
        path.write_text(text)
        with pytest.raises(Exception, match=message):
            read_config(path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(Exception, match="line 1: expected an object with prompt and answer"):
        read_data(tmp_path / "d.jsonl")
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path / "nothing"))
    assert find_checkpoint(tmp_path, "no") is None
    assert find_checkpoint(tmp_path / "nothing", "auto") is None


def test_verifiers():
    assert find_verifier("exact")(" 12 ", "12")
    assert find_verifier("contains")("it is 12.", "12")
    assert find_verifier("boxed")(r"\boxed{3} so \boxed{12}", "12")
    assert not find_verifier("boxed")("12", "12")
    assert find_verifier("number")("from 3 to 1,200", "1200")
    assert find_verifier("operator:eq")("a", "a")
    with pytest.raises(Exception, match="one of exact"):
        find_verifier("maths")
    with pytest.raises(Exception, match="cannot be imported"):
        find_verifier("operator:nothing")
