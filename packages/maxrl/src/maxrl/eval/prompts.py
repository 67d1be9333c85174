"""Prompts with answers, from a file: JSON lines, a JSON list, or Parquet, in this project's columns or GSM8K's or
POLARIS's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icml26_shared.errors import UserError, require

PROMPT_COLUMNS = ("prompt", "question", "problem")


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and what the verifier is given."""

    prompt: str
    answer: str


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, the first ``limit`` of them.

    A row has ``prompt``, ``question`` or ``problem``, and ``answer``; of a GSM8K answer only what follows ``####``
    counts.

    Raises:
        UserError: no such file, no rows, a row without the columns.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no file at {path}: give a .jsonl, .json or .parquet file of prompts and answers")
    prompts: list[Prompt] = []
    for number, row in enumerate(_rows(file), 1):
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_prompt(row, f"{path}, row {number}"))
    if not prompts:
        raise UserError(f"{path} holds no prompts")
    return prompts


def _rows(file: Path) -> Iterable[Any]:
    if file.suffix == ".parquet":
        table = require("pyarrow.parquet", "data").read_table(file)
        yield from table.to_pylist()
        return
    text = file.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{file}, line {number} is not JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON: {error}") from None


def _prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: an object with a prompt and an answer is needed, got {type(row).__name__}")
    column = next((name for name in PROMPT_COLUMNS if name in row), None)
    if column is None or "answer" not in row:
        raise UserError(
            f"{where}: it has the columns {sorted(row)}; needed: one of {', '.join(PROMPT_COLUMNS)}, and answer"
        )
    answer = str(row["answer"])
    return Prompt(str(row[column]), answer.rsplit("####", 1)[1].strip() if "####" in answer else answer)
