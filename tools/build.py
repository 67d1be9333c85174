"""Builds wheels and source archives into dist/. Standard library only.

build.py [NAME]               every member, or one
build.py --tag NAME-vX.Y.Z    one member for a release: the tag must say the version that the package has
build.py --out DIR ...        into another folder
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from uv_tool import find_uv, uv_environment
from workspace import ROOT, Member, member, members

TAG = re.compile(r"^(?P<name>[a-z0-9][a-z0-9-]*)-v(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)$")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheels and source archives.")
    parser.add_argument("name", nargs="?", default="", help="one member; default: all")
    parser.add_argument("--tag", help="NAME-vX.Y.Z: build what this release tag names")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for what is built; default: dist")
    arguments = parser.parse_args()
    if arguments.tag is not None:
        chosen = [release(arguments.tag)]
    else:
        chosen = [member(arguments.name)] if arguments.name else members()
    for each in chosen:
        build(each, arguments.out)


def release(tag: str) -> Member:
    """The member that `tag` releases; SystemExit if the tag is malformed, disagrees or the package is unfinished."""
    found = TAG.match(tag)
    if found is None:
        raise SystemExit(f"error: {tag!r} is not a release tag; it looks like NAME-vX.Y.Z, e.g. manifoldkv-v0.1.0")
    chosen = member(found["name"])
    if chosen.version != found["version"]:
        raise SystemExit(f"error: tag {tag} says {found['version']}, but {chosen.name} has version {chosen.version}")
    if chosen.pending:
        raise SystemExit(f"error: {chosen.name} is not finished; still to come: {', '.join(chosen.pending)}")
    return chosen


def build(chosen: Member, out: Path) -> None:
    """Builds the wheel and the source archive of one member into `out`, with the pinned build backend."""
    command = [find_uv(), "build", "--quiet", "--build-constraint", "constraints.txt", "--out-dir", str(out)]
    command += ["--python", sys.executable, str(chosen.folder.relative_to(ROOT))]
    if subprocess.run(command, cwd=ROOT, env=uv_environment()).returncode:
        raise SystemExit(f"error: building {chosen.name} failed; the lines above say why")
    print(out / f"{chosen.module}-{chosen.version}-py3-none-any.whl")


if __name__ == "__main__":
    main()
