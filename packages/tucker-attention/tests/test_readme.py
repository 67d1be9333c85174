"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"(<!-- needs: \w+ -->\n)?```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, capsys):
    needs, code = EXAMPLES[number]
    if needs:
        pytest.importorskip("transformers")
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 - our own README
    if "report" in names:
        assert len(eval(capsys.readouterr().out)) == 3  # noqa: S307 - ranks of three modes
    else:
        assert names["small"].config.ranks == (8, 128, 64)
