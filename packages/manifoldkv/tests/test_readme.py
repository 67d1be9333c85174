"""The README's Python blocks do what they say."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

README = Path(__file__).parents[1] / "README.md"
SMALLER = {"budget=512": "budget=40", 'dtype="bfloat16"': 'dtype="float32"', "max_new_tokens=100": "max_new_tokens=4"}


def test_blocks_run_one_after_the_other(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long_prompt.txt").write_text(
        "the sky is blue . the grass is green . the sun is yellow . here we go . " * 4
    )
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        for given, smaller in {**SMALLER, "path/to/model": str(tiny_folder)}.items():
            block = block.replace(given, smaller)
        exec(compile(block, str(README), "exec"), names)  # noqa: S102
    prompt = names["inputs"]["input_ids"].shape[1]
    assert "stored_length=41" in capsys.readouterr().out  # half of 76, and the generated ones but the last
    assert names["cache"].stats()[0].stored_length > 40  # 40 of the prompt, and what came after it
    assert names["out"].shape[1] > prompt + names["question"].shape[1]
