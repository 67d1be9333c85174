"""The errors that a command line shows as one line, and the import of optional libraries."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["MissingExtra", "UserError", "require"]


class UserError(Exception):
    """Something the user gave cannot be used; the message says what was given, what is allowed and what to do.

    A command line built with :class:`icml26_shared.cli.App` prints it as one line on stderr and exits with code 2.
    """


class MissingExtra(ImportError):
    """An optional library is not installed; the message names the extra to install."""


def require(module: str, extra: str, *, distribution: str | None = None) -> ModuleType:
    """Import an optional library, or say which extra brings it.

    Args:
        module: name to import, e.g. ``"transformers"`` or ``"matplotlib.figure"``.
        extra: extra that installs it, e.g. ``"transformers"``; or the whole requirement, e.g. ``"manifoldkv[vllm]"``.
        distribution: distribution that has the extra. Default: the package that calls, with ``_`` read as ``-``.

    Returns:
        The imported module (for a dotted name the submodule itself).

    Raises:
        MissingExtra: the library is not installed.
        ImportError: the library is installed but fails in its own imports; its own error is passed on unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(missing + "."):
            raise
        if "[" not in extra:
            extra = f"{distribution or _distribution_of_caller()}[{extra}]"
        top = module.partition(".")[0]
        text = f"this needs {top!r}, which is not installed; install it with: pip install '{extra}'"
        raise MissingExtra(text, name=module) from error


def _distribution_of_caller() -> str:
    package = str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
    return package.replace("_", "-")
