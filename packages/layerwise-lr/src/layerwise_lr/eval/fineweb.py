"""FineWeb (or any text) in parquet files on disk, as fixed windows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml26_shared.errors import UserError, require

EXTRA = "layerwise-lr[fineweb]"


def documents(root: str | Path, column: str = "text") -> Iterator[str]:
    """The texts of all parquet files under a folder, in the order of their paths.

    Raises:
        UserError: no folder, no parquet files, or a file without the column.
    """
    parquet = require("pyarrow.parquet", EXTRA)
    files = sorted(Path(root).rglob("*.parquet")) if Path(root).is_dir() else []
    if not files:
        raise UserError(f"{root} is not a folder with *.parquet files; download FineWeb there first")
    for file in files:
        opened = parquet.ParquetFile(file)
        if column not in opened.schema_arrow.names:
            raise UserError(f"{file} has no column {column!r}; it has {', '.join(opened.schema_arrow.names)}")
        for part in opened.iter_batches(columns=[column]):
            yield from part.column(0).to_pylist()


def token_windows(texts: Iterator[str], tokenizer: Any, length: int, skip: int = 0) -> Iterator[Tensor]:
    """Windows of ``length + 1`` tokens of all texts in a row, an end-of-text token after each; neighbours share none.

    Args:
        texts: documents.
        tokenizer: of transformers.
        length: tokens a window predicts.
        skip: windows to leave out, for a run that resumes.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("the tokenizer has no end-of-text token")
    pool: list[int] = []
    index = 0
    for text in texts:
        pool += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        while len(pool) > length:
            if index >= skip:
                yield torch.tensor(pool[: length + 1])
            index += 1
            del pool[: length + 1]
