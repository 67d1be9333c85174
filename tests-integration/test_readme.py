"""The README's example does what it says, on a real model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT

README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_the_ten_lines_compress_the_cache_of_a_real_model(tmp_path: Path) -> None:
    from icml26_shared import models

    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    code = example[1].replace("path/to/model", str(models.path("smollm2")))
    assert code.count("\n") <= 11
    sentence = (
        "The keeper of the lighthouse wrote down the weather, the ships that passed, and what the gulls were doing. "
    )
    (tmp_path / "long_prompt.txt").write_text(sentence * 25, "utf-8")
    code += "\nprint(inputs['input_ids'].shape[1], output.shape[1], kv.cache.layers[0].keys.shape[-2])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    prompt, total, stored = map(int, answer.stdout.splitlines()[-1].split())
    assert prompt > 400
    assert stored == int(prompt * 0.5) + (total - prompt - 1)  # the last new token is not fed back


def test_the_readme_names_the_two_commands() -> None:
    assert re.search(r"^    make demo ", README, re.MULTILINE)
    assert re.search(r"^    make test ", README, re.MULTILINE)
