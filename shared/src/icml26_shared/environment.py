"""What a result was measured with: interpreter, libraries, processor, commit."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["environment", "library_versions", "package_folder", "processor", "source_digest", "version_of"]

LIBRARIES = ("icml26-shared", "numpy", "torch", "transformers", "triton", "accelerate", "safetensors")


def environment(distribution: str | None = None, libraries: Sequence[str] = ()) -> dict[str, Any]:
    """Describe this machine and these versions, as a JSON-able dict.

    Keys: ``date`` (UTC, ISO 8601), ``package``, ``version``, ``commit`` (of the package's sources where they are in a
    git checkout, with ``-dirty`` when they were changed; else None), ``python``, ``platform``, ``processor``, ``cores``
    (those this process may use), ``memory_gib``, ``torch`` (None when it is not installed), ``torch_threads``, ``gpus``
    (both None unless torch is loaded), ``libraries`` (versions of what is installed).

    Args:
        distribution: the package the result is about.
        libraries: further distributions whose versions matter, e.g. the peers of a bench.
    """
    import psutil

    versions = library_versions(libraries)
    torch = sys.modules.get("torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "package": distribution,
        "version": version_of(distribution) if distribution else None,
        "commit": _commit(package_folder(distribution)) if distribution else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": _cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": versions.get("torch"),
        "torch_threads": torch.get_num_threads() if torch is not None else None,
        "gpus": _gpus(torch) if torch is not None else None,
        "libraries": versions,
    }


def library_versions(further: Sequence[str] = ()) -> dict[str, str]:
    """Versions of the common libraries and of further ones, as far as installed."""
    names = dict.fromkeys((*LIBRARIES, *further))
    return {name: version for name in names if (version := version_of(name)) is not None}


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def package_folder(distribution: str) -> Path | None:
    """Folder of the import package of a distribution (its name with ``_`` for ``-``), found without importing it."""
    try:
        spec = importlib.util.find_spec(distribution.replace("-", "_"))
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def source_digest(distribution: str, *, only: Sequence[str] = ("*",), without: Sequence[str] = ()) -> str | None:
    """A short hash of the Python sources of a distribution; None when it has no folder of sources.

    Args:
        only, without: patterns of :mod:`fnmatch`, over paths like ``integrations/trl.py``: the sources that count are
            those that match one of the first and none of the second.
    """
    folder = package_folder(distribution)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if any(fnmatch(name, pattern) for pattern in only) and not any(fnmatch(name, pattern) for pattern in without):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit(folder: Path | None) -> str | None:
    if folder is None or shutil.which("git") is None:
        return None
    # A package installed into an environment inside some checkout is not of that checkout: its files are not tracked.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if commit and _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
