"""What this package refuses, by name."""

from __future__ import annotations


class UnsupportedAttention(ValueError):
    """An attention layer has a feature that a Tucker form cannot carry; the message names the feature."""
