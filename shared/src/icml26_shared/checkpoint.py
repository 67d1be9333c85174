"""Files that are never half written, and long runs that resume.

* :func:`atomic_path`, :func:`atomic_write_bytes`, :func:`atomic_write_text`, :func:`atomic_write_json`: a reader sees
  the old file or the new one, also when the writer is killed or the machine stops.
* :class:`JsonlStore`: append-only results, one JSON object a line, for runs that skip what is already done.
* :func:`save_state`, :func:`load_state`: a nested structure of tensors and plain values in one safetensors file.
* :func:`to_jsonable`, :func:`dumps`: strict JSON of numpy, torch and Python values; NaN becomes null.
"""

from icml26_shared._files import (
    atomic_path,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    dumps,
    to_jsonable,
)
from icml26_shared._jsonl import JsonlStore, SettingsMismatch, StoreLocked
from icml26_shared._state import CheckpointError, load_state, save_state

__all__ = [
    "CheckpointError",
    "JsonlStore",
    "SettingsMismatch",
    "StoreLocked",
    "atomic_path",
    "atomic_write_bytes",
    "atomic_write_json",
    "atomic_write_text",
    "dumps",
    "load_state",
    "save_state",
    "to_jsonable",
]
