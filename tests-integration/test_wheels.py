"""Every wheel builds, and works alone in an empty environment with nothing but its declared dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from uv_tool import find_uv, uv_environment
from workspace import ROOT, Member, members, packages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every member, built as `make build` does."""
    folder = tmp_path_factory.mktemp("dist")
    for member in members():
        command = [sys.executable, str(ROOT / "tools" / "build.py"), "--out", str(folder), member.name]
        answer = subprocess.run(command, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


def _wheel(dist: Path, member: Member) -> Path:
    return dist / f"{member.module}-{member.version}-py3-none-any.whl"


@pytest.mark.parametrize("member", members(), ids=lambda member: member.name)
def test_a_wheel_holds_the_package_and_nothing_else(dist: Path, member: Member) -> None:
    with zipfile.ZipFile(_wheel(dist, member)) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"{member.module}-{member.version}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {member.module, f"{member.module}-{member.version}.dist-info"}
    assert f"{member.module}/py.typed" in names
    sources = {path.relative_to(member.source.parent).as_posix() for path in member.source.rglob("*.py")}
    assert sources <= names
    assert not any("__pycache__" in name for name in names)
    assert (dist / f"{member.module}-{member.version}.tar.gz").is_file()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Version: {member.version}\n" in metadata
    assert "file://" not in metadata  # the workspace's sources must not leak into what is published


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_wheel_works_alone_in_an_empty_environment(dist: Path, package: Member, tmp_path: Path) -> None:
    python = _empty_environment(tmp_path)
    _install(python, dist, package)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    script = str(python.parent / package.name)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    version, usage = run(script, "--version"), run(script, "--help")
    assert (version.returncode, version.stdout) == (0, f"{package.name} {package.version}\n"), version.stderr
    assert usage.returncode == 0, usage.stderr
    assert package.name in usage.stdout
    where = run(str(python), "-c", f"import {package.module}; print({package.module}.__file__)")
    assert where.returncode == 0, where.stderr
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)


def _empty_environment(folder: Path) -> Path:
    command = [find_uv(), "venv", "--quiet", "--python", sys.executable, str(folder / "venv")]
    subprocess.run(command, check=True, env=uv_environment())
    return folder / "venv" / "bin" / "python"


def _install(python: Path, dist: Path, package: Member) -> None:
    """The wheel with its declared dependencies; the shared one from `dist`, all others from the index or uv's cache."""
    shared = _wheel(dist, members()[0])
    command = [find_uv(), "pip", "install", "--quiet", "--python", str(python), "-c", str(ROOT / "constraints.txt")]
    command += [str(_wheel(dist, package)), str(shared)]
    answer = subprocess.run(command, cwd=dist, env=uv_environment(), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
