"""Runs pytest over the workspace (main) or over the vLLM tests (vllm), replacing this process. Standard library only.

run_tests.py main|vllm  NAME|""  [pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setup_env import CANNOT_BE_HAD, vllm_packages
from workspace import ROOT, member, members

INTEGRATION = "tests-integration"


def main() -> None:
    environment, name, *arguments = sys.argv[1:]
    if environment == "vllm":
        _run_vllm(name, arguments)
    _pytest(ROOT / ".venv", _main_folders(name), arguments)


def _main_folders(name: str) -> list[Path]:
    integration = ROOT / INTEGRATION
    if name in ("integration", INTEGRATION):
        return [integration]
    if name:
        return [_existing(member(name).folder / "tests")]
    return [*(folder for each in members() if (folder := each.folder / "tests").is_dir()), integration]


def _run_vllm(name: str, arguments: list[str]) -> None:
    if name:
        folders = [_existing(member(name).folder / "tests-vllm")]
    else:
        folders = [package.folder / "tests-vllm" for package in vllm_packages()]
    if not folders:
        print("vllm: skipped: no package has tests for vLLM (a folder tests-vllm)")
        raise SystemExit(0)
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "setup_env.py"), "vllm"]).returncode
    if made == CANNOT_BE_HAD:
        raise SystemExit(0)  # setup_env has said why
    if made:
        raise SystemExit(made)
    _pytest(ROOT / ".venv-vllm", folders, arguments)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise SystemExit(f"error: there is no folder {folder.relative_to(ROOT)}")
    return folder


def _pytest(venv: Path, folders: list[Path], arguments: list[str]) -> None:
    os.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    python = str(venv / "bin" / "python")
    paths = [str(folder.relative_to(ROOT)) for folder in folders]
    os.chdir(ROOT)
    os.execv(python, [python, "-m", "pytest", *paths, *arguments])


if __name__ == "__main__":
    main()
