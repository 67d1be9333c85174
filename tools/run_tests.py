"""Runs pytest over the workspace (main) or in an environment apart (vllm, kvpress), replacing this process.

run_tests.py main|vllm|kvpress  NAME|""  [pytest arguments]          Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setup_env import CANNOT_BE_HAD, ENVIRONMENTS, tested_packages
from workspace import ROOT, member, members

INTEGRATION = "tests-integration"


def main() -> None:
    environment, name, *arguments = sys.argv[1:]
    if environment != "main":
        _run_apart(environment, name, arguments)
    _pytest(ROOT / ".venv", _main_folders(name), [*_parallel(arguments), *arguments])


def _main_folders(name: str) -> list[Path]:
    integration = ROOT / INTEGRATION
    if name in ("integration", INTEGRATION):
        return [integration]
    if name:
        return [_existing(member(name).folder / "tests")]
    return [*(folder for each in members() if (folder := each.folder / "tests").is_dir()), integration]


def _parallel(arguments: list[str]) -> list[str]:
    """Two workers, a file of tests staying with one; one process where the user steers pytest."""
    steering = ("-n", "-p", "-s", "--pdb", "--dist", "--numprocesses")
    steered = any(argument.startswith(steering) for argument in arguments)
    if steered or (os.cpu_count() or 1) < 2:
        return []
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    return ["-n", "2", "--dist", "loadfile"]


def _run_apart(environment: str, name: str, arguments: list[str]) -> None:
    tests = f"tests-{environment}"
    if name:
        folders = [_existing(member(name).folder / tests)]
    else:
        folders = [package.folder / tests for package in tested_packages(environment)]
    if not folders:
        print(f"{environment}: skipped: no package has a folder {tests}")
        raise SystemExit(0)
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "setup_env.py"), environment]).returncode
    if made == CANNOT_BE_HAD:
        raise SystemExit(0)  # setup_env has said why
    if made:
        raise SystemExit(made)
    workers = _parallel(arguments) if environment == "vllm" else []  # .venv-kvpress has no pytest-xdist, and no need
    _pytest(ROOT / ENVIRONMENTS[environment], folders, [*workers, *arguments])


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise SystemExit(f"error: there is no folder {folder.relative_to(ROOT)}")
    return folder


def _pytest(venv: Path, folders: list[Path], arguments: list[str]) -> None:
    os.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    # Compiled modules are kept inside the environment, also where Python is told to keep none beside the sources: tests
    # start dozens of processes, and vLLM alone has 2,400 modules to compile in each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(venv / "pycache")
    python = str(venv / "bin" / "python")
    paths = [str(folder.relative_to(ROOT)) for folder in folders]
    os.chdir(ROOT)
    os.execv(python, [python, "-m", "pytest", *paths, *arguments])


if __name__ == "__main__":
    main()
