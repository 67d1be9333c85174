"""The console script's manners."""

import pytest

from robuq import __version__
from robuq.cli import app


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"robuq {__version__}\n"


def test_unknown_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--no-such-option"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
