"""The console script's manners, and each command on a small model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from robuq import __version__
from robuq.cli import app
from robuq.cli_qat import read_config
from robuq.config import RobuQConfig
from robuq.eval.tiny_dit import TinyDiT
from robuq.integrations.pretrained import load_pretrained
from robuq.surgery import quantised_layers
from robuq.training import QATConfig


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"robuq {__version__}\n"


def test_unknown_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = TinyDiT(depth=1)
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    path = tmp_path_factory.mktemp("dit") / "dit.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def inputs(checkpoint):
    g = torch.Generator().manual_seed(0)
    path = checkpoint.parent / "inputs.safetensors"
    t, y = torch.randint(0, 1000, (16,), generator=g), torch.randint(0, 10, (16,), generator=g)
    save_file({"x": torch.randn(16, 1, 8, 8, generator=g), "t": t, "y": y}, path)
    return path


def run(capsys, *arguments):
    """Exit code and JSON result."""
    code = app.run([*map(str, arguments), "--json", "--quiet"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_quantize_inspect_export(checkpoint, inputs, tmp_path, capsys):
    packed = tmp_path / "packed"
    code, result = run(capsys, "quantize", checkpoint, "--preset", "dit", "--bits", 2, "--rank", 4, "--out", packed)
    assert code == 0
    assert result["layers"] == 5
    assert result["float32_bytes"] > 5 * result["packed_bytes"]
    code, report = run(capsys, "inspect", packed, "--data", inputs)
    assert code == 0
    by_name = {row["name"]: row for row in report["layers"]}
    assert by_name["blocks.0.attn.qkv"]["bits"] == 2
    assert 0.05 < by_name["blocks.0.attn.qkv"]["nmse"] < 0.25
    code, plain = run(capsys, "inspect", packed)
    assert code == 0
    assert all(row["nmse"] is None for row in plain["layers"])
    for kind in ("safetensors", "bitnet", "tq2_0"):
        if kind == "tq2_0":
            pytest.importorskip("gguf")
        code, result = run(capsys, "export", packed, "--format", kind, "--out", tmp_path / kind)
        assert code == 0
    same = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert all(torch.equal(same[name], tensor) for name, tensor in load_file(packed / "model.safetensors").items())


def test_sensitivity_allocate_quantize(checkpoint, inputs, tmp_path, capsys):
    out = tmp_path / "plan"
    code, result = run(
        capsys, "sensitivity", checkpoint, "--preset", "dit", "--rank", 2, "--data", inputs, "--out", out
    )
    assert code == 0
    assert set(result["macs"]) == {f"blocks.0.{n}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    code, plan = run(capsys, "allocate", out / "sens.json", "--avg", 2, "--out", out)
    assert code == 0
    assert plan["avg"] <= 2
    code, _ = run(
        capsys, "quantize", checkpoint, "--preset", "dit", "--plan", out / "plan.json", "--out", tmp_path / "q"
    )
    assert code == 0
    told = json.loads((tmp_path / "q" / "robuq.json").read_text())
    assert {name: told["layers"][name]["bits"] for name in plan["bits"]} == plan["bits"]
    code, error = run(capsys, "allocate", out / "sens.json", "--avg", 0.5, "--out", out)
    assert code == 2
    assert "cannot be met" in error


def test_qat_runs_and_goes_on(checkpoint, tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("yaml")
    big = tmp_path / "fp.safetensors"
    torch.manual_seed(0)
    save_file(TinyDiT().state_dict(), big)
    config = tmp_path / "qat.yaml"
    config.write_text(
        f"task: digits\npreset: dit\ncheckpoint: {big}\nquantization: {{rank: 2, attn_bits: null}}\n"
        "training: {steps: 4, lr: 0.001, lr_warmup: 1, ema: 0.5, avg_bits: 2.0, warm: 2, save_every: 2}\n"
    )
    code, result = run(capsys, "qat", config, "--out", tmp_path / "run")
    assert code == 0
    assert result["steps"] == 4
    assert result["plan"]["avg"] <= 2
    assert (tmp_path / "run" / "packed" / "robuq.json").is_file()
    code, again = run(capsys, "qat", config, "--out", tmp_path / "run")
    assert code == 0
    assert again["plan"] == result["plan"]


def test_the_gain_is_decided_on_data(checkpoint, inputs, tmp_path, capsys):
    arguments = ("quantize", checkpoint, "--preset", "dit", "--bits", 2, "--rank", 4, "--gain")
    found = {}
    for gain in ("mse", "unbiased", "auto"):
        code, result = run(capsys, *arguments, gain, "--data", inputs, "--out", tmp_path / gain)
        assert code == 0
        found[gain] = result["gain"]
        told = json.loads((tmp_path / gain / "robuq.json").read_text())
        assert {row["unbiased"] for row in told["layers"].values()} == {result["gain"] == "unbiased"}
    batch = load_file(inputs)
    outputs = {}
    for gain in ("mse", "unbiased"):
        model = load_pretrained(tmp_path / gain, lambda: TinyDiT(depth=1))
        outputs[gain] = model(**batch)
        for _, layer in quantised_layers(model):
            layer.bits = 16
        exact = model(**batch)
    better = min(outputs, key=lambda gain: float((outputs[gain] - exact).square().mean()))
    assert found == {"mse": "mse", "unbiased": "unbiased", "auto": better}


@pytest.mark.parametrize("key", ["checkpoint", "data"])
def test_the_shipped_configuration_says_what_is_missing(key, tmp_path, capsys, monkeypatch):
    pytest.importorskip("yaml")
    config = Path(__file__).parents[1] / "configs" / "dit_xl_a2.yaml"
    told = read_config(config)
    assert told["task"] == "latents"
    assert QATConfig(**told["training"]).avg_bits == 2
    assert RobuQConfig.for_dit(**told["quantization"]).attn_bits == 8
    monkeypatch.chdir(tmp_path)
    if key == "data":
        Path(told["checkpoint"]).touch()
    assert app.run(["qat", str(config), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"there is no {key} {told[key]!r} here" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "/no/such/model"], "no checkpoint '/no/such/model'"),
        (["quantize", "smollm2", "--bits", "11"], "act_bits must be 1 to 8"),
        (["sensitivity", "smollm2"], "needs calibration data"),
        (["inspect", "/no/such/folder"], "no folder"),
        (["allocate", "/no/such/file", "--avg", "2"], "/no/such/file"),
        (["qat", "/no/such/file.yaml"], "/no/such/file.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    assert app.run([*arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_bad_files_are_one_line(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("task: dream\n")
    assert app.run(["qat", str(tmp_path / "bad.yaml"), "--out", str(tmp_path / "o")]) == 2
    assert "must have task: one of digits, latents, text" in capsys.readouterr().err
    (tmp_path / "sens.json").write_text("{}")
    assert app.run(["allocate", str(tmp_path / "sens.json"), "--avg", "2"]) == 2
    assert "is not what robuq sensitivity writes" in capsys.readouterr().err
