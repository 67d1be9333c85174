"""Rewrites the table of packages in the root's README.md from what the packages say of themselves: `make report`.

The state of a package's claims is counted from the table that `NAME claims --write` put into its README.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from icml26_shared.reports import markdown_table, write_between_markers
from workspace import ROOT, Member, packages

VERDICTS = {
    "holds": "holds",
    "fails": "fails",
    "needs": "needs other hardware or data",
    "error": "could not be checked",
}


def main() -> None:
    write(ROOT / "README.md", packages(ROOT))
    print("report: wrote the table of packages into README.md")


def write(readme: Path, chosen: Sequence[Member]) -> None:
    """Replaces what stands between the markers `packages` of `readme` by one row a package."""
    rows = [[f"[{each.name}](packages/{each.name})", each.project["description"], state(each)] for each in chosen]
    write_between_markers(readme, "packages", markdown_table(["Package", "What it does for you", "State"], rows))


def state(package: Member) -> str:
    """What of the package is there, and how its claims stand."""
    if package.pending:
        rooms = ", ".join(sorted(room.partition("/")[0].removesuffix(".py") for room in package.pending))
        return f"{package.version}; to come: {rooms}"
    counts = _verdicts((package.folder / "README.md").read_text("utf-8"))
    if not counts:
        return f"{package.version}; claims not checked yet"
    parts = [f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items() if counts[verdict]]
    return f"{package.version}; claims: {', '.join(parts)}"


def _verdicts(readme: str) -> Counter[str]:
    """How often each verdict stands in the last column of the table between the markers `claims`."""
    found = re.search(r"<!-- claims:begin -->(.*?)<!-- claims:end -->", readme, re.DOTALL)
    rows = re.findall(r"^\|.*\|\s*\**(holds|fails|needs|error)\b[^|]*\|\s*$", found[1] if found else "", re.MULTILINE)
    return Counter(rows)


if __name__ == "__main__":
    main()
