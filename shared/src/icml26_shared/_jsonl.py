"""Append-only results that survive a kill; public names are in :mod:`icml26_shared.checkpoint`."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from icml26_shared._files import atomic_write_text, dumps, to_jsonable
from icml26_shared.errors import UserError

_FORMAT = "icml26-results"
_VERSION = 1


class SettingsMismatch(UserError, ValueError):
    """The results on disk were made with other settings than this run's."""


class StoreLocked(UserError):
    """Another process has the results open."""


class JsonlStore:
    """Results, one JSON object a line, that a run appends to and a later run continues.

    The first line is a header with the names of the key fields and the settings of the run. Every row is written,
    flushed and synced to the disk before :meth:`append` returns, so a killed run loses at most the row it was working
    on; a last line that was cut by the kill is dropped when the file is opened again. One process at a time may have a
    store open (a lock file ``NAME.lock`` beside it); :meth:`read` needs no lock.

    Example::

        with JsonlStore(out / "results.jsonl", key=("task", "index"), settings={"model": name, "seed": 0}) as store:
            for task, index in work:
                if not store.done((task, index)):
                    store.append({"task": task, "index": index, "score": score(task, index)})

    Args:
        path: the file; made, with its folders, when it is not there.
        key: fields of a row that identify it.
        settings: whatever changes the results (model, seed, version ...): JSON-able. A file made with other settings
            is refused.
        fresh: start with an empty file, whatever is there.

    Raises:
        SettingsMismatch: the file was made with other settings or key fields; says which differ.
        StoreLocked: another process, or another store of this one, has the file open.
        ValueError: the file is not a store, or a line before the last one is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        key: Sequence[str] = ("task", "index", "config"),
        settings: Mapping[str, Any] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        if isinstance(key, str) or not key or len(set(key)) != len(key):
            raise ValueError(f"key must be a tuple of distinct field names, got {key!r}")
        self.path = Path(path)
        self.key = tuple(key)
        self.settings: dict[str, Any] = to_jsonable(dict(settings or {}))
        self._rows: dict[str, dict[str, Any]] = {}
        if self.path.is_dir():
            raise ValueError(f"{str(path)!r} is a folder; give the name of a .jsonl file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire(self.path)
        try:
            self._load(fresh)
            self._file = self.path.open("ab", buffering=0)
        except BaseException:
            self._lock.release()
            raise

    def done(self, key: Any) -> bool:
        """Whether a row with this key is there. ``key``: values in the order of the key fields, or a mapping."""
        return self._identity(key) in self._rows

    def get(self, key: Any) -> dict[str, Any] | None:
        """The row with this key, or None."""
        row = self._rows.get(self._identity(key))
        return None if row is None else dict(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row and sync it to the disk. NaN and infinities are stored as null.

        Raises:
            ValueError: a key field is missing, or the key is there already.
        """
        missing = [name for name in self.key if name not in row]
        if missing:
            raise ValueError(f"the row lacks the key field(s) {missing}; it has {sorted(row)}")
        plain = to_jsonable(dict(row))
        identity = self._identity(plain)
        if identity in self._rows:
            raise ValueError(f"a row with the key {identity} is in {self.path} already; ask done() first")
        self._write(dumps(plain).encode() + b"\n")
        self._rows[identity] = plain

    def remove(self, which: Callable[[Mapping[str, Any]], bool]) -> int:
        """Drop the rows for which ``which(row)`` is true, atomically; returns how many there were."""
        kept = {identity: row for identity, row in self._rows.items() if not which(row)}
        removed = len(self._rows) - len(kept)
        if removed:
            lines = [self._header(), *kept.values()]
            atomic_write_text(self.path, "".join(dumps(line) + "\n" for line in lines))
            self._file.close()
            self._file = self.path.open("ab", buffering=0)  # the old one writes into the replaced file
            self._rows = kept
        return removed

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order they were written."""
        return [dict(row) for row in self._rows.values()]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Any) -> bool:
        return self.done(key)

    def close(self) -> None:
        """Close the file and let others open it. Calling it twice is fine."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> JsonlStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def remember(self, key: Mapping[str, Any], fn: Callable[[], Any]) -> Any:
        """The field ``value`` of the row with this key; where there is none, ``fn()`` is computed and appended first.

        The value comes back as JSON keeps it (tuples as lists, NaN as None), from the first run as from a later one.
        """
        if not self.done(key):
            self.append({**key, "value": fn()})
        return self._rows[self._identity(key)]["value"]

    @staticmethod
    def read(path: str | Path) -> list[dict[str, Any]]:
        """The complete rows of a store, without opening it for writing (a run may be going on).

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not a store or is damaged.
        """
        return _parse(Path(path), Path(path).read_bytes())[1]

    def _load(self, fresh: bool) -> None:
        data = self.path.read_bytes() if self.path.exists() and not fresh else b""
        if not data:
            # Whole or not at all: a store on disk always has its header.
            atomic_write_text(self.path, dumps(self._header()) + "\n")
            return
        header, rows, complete = _parse(self.path, data)
        self._compare(header)
        for row in rows:
            self._rows[self._identity(row)] = row
        if complete < len(data):
            warnings.warn(f"{self.path}: dropped a half-written last line", stacklevel=4)
            with self.path.open("r+b") as file:
                file.truncate(complete)
                os.fsync(file.fileno())

    def _write(self, line: bytes) -> None:
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, size)  # a full disk or a Ctrl-C leaves no part of a row for the next one to join
            raise

    def _header(self) -> dict[str, Any]:
        text = dumps(self.settings, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "key": list(self.key),
            "settings": self.settings,
            "fingerprint": fingerprint,
        }

    def _compare(self, header: Mapping[str, Any]) -> None:
        theirs, ours = {**header["settings"], _KEY: header["key"]}, {**self.settings, _KEY: list(self.key)}
        if theirs == ours:
            return
        names = [name for name in {**theirs, **ours} if theirs.get(name, _ABSENT) != ours.get(name, _ABSENT)]
        said = "; ".join(f"{name}: {_show(theirs, name)} there, {_show(ours, name)} now" for name in names)
        raise SettingsMismatch(
            f"{self.path} was made with other settings ({said}); use another --out, or delete it to start again"
        )

    def _identity(self, key: Any) -> str:
        if isinstance(key, Mapping):
            missing = [name for name in self.key if name not in key]
            if missing:
                raise ValueError(f"the key lacks the field(s) {missing}; it needs {list(self.key)}")
            values = [key[name] for name in self.key]
        elif isinstance(key, (list, tuple)):
            values = list(key)
        else:
            values = [key]
        if len(values) != len(self.key):
            raise ValueError(f"the key {key!r} has {len(values)} value(s), but the key fields are {list(self.key)}")
        return dumps(values, sort_keys=True)


