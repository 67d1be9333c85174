"""Where `claims` and `bench` keep what they measured, so that an interrupted run resumes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from icml26_shared.checkpoint import JsonlStore, SettingsMismatch
from icml26_shared.console import Context
from icml26_shared.environment import library_versions, processor, source_digest, version_of


def open_remembered(
    context: Context,
    name: str,
    key: Sequence[str],
    *,
    forget: Callable[[Mapping[str, Any]], bool] | None = None,
    any_sources: bool = False,
) -> JsonlStore:
    """The store ``name`` in the output folder; what other sources, versions, machines or seeds measured is refused.

    Args:
        forget: rows to measure again; with it, a file that would be refused is started anew.
        any_sources: take a file whatever the sources were; its rows say themselves which sources made them.
    """
    path, settings = context.out_file(name), _settings(context)
    if any_sources:
        del settings["sources"]
    try:
        store = JsonlStore(path, key=key, settings=settings)
    except ValueError as error:
        if forget is not None:
            return JsonlStore(path, key=key, settings=settings, fresh=True)
        if isinstance(error, SettingsMismatch):
            raise SettingsMismatch(f"{error}; --fresh does that") from None
        raise
    if forget is not None:
        store.remove(forget)
    return store


def method_digest(package: str) -> str:
    """A hash of the sources that decide what a run of the method gives: those of the package without its commands and
    plug-ins, and the data loaders and harnesses of the common package."""
    method = source_digest(package, without=("cli*.py", "claims.py", "bench*.py", "demo.py", "integrations/*"))
    harness = source_digest("icml26-shared", only=("data/*", "evaluation/*"))
    return f"{method}-{harness}"


def now() -> str:
    """Date and time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _settings(context: Context) -> dict[str, Any]:
    package = context.distribution
    digests = [digest for one in (package, "icml26-shared") if (digest := source_digest(one)) is not None]
    return {
        "package": package,
        "version": version_of(package),
        "sources": "-".join(digests),
        "seed": context.seed,
        "python": platform.python_version(),
        "processor": processor(),
        **library_versions(),
    }
