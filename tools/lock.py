"""Renews constraints.txt: one version of every dependency of all members, extras and groups. Standard library only.

`make lock` keeps every present version that still fits and adds what is new; `make lock UPGRADE=1` starts afresh;
`make lock LOCK_FROM=FILE` prefers the versions of FILE (lines `name==version`) for what is new.

Resolved from the package index alone, not from find-links: the pins must hold for the torch build that everybody gets
(which pins its Triton), and a local CPU build of torch accepts the same ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from uv_tool import find_uv, uv_environment
from workspace import ROOT, members

CONSTRAINTS = ROOT / "constraints.txt"
HEADER = """\
# One tested version of every dependency of this workspace, direct and transitive: names and versions only.
# Read by uv and pip alike (-c constraints.txt). Renewed by `make lock`; see CONTRIBUTING.md.
"""
PYTHON_VERSION = "3.11"  # the oldest Python supported; its versions install on newer ones too
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;+]+)")
# torch pins the parts of its own CUDA build exactly; a second pin here could only disagree.
NOT_OURS = re.compile(r"^(nvidia-|cuda-)")


def main() -> None:
    known = {} if os.environ.get("UPGRADE") else _known_versions()
    before = pins(CONSTRAINTS.read_text("utf-8")) if CONSTRAINTS.exists() else {}
    resolved = _resolve(known)
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(resolved.items()))
    partial = CONSTRAINTS.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, CONSTRAINTS)
    _report(before, resolved)


def pins(text: str) -> dict[str, str]:
    """`{name: version}` of the lines `name==version`, without local parts such as `+cpu`."""
    found = (PIN.match(line) for line in text.splitlines())
    return {match[1].lower(): match[2] for match in found if match and not NOT_OURS.match(match[1])}


def _known_versions() -> dict[str, str]:
    known: dict[str, str] = {}
    hints = os.environ.get("LOCK_FROM")
    if hints:
        known |= pins(Path(hints).read_text("utf-8"))
    if CONSTRAINTS.exists():
        known |= pins(CONSTRAINTS.read_text("utf-8"))
    return known


def _resolve(known: dict[str, str]) -> dict[str, str]:
    """All pins; tries to keep every known version, and only if that cannot be, lets go of those in the way."""
    lines = "".join(f"{name}=={version}\n" for name, version in known.items())
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "known.txt"
        given.write_text(lines, "utf-8")
        result = _compile(["-c", str(given)])
        if known and "No solution found" in result.stderr:
            print("lock: not every present version can stay; renewing those in the way", flush=True)
            result = _compile(["--output-file", str(given)])  # uv reads an output file's pins as preferences
            text = given.read_text("utf-8")
        else:
            text = result.stdout
    if result.returncode:
        sys.stderr.write(result.stderr)
        raise SystemExit("error: the dependencies do not resolve together; the lines above say which")
    return pins(text)


def _compile(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = uv_environment()
    environment.pop("UV_FIND_LINKS", None)
    command = [find_uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    command += ["--python-version", PYTHON_VERSION, "--override", "tools/vllm-overrides.txt"]
    command += ["--override", "tools/lock-overrides.txt", *arguments]
    for group in ("dev", "peers", "vllm"):
        command += ["--group", group]
    lines = "".join(f"-e {member.requirement(member.main_extras)}\n" for member in members())
    return subprocess.run(command, cwd=ROOT, env=environment, input=lines, capture_output=True, text=True)


def _report(before: dict[str, str], after: dict[str, str]) -> None:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old != new:
            print(f"lock: {name} {old or '(new)'} -> {new or '(no longer used)'}")
    print(f"lock: {len(after)} versions in {CONSTRAINTS.name}")


if __name__ == "__main__":
    main()
