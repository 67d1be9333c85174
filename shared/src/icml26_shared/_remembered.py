"""Where `claims` and `bench` keep what they measured, so that an interrupted run resumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from icml26_shared.checkpoint import JsonlStore, SettingsMismatch
from icml26_shared.console import Context
from icml26_shared.environment import source_digest, version_of


def open_remembered(context: Context, name: str, key: Sequence[str], *, fresh: bool = False) -> JsonlStore:
    """The store ``name`` in the output folder; what other sources, versions or seeds measured is refused.

    Args:
        fresh: forget what is in the file.
    """
    try:
        return JsonlStore(context.out_file(name), key=key, settings=_settings(context), fresh=fresh)
    except SettingsMismatch as error:
        raise SettingsMismatch(f"{error}; --fresh does that") from None


def _settings(context: Context) -> dict[str, Any]:
    package = context.distribution
    digests = [digest for one in (package, "icml26-shared") if (digest := source_digest(one)) is not None]
    return {"package": package, "version": version_of(package), "sources": "-".join(digests), "seed": context.seed}
