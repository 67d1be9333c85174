"""Warnings and errors of the package."""

from __future__ import annotations

import warnings


class LayerSkipped(UserWarning):
    """A layer could not be measured, or its spectrum has no tail; the message names it and says what it gets."""


class WarnOnce:
    """Warns once for each key."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(text, LayerSkipped, stacklevel=3)
