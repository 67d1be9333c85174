"""The ``robuq`` command line."""

from __future__ import annotations

from icml26_shared.cli import App

app = App(
    "robuq",
    distribution="robuq",
    summary="Ternary weights and 1 to 4 bit activations for transformers (RobuQ, arXiv 2509.23582).",
)


def main() -> None:
    """Console script."""
    app.main()
