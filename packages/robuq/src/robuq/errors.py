"""Errors of the package."""

from __future__ import annotations


class RobuqFormatError(ValueError):
    """A saved model cannot be read: the message names the file and the key."""
