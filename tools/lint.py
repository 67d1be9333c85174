"""Lint, formatting and types over the workspace or one member: every check runs, then the exit code says if any failed.

lint.py [--fix] NAME|""
"""

from __future__ import annotations

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
    return subprocess.run([str(Path(sys.executable).parent / program), *arguments], cwd=ROOT).returncode != 0


if __name__ == "__main__":
    main()
