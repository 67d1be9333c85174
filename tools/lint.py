"""Lint, formatting and types over the workspace or one member: every check runs, then the exit code says if any failed.

lint.py [--fix] NAME|""
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from workspace import ROOT, member, members


def main() -> None:
    fix = "--fix" in sys.argv
    name = next((argument for argument in sys.argv[1:] if not argument.startswith("--")), "")
    where = [str(member(name).folder.relative_to(ROOT))] if name else ["."]
    if fix:
        commands = [["ruff", "check", "--fix", *where], ["ruff", "format", *where]]
    else:
        commands = [["ruff", "check", *where], ["ruff", "format", "--check", *where], _mypy(name)]
    failures = [command for command in commands if _failed(command)]
    raise SystemExit(1 if failures else 0)


def _mypy(name: str) -> list[str]:
    chosen = [member(name)] if name else members()
    paths = [str(each.source.relative_to(ROOT)) for each in chosen]
    return ["mypy", *paths] if name else ["mypy", *paths, "tools", "tests-integration/house"]


def _failed(command: list[str]) -> bool:
    print("+ " + " ".join(command), flush=True)
    program, *arguments = command
    # Every module has one name: the one under its own src folder, from wherever it is imported.
    bases = [*(each.source.parent for each in members()), ROOT / "tools", ROOT / "tests-integration"]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(str(base) for base in bases)}
    path = Path(sys.executable).parent / program
    return subprocess.run([str(path), *arguments], cwd=ROOT, env=environment).returncode != 0


if __name__ == "__main__":
    main()
