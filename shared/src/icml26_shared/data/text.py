"""Plain text: paragraphs and sentences, without a downloaded model; and a text that is on every machine."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from icml26_shared.errors import UserError

# A sentence ends at . ! ? (and closing quotes or brackets), before white space and something that can begin another.
_BOUNDARY = re.compile(r"""(?<=[.!?])(["')\]”’]*)\s+(?=["'(\[“‘]*[A-Z0-9])""")
# Unless the full stop belongs to a title, an initial or a Latin abbreviation.
_ABBREVIATION = re.compile(
    r"""(?:^|[\s("'\[])(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Gen|Col|Capt|Hon|Sr|Jr|vs|viz|cf|No|Vol|Fig|e\.g|i\.e|[A-Z])\.$"""
)

_NO_MODULES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def standard_library(limit: int, *, packages: bool = True) -> bytes:
    """The first ``limit`` bytes of the sources of Python's standard library, sorted by path, without its tests.

    The same on every machine with the same Python.

    Args:
        packages: with the modules inside packages; else only those at the top.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [(file.relative_to(folder), file) for file in folder.glob("**/*.py" if packages else "*.py")]
    chosen = sorted((name.as_posix(), file) for name, file in files if not _NO_MODULES & set(name.parts[:-1]))
    parts, size = [], 0
    for _, file in chosen:
        if size >= limit:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    return b"".join(parts)[:limit]


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; a missing, empty or non-UTF-8 file is a `UserError`."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise UserError(f"{file} has no text in it")
    return text


def paragraphs(text: str) -> list[str]:
    """Blocks of text between blank lines, inner white space collapsed to single blanks."""
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]


def sentences(text: str) -> list[str]:
    """Split running text into sentences; joined with blanks they give the text back (white space collapsed).

    A rule, not a model: a sentence ends at `.`, `!` or `?` with any closing quotes, before a capital or a digit, but
    not after a title (`Mr.`), a single initial (`J.`), `e.g.` or `i.e.`.
    """
    flat = " ".join(text.split())
    found: list[str] = []
    start = 0
    for match in _BOUNDARY.finditer(flat):
        end = match.end(1)
        if not match[1] and _ABBREVIATION.search(flat, max(start, end - 16), end):
            continue
        found.append(flat[start:end])
        start = match.end()
    if start < len(flat):
        found.append(flat[start:])
    return found
