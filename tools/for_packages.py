"""Runs one command of the console script of a package, or of all; the exit code says if any failed.

for_packages.py NAME|"" COMMAND [arguments]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workspace import member, packages


def main() -> None:
    name, command, *arguments = sys.argv[1:]
    failed = []
    for package in [member(name)] if name else packages():
        if f"{command}.py" in package.pending:
            print(f"{package.name}: {command} is still to come", flush=True)
            continue
        script = Path(sys.executable).parent / package.name
        if subprocess.run([str(script), command, *arguments]).returncode:
            failed.append(package.name)
    if failed:
        raise SystemExit(f"error: {command} failed in: {', '.join(failed)}")


if __name__ == "__main__":
    main()
