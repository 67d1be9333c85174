"""Reading files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from icml26_shared.data.text import read_text
from icml26_shared.errors import UserError

T = TypeVar("T")


def read_rows(path: str | Path, convert: Callable[[dict[str, Any]], T], what: str) -> list[T]:
    """Read a JSONL file and convert every row; blank lines are skipped.

    Args:
        path: the file, UTF-8.
        convert: turns a row into what is wanted; its KeyError, TypeError or ValueError means that the row is not one.
        what: what a row should be, for the message, e.g. `"a LongBench example"`.

    Raises:
        UserError: the file cannot be read, or a line is not such a row; the message names the line.
    """
    rows: list[T] = []
    # Not splitlines(): it also cuts at U+2028 and the like, which may stand inside a JSON string.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: {type(row).__name__} instead of an object, so not {what}")
        try:
            rows.append(convert(row))
        except KeyError as error:
            raise UserError(f"{where}: not {what}, it has no field {error}") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: not {what} ({error})") from error
    return rows
