"""What the README says is so: the one-line change, and the values next to the examples."""

import re
from pathlib import Path

import pytest
import torch

from maxrl import effective_order, maxrl_advantages, pass_at_k, weight
from maxrl.eval import one_line

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_diff_is_the_one_line_change():
    block = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert [line[0] for line in block] == ["-", "+"]
    assert [line[1:].strip() for line in block] == [line[2:].strip() for line in one_line.changed_lines()]


def test_values_in_the_examples():
    got = maxrl_advantages(torch.tensor([1, 0, 0, 0, 1, 1, 0]), group_ids=["a"] * 4 + ["b"] * 3)
    torch.testing.assert_close(got, torch.tensor([3, -1, -1, -1, 0.5, 0.5, -1]))
    assert effective_order("maxrl", 16) == 15
    assert weight(0.01, order=15) == pytest.approx(13.99, abs=5e-3)
    assert pass_at_k(16, 3, 8) == 0.9
