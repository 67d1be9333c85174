"""Which packages a change touches, as JSON for the CI's matrix: `changed.py BASE`. Standard library only.

A change in a package's folder touches it. A change in `shared/`, the constraints or the root's project file touches
all of them; one elsewhere (tools, papers, integration tests) none: the integration tests, which always run, cover it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

from workspace import ROOT, members

TOUCHES_ALL = ("shared/", "constraints.txt", "pyproject.toml", "Makefile", ".github/")


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [member.folder.name for member in members()]
    print(json.dumps(touched(_changed_files(base), names) if _is_commit(base) else names))


def touched(files: Iterable[str], names: list[str]) -> list[str]:
    """Those of `names` (folders of packages/, and shared) that a change of `files` touches, in their order."""
    files = list(files)
    if any(file.startswith(TOUCHES_ALL) for file in files):
        return list(names)
    folders = {parts[1] for file in files if len(parts := file.split("/")) > 2 and parts[0] == "packages"}
    return [name for name in names if name in folders]


def _is_commit(base: str) -> bool:
    """False for a first push, whose base is all zeros, and for a base that a shallow clone lacks."""
    command = ["git", "cat-file", "-e", f"{base}^{{commit}}"]
    return bool(base) and subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def _changed_files(base: str) -> list[str]:
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    main()
