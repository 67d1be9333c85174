"""The console script's manners, and each command on a small checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file

from layerwise_lr import __version__, analyze
from layerwise_lr.cli import app


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"layerwise-lr {__version__}\n"


def test_unknown_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def checkpoint(make_model, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(make_model().state_dict(), path)
    return path


def run(capsys, *arguments):
    """Exit code and JSON result."""
    code = app.run([*map(str, arguments), "--json", "--quiet"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_analyze_writes_what_it_says(checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    code, result = run(
        capsys, "analyze", checkpoint, "--csv", tmp_path / "out.csv", "--png", tmp_path / "esd", "--fit", "gof"
    )
    assert code == 0
    expected = {r.name: r.alpha for r in analyze(checkpoint, fit="gof") if r.fitted}
    assert {r["name"]: r["alpha"] for r in result["layers"] if not r["note"]} == pytest.approx(expected)
    assert (tmp_path / "out.csv").read_text().count("\n") == len(result["layers"]) + 1
    assert len(result["plots"]) == 6
    assert (tmp_path / "esd" / "layers.0.mix.png").stat().st_size > 5000


def test_plan(checkpoint, capsys):
    code, result = run(capsys, "plan", checkpoint, "--s2", 5, "--lr", 1e-3)
    assert code == 0
    rows = {row["name"]: row for row in result["ratios"]}
    assert min(r["ratio"] for r in rows.values()) == 1
    assert rows["embed"]["ratio"] == rows["head"]["ratio"] == 5
    assert rows["embed"]["lr"] == 5e-3
    alphas = {name: row["alpha"] for name, row in rows.items() if row["alpha"] is not None}
    assert rows[max(alphas, key=alphas.get)]["ratio"] == 5


def test_compare(checkpoint, make_model, tmp_path, capsys):
    moved = make_model()
    with torch.no_grad():
        moved.layers[1].up.weight *= 1.5
    save_file(moved.state_dict(), tmp_path / "b.safetensors")
    code, result = run(capsys, "compare", checkpoint, tmp_path / "b.safetensors")
    assert code == 0
    first = result["layers"][0]
    assert (first["name"], first["moved"]) == ("layers.1.up", pytest.approx(0.5))
    assert first["change"] == pytest.approx(0, abs=1e-6)
    assert all(row["moved"] == 0 for row in result["layers"][1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("analyze", "nowhere"), "nowhere does not exist"),
        (("plan", "CHECKPOINT", "--s1", "3", "--s2", "1"), "0 < s1 <= s2, got s1 = 3.0, s2 = 1.0"),
        (("plan", "CHECKPOINT", "--lr", "-1"), "--lr -1.0 must be positive"),
        (("analyze", "CHECKPOINT", "--min-dim", "1"), "min_dim must be at least 2, got 1"),
        (("pretrain", "--suite", "llama60m", "--root", "nowhere", "--tokenizer", "nobody"), "nobody is not a folder"),
        (("pretrain", "--suite", "llama60m", "--root", ".", "--tokenizer", ".", "--micro", "0"), "--micro 0"),
        (("demo", "--text", "nothing.txt"), "nothing.txt is not a file"),
    ],
)
def test_bad_input_is_one_line(arguments, message, checkpoint, capsys, tmp_path):
    given = [str(checkpoint) if a == "CHECKPOINT" else a for a in arguments]
    code, said = run(capsys, *given, "--out", tmp_path / "out")
    assert code == 2, said
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_compare_refuses_two_models(checkpoint, make_model, tmp_path, capsys):
    save_file({"other.weight": torch.randn(60, 60)}, tmp_path / "b.safetensors")
    code, said = run(capsys, "compare", checkpoint, tmp_path / "b.safetensors")
    assert (code, "no matrix of the same name" in said) == (2, True)
    save_file(make_model(width=70).state_dict(), tmp_path / "c.safetensors")
    code, said = run(capsys, "compare", checkpoint, tmp_path / "c.safetensors")
    assert (code, "layers.0.down is (64, 128)" in said) == (2, True)
