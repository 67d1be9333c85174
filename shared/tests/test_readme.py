"""The README's examples run as they stand, in order, in one empty folder."""

import json
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^(<!-- needs: models -->\n)?```python\n(.*?)^```$", re.M | re.S)


def test_examples_do_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = [code for marked, code in BLOCK.findall(README.read_text()) if not marked]
    assert len(blocks) >= 6
    scope = {"__name__": "readme"}
    for code in blocks:
        exec(compile(code, "README.md", "exec"), scope)  # noqa: S102 - our own examples
    assert scope["exit_code"] == 0
    assert '{\n  "to": 4,\n  "sum": 10\n}\n' in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rows": 3, "loss": None}
    assert scope["app"].run(["count", "--to", "0"]) == 2
    assert capsys.readouterr().err == "error: --to 0 must be 1 or more\n"
    scope["app"].standard(claims=scope["CLAIMS"])
    assert scope["app"].run(["claims", "--json"]) == 0
    verdicts = [claim["verdict"] for claim in json.loads(capsys.readouterr().out)["claims"]]
    assert verdicts == ["holds", "needs: a GPU with 24 GB"]
    assert {path.name for path in tmp_path.iterdir()} >= {"accuracy.png", "accuracy.svg", "run.safetensors"}


def test_every_module_of_the_package_is_in_the_readme():
    text = README.read_text()
    folder = README.parent / "src" / "icml26_shared"
    public = {path.stem for path in folder.iterdir() if not path.name.startswith(("_", "py.typed"))}
    # parts of `models`, `claims` and `bench` that are used through them
    inner = {"tiny_models", "model_store", "model_conversion", "claims_report", "bench_report"}
    missing = [name for name in sorted(public - inner) if f"`{name}`" not in text]
    assert missing == []
