"""The console script's manners, and each command on a small model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tucker_attention import __version__
from tucker_attention.cli import app


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"tucker-attention {__version__}\n"


def test_unknown_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def run(capsys, *arguments):
    """Exit code and JSON result, or the error."""
    code = app.run([*map(str, arguments), "--json", "--quiet"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_count_is_the_papers_table(capsys):
    code, result = run(capsys, "count", "--config", "gpt2")
    assert code == 0
    found = {row["attention"]: row for row in result["rows"]}
    for name, megabytes in (
        ("MHA", 56.62), ("GQA-4", 37.74), ("GQA-2", 33.02), ("MLA-128", 26.0), ("Tucker [8, 128, 64]", 10.24),
    ):  # fmt: skip
        assert abs(found[name]["megabytes"] - megabytes) <= 0.06
    assert found["Tucker [8, 128, 64]"]["percent"] == pytest.approx(18.06, abs=0.01)
    assert found["Tucker [8, 64, 64]"]["cache"] == 128
    code, error = run(capsys, "count", "--ranks", "13,4,4")
    assert (code, "are above the modes (12, 768, 768)" in error) == (2, True)
    code, error = run(capsys, "count", "--ranks", "a,b")
    assert (code, "three whole numbers such as 8,128,64" in error) == (2, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small BERT with a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    (path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["r.html", "r.csv", "r.png"])
def test_spectra(folder, tmp_path, capsys, name):
    code, result = run(capsys, "spectra", folder, "--report", name, "--out", tmp_path)
    assert code == 0
    assert result["layers"][0]["ranks"]["W"]["1"] == [4, 16, 16]
    assert len(result["layers"][0]["singular_values"]["Wt"]["value"]) == 16
    assert (tmp_path / name).stat().st_size > 100


def test_convert(folder, tmp_path, capsys):
    from tucker_attention.integrations.transformers import from_pretrained

    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 40}" for i in range(600)))
    code, result = run(capsys, "convert", folder, "--ranks", "2,6,4", "--text", text, "--out", tmp_path / "small")
    assert code == 0
    assert result["after"] < result["before"]
    model = from_pretrained(tmp_path / "small")
    assert model.encoder.layer[0].attention.self.tucker.config.ranks == (2, 6, 4)
    code, _ = run(capsys, "convert", folder, "--energy", 1.0, "--out", tmp_path / "whole")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spectra", "/no/such/model"], "no model '/no/such/model'"),
        (["spectra", "minilm", "--report", "x.pdf"], "must end in .html, .csv or .png"),
        (["spectra", "minilm", "--energy", "2"], "--energy must be in (0, 1], got 2.0"),
        (["convert", "minilm"], "one of the arguments --energy --ranks --budget is required"),
        (["count", "--heads", "7"], "does not divide among 7 heads"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    assert app.run([*arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.slow  # a process of its own
def test_killed_claims_go_on_where_they_were(tmp_path, capsys):
    chosen = [f"--only={name}" for name in ("special-cases", "gpt2-parameters", "kv-cache", "flash", "rope")]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    code, expected = run(capsys, "claims", *chosen, "--out", straight)
    assert code == 0
    command = [sys.executable, "-m", "tucker_attention", "claims", *chosen, "--quiet", "--out", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    kept = killed / "claims.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if kept.is_file() and b"special-cases" in kept.read_bytes():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    else:
        process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    before = kept.read_bytes()
    assert not (killed / "claims.json").exists()
    code, found = run(capsys, "claims", *chosen, "--out", killed)
    assert code == 0
    assert kept.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert "special-cases" in before.decode()
    # flash measures memory, which is not the same number twice
    figures = [
        {c["id"]: (c["verdict"], c["measurements"]) for c in each["claims"] if c["id"] != "flash"}
        for each in (found, expected)
    ]
    assert figures[0] == figures[1]
    assert {c["id"] for c in found["claims"]} == {name.removeprefix("--only=") for name in chosen}
