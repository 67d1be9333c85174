"""Stable ids of prompts: integers as they are, texts by a hash that is the same in every process and every run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


def text_of(prompt: Any) -> str:
    """A prompt as text: strings as they are, conversations (lists of messages) as canonical JSON."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(prompt, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


def prompt_key(prompt: Any) -> int:
    """The 64-bit id of a prompt: BLAKE2b of its text, as a signed int64."""
    return hash_and_check(text_of(prompt))[0]


def hash_and_check(text: str) -> tuple[int, int]:
    """(id, check): two independent 64-bit halves of one digest. Equal ids with unequal checks are a collision."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big", signed=True), int.from_bytes(digest[8:], "big", signed=True)


def int_ids(
    ids: Tensor | np.ndarray | Sequence[Any], device: torch.device | str | None = None
) -> Int64[Tensor, " batch"]:
    """Ids as an int64 tensor; texts and conversations are hashed.

    Raises:
        TypeError: floats or booleans.
    """
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers or texts, got a tensor of {ids.dtype}")
        return ids.to(device=device, dtype=torch.int64)
    array = ids if isinstance(ids, np.ndarray) else None
    if array is not None and array.dtype.kind in "iu":
        return torch.as_tensor(array.astype(np.int64), device=device)
    values = [_int_id(value) for value in ids]
    return torch.tensor(values, dtype=torch.int64, device=device)


def _int_id(value: Any) -> int:
    if isinstance(value, (bool, float, np.floating)):
        raise TypeError(f"id {value!r}: ids must be integers or texts")
    return int(value) if is_int64(value) else prompt_key(value)


def is_int64(value: Any) -> bool:
    """Whether a value is an id as it stands: an integer that 64 bits hold. Longer ones are hashed like texts."""
    return isinstance(value, (int, np.integer)) and -(2**63) <= int(value) < 2**63
