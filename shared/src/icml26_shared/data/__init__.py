"""Data sets on disk: found where the user says they are, never downloaded by surprise.

`find("manifoldkv", "emerson_essays.txt")` looks under `root` when that is given, else under the folder named by the
environment variable `ICML26_DATA`, which holds one folder a data set.
"""

from __future__ import annotations

import os
from pathlib import Path

from icml26_shared.data.text import paragraphs, sentences
from icml26_shared.errors import UserError

__all__ = ["ENVIRONMENT_VARIABLE", "MissingData", "find", "paragraphs", "sentences"]

ENVIRONMENT_VARIABLE = "ICML26_DATA"


class MissingData(UserError, FileNotFoundError):
    """A data set is not on this machine; the message names both ways of saying where it is."""


def find(dataset: str, filename: str | None = None, root: str | Path | None = None) -> Path:
    """Find a data set, or a file of it.

    Args:
        dataset: folder of the data set below `ICML26_DATA`, e.g. `"manifoldkv"`.
        filename: path of a file inside it; None asks for the folder.
        root: the data set's own folder, or (with `filename`) the file itself; it wins over the environment.

    Returns:
        An existing path.

    Raises:
        MissingData: it is not there, or neither way was given.
    """
    what = f"{dataset}/{filename}" if filename else dataset
    if root is not None:
        given = Path(root).expanduser()
        if filename is None:
            found, present = given, given.is_dir()
        else:
            found = given if given.is_file() else given / filename
            present = found.is_file()
        if present:
            return found
        raise MissingData(f"no {what} at {given}: give the {'file or its folder' if filename else 'folder'}")
    base = os.environ.get(ENVIRONMENT_VARIABLE)
    if base:
        found = Path(base).expanduser() / what
        if found.is_file() if filename else found.is_dir():
            return found
        where = f"{found} does not exist"
    else:
        where = f"{ENVIRONMENT_VARIABLE} is not set"
    raise MissingData(
        f"{what} is needed and {where}: give its path as an argument, or set {ENVIRONMENT_VARIABLE} to a folder that "
        f"contains {what}"
    )
