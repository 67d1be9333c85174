"""Thin common ground of the ICML 2026 method packages; importing it loads nothing heavy."""

__version__ = "0.1.0"
