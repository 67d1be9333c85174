"""The README's example does what it says."""

import re
from pathlib import Path


def test_the_example_trains_and_reports(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    scope = {}
    exec(example[1], scope)  # noqa: S102 - our own
    controller = scope["controller"]
    assert controller.step_count == 3
    assert [entry["step"] for entry in controller.history] == [1]
    assert max(controller.ratios.values()) == 1 + 2 * 2 / 20  # two of twenty steps towards 3
    said = capsys.readouterr().out
    assert all(name in said for name in ("embedding: not fitted", "head: not fitted"))
    assert len(controller.alphas) == 2
