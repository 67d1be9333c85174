"""Atomic files and strict JSON; public names are in :mod:`icml26_shared.checkpoint`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

_TEMPORARY = re.compile(r"\.(?P<host>[\w.-]+)~(?P<pid>\d+)~[0-9a-f]{8}\.tmp")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; put it in place when the block ends well.

    The temporary file is in the same folder and keeps the suffix of ``path`` (writers that choose a format by suffix
    work). At the end it is flushed to the disk and renamed over ``path``: a reader, and whoever comes after a crash,
    sees all of the old file or all of the new one. If the block raises, the temporary file is removed and ``path`` is
    untouched. A new file gets the permissions the umask gives, an existing one keeps its own; a symbolic link is
    followed. Missing parent folders are made.

    Raises:
        IsADirectoryError: ``path`` is a folder.
        FileNotFoundError: the block removed the temporary file.
    """
    target = Path(path).resolve()
    if target.is_dir():
        raise IsADirectoryError(f"cannot write the file {str(path)!r}: it is a folder; give a file name")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    mark = f".{_host()}~{os.getpid()}~{secrets.token_hex(4)}.tmp"
    temporary = target.with_name(f".{target.stem}{mark}{target.suffix}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        _flush(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old bytes or the new ones. See :func:`atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | Path, data: str) -> None:
    """Write ``data`` to ``path`` as UTF-8, line ends as they are. See :func:`atomic_path`."""
    atomic_write_bytes(path, data.encode())


def atomic_write_json(path: str | Path, data: Any, *, indent: int | None = 2) -> None:
    """Write ``data`` to ``path`` as strict JSON (see :func:`to_jsonable`) with a final newline."""
    atomic_write_text(path, dumps(data, indent=indent) + "\n")


def to_jsonable(value: Any) -> Any:
    """Reduce ``value`` to what strict JSON has: dict, list, str, int, float, bool, None.

    NaN and infinities become None (strict JSON has no word for them). Numpy and torch scalars and arrays become numbers
    and nested lists; tuples and sets become lists (sets sorted); dataclasses, mappings and objects with a ``to_json()``
    method become dicts; paths and enums become strings and values. Keys of mappings become strings.

    Raises:
        TypeError: a value of another type.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if callable(getattr(value, "to_json", None)):
        return to_jsonable(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, Set):
        return [to_jsonable(item) for item in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return to_jsonable(value.tolist())
    raise TypeError(f"cannot write a value of type {type(value).__name__} as JSON; give numbers, text, lists or dicts")


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False, ensure_ascii: bool = False) -> str:
    """Strict JSON text of ``value`` after :func:`to_jsonable`."""
    plain = to_jsonable(value)
    text = json.dumps(plain, indent=indent, sort_keys=sort_keys, ensure_ascii=ensure_ascii, allow_nan=False)
    if not ensure_ascii and any("\ud800" <= letter <= "\udfff" for letter in text):
        return dumps(plain, indent=indent, sort_keys=sort_keys, ensure_ascii=True)  # no UTF-8 for broken text
    return text


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    plain = to_jsonable(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _host() -> str:
    return re.sub(r"[^\w.-]", "-", socket.gethostname()) or "host"


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files that killed writers of ``target`` on this machine left behind."""
    for entry in target.parent.glob(f".{_glob_escape(target.stem)}.*.tmp{_glob_escape(target.suffix)}"):
        found = _TEMPORARY.fullmatch(entry.name[len(target.stem) + 1 : len(entry.name) - len(target.suffix)])
        if found is None or found["host"] != _host():
            continue
        import psutil

        if not psutil.pid_exists(int(found["pid"])):
            with suppress(OSError):
                entry.unlink()


def _glob_escape(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: Path) -> None:
    if os.name == "nt":
        return  # a folder cannot be opened there; the rename itself is journalled
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