_ABSENT = object()
_KEY = "key fields"


def _show(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], ensure_ascii=False) if name in settings else "not set"


def _acquire(path: Path) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreLocked(
            f"{path} is in use by another run; wait until it has ended or use another --out (lock: {path.name}.lock)"
        ) from None
    return lock


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Header, rows, and the number of bytes they take up (what follows is a half-written line)."""
    objects: list[dict[str, Any]] = []
    complete = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        # A row is written with its newline, so a line without one was cut short.
        parsed = _object(line) if line.endswith(b"\n") else None
        if parsed is None:
            if number < len(lines) or number == 1:
                raise ValueError(_damage(path, number))
            break
        objects.append(parsed)
        complete += len(line)
    header = objects.pop(0)
    if header.get("format") != _FORMAT or not isinstance(header.get("settings"), dict) or "key" not in header:
        raise ValueError(_damage(path, 1))
    if header.get("version") != _VERSION:
        raise ValueError(
            f"{path} is a results file of version {header.get('version')!r}; this package reads {_VERSION}"
        )
    return header, objects, complete


def _damage(path: Path, number: int) -> str:
    if number == 1:
        return f"{path} is not a results file of this package (no header in line 1); give another path"
    return f"{path}: line {number} is damaged; repair or delete the file, or use another --out"


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
