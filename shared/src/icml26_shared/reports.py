"""Tables for a README, written between markers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from icml26_shared._files import atomic_write_bytes
from icml26_shared.environment import package_folder
from icml26_shared.errors import UserError

__all__ = ["MarkersError", "check_markers", "find_readme", "machine_line", "markdown_table", "write_between_markers"]


class MarkersError(UserError, ValueError):
    """The file has not exactly one pair of markers."""


def write_between_markers(path: str | Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``, atomically.

    The markers stand alone on their lines and stay; all else in the file stays byte for byte.

    Raises:
        FileNotFoundError: no such file.
        MarkersError: a marker is missing, doubled, or the end comes first.
    """
    before, after, newline = _split(Path(path), name)
    body = text.strip("\n").replace("\r\n", "\n").replace("\n", newline)
    middle = f"{newline}{body}{newline}{newline}" if body else ""
    atomic_write_bytes(path, (before + middle + after).encode())


def check_markers(path: str | Path, name: str) -> None:
    """Raise what :func:`write_between_markers` would raise, before a long run."""
    _split(Path(path), name)


def find_readme(distribution: str, given: str = "") -> Path:
    """The README to write into: ``given``; else that of the package's source tree; else ``README.md`` here.

    Raises:
        UserError: there is none.
    """
    if given:
        return Path(given)
    folder = package_folder(distribution)
    candidates = list(folder.parents)[:2] if folder is not None else []
    for parent in candidates:
        if (parent / "pyproject.toml").is_file() and (parent / "README.md").is_file():
            return parent / "README.md"
    if Path("README.md").is_file():
        return Path("README.md")
    raise UserError("no README.md found for --write; name the file: --write PATH/README.md")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table. Cells may hold Markdown; bars and line breaks in them are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def machine_line(environment: Mapping[str, Any], dates: Iterable[str] = ()) -> str:
    """One sentence on when and with what a table was measured.

    Args:
        environment: see :func:`icml26_shared.environment.environment`.
        dates: when the rows were measured, ISO 8601; default: the date of the environment.
    """
    days = sorted({date[:10] for date in dates} or {str(environment["date"])[:10]})
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    parts = [f"Python {environment['python']}"]
    if environment.get("torch"):
        parts.append(f"torch {environment['torch']}")
    parts += [f"{environment['processor']}, {environment['cores']} core(s)", *(environment.get("gpus") or [])]
    package = " ".join(str(environment[name]) for name in ("package", "version") if environment.get(name))
    commit = f" ({environment['commit']})" if environment.get("commit") else ""
    return f"Measured {when} with {package}{commit}, {', '.join(parts)}."


def _cell(value: Any) -> str:
    return " ".join(str(value).split("\n")).replace("|", "\\|") if value is not None else ""


def _split(path: Path, name: str) -> tuple[str, str, str]:
    if not path.is_file():
        raise FileNotFoundError(2, "no such file to write a table into", str(path))
    content = path.read_bytes().decode()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    lines = content.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if line.strip() == begin]
    stops = [index for index, line in enumerate(lines) if line.strip() == end]
    for marker, places in ((begin, starts), (end, stops)):
        if len(places) > 1:
            numbers = ", ".join(str(place + 1) for place in places)
            raise MarkersError(f"{path} has {marker!r} {len(places)} times (lines {numbers}); keep one")
        if not places:
            raise MarkersError(f"{path} lacks the line {marker!r}; put {begin!r} and {end!r} where the table belongs")
    if stops[0] < starts[0]:
        raise MarkersError(f"{path} has {end!r} before {begin!r}; swap them")
    newline = "\r\n" if lines[starts[0]].endswith("\r\n") else "\n"
    return "".join(lines[: starts[0] + 1]), "".join(lines[stops[0] :]), newline
