"""Every console script keeps the same manners; what they are stands in icml26_shared.cli."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import Member, packages

EACH = pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
WITH_CLAIMS = [package for package in packages() if "claims.py" not in package.pending]


def _run(package: Member, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / package.name
    environment = {**os.environ, "COLUMNS": "100", **variables}
    return subprocess.run([str(script), *arguments], capture_output=True, text=True, env=environment)


@EACH
def test_version(package: Member) -> None:
    answer = _run(package, "--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{package.name} {package.version}\n", "")


@EACH
def test_help_names_the_standard_commands(package: Member) -> None:
    answer = _run(package, "--help")
    assert answer.returncode == 0
    assert answer.stderr == ""
    for room in ("demo", "claims", "bench"):
        assert (f"{room}.py" in package.pending) != (f"    {room} " in answer.stdout), answer.stdout
    for option in ("--version", "--json", "--seed", "--out", "--quiet"):
        assert option in answer.stdout


@EACH
@pytest.mark.parametrize("arguments", [("--no-such-option",), ("no-such-command",), ("--seed", "minus one"), ()])
def test_bad_input_is_one_line_and_exit_code_2(package: Member, arguments: tuple[str, ...]) -> None:
    answer = _run(package, *arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert answer.stderr.startswith("error: ")
    if arguments:
        assert arguments[-1] in answer.stderr


@pytest.mark.parametrize("package", WITH_CLAIMS, ids=lambda package: package.name)
def test_json_is_one_document_that_programs_read(package: Member) -> None:
    answer = _run(package, "claims", "--list", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)
    coloured = _run(package, "claims", "--list", "--json", FORCE_COLOR="1")
    assert json.loads(coloured.stdout) == json.loads(answer.stdout)


@pytest.mark.parametrize("package", WITH_CLAIMS, ids=lambda package: package.name)
def test_no_colour_without_a_terminal(package: Member) -> None:
    for variables in ({}, {"NO_COLOR": "1"}):
        answer = _run(package, "claims", "--list", **variables)
        assert answer.returncode == 0, answer.stderr
        assert "\x1b[" not in answer.stdout + answer.stderr
