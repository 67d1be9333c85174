"""Real text that is on every machine: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from icml26_shared.data.text import standard_library

VOCABULARY = 128
LIMIT = 10_000_000  # bytes


@dataclass(frozen=True)
class Text:
    """A text as bytes below 128 (others become "?"), split into a training part and the last 5 % for validation.

    Attributes:
        train, validation: uint8 tokens.
        sha256: of the whole text; runs compare only on equal text.
        origin: where it is from.
    """

    train: Tensor
    validation: Tensor
    sha256: str
    origin: str


@functools.cache
def load_text(path: str | None = None) -> Text:
    """The standard library's modules (without tests), sorted by path, up to 10 MB; or a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a text shorter than 100 kB.
    """
    if path is None:
        origin, data = f"standard library of Python {sysconfig.get_python_version()}", standard_library(LIMIT)
    else:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file; give a text file to train on")
        origin, data = Path(path).name, Path(path).read_bytes()
    if len(data) < 100_000:
        raise ValueError(f"the text of {origin} has {len(data)} bytes; at least 100000 are needed to train on")
    tokens = np.frombuffer(data, np.uint8)
    tokens = np.where(tokens < VOCABULARY, tokens, ord("?")).astype(np.uint8)
    cut = int(0.95 * len(tokens))
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    whole = torch.from_numpy(tokens)
    return Text(whole[:cut], whole[cut:], digest, origin)


def batch(tokens: Tensor, length: int, size: int, generator: torch.Generator) -> Tensor:
    """``size`` random windows of ``length + 1`` tokens, int64."""
    starts = torch.randint(0, tokens.numel() - length - 1, (size, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)].long()


def windows(tokens: Tensor, length: int, count: int) -> Tensor:
    """``count`` windows of ``length + 1`` tokens, evenly spread: always the same."""
    starts = torch.linspace(0, tokens.numel() - length - 1, count).long()[:, None]
    return tokens[starts + torch.arange(length + 1)].long()
