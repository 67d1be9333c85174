"""Writes the skeleton of a package from tools/template: `make new PKG=name`. Standard library only."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from workspace import ROOT

TEMPLATE = ROOT / "tools" / "template"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    folder = create(name, ROOT)
    print(f"wrote {folder.relative_to(ROOT)}; CONTRIBUTING.md says what comes next, the anatomy test what is missing")


def create(name: str, root: Path) -> Path:
    """Writes `packages/NAME` under `root`, whole or not at all; SystemExit if the name is bad or taken."""
    if not NAME.fullmatch(name):
        raise SystemExit(
            f"error: {name!r} is no package name: lower-case letters, digits, single hyphens; make new PKG=my-method"
        )
    folder = root / "packages" / name
    if folder.exists():
        raise SystemExit(f"error: {folder.relative_to(root)} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = {"name": name, "module": name.replace("-", "_")}
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch:
        for source in sorted(TEMPLATE.rglob("*.in")):
            relative = str(source.relative_to(TEMPLATE)).removesuffix(".in").replace("MODULE", words["module"])
            target = Path(scratch) / name / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_fill(source.read_text("utf-8"), words), "utf-8")
        shutil.move(str(Path(scratch) / name), folder)
    return folder


def _fill(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)


if __name__ == "__main__":
    main()
