"""Finds `uv`, or gets it, and lets it see what pip is configured to use. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys

from workspace import ROOT

TOOLS = ROOT / ".tools"
OLDEST = (0, 7, 0)  # `uv pip install --group` came with it


def find_uv() -> str:
    """The path of a `uv` that runs: one on PATH, else the workspace's own in `.tools`, installed on first need."""
    for candidate in (shutil.which("uv"), str(TOOLS / "bin" / "uv")):
        if candidate and _works(candidate):
            return candidate
    print("setup: getting uv from the package index", flush=True)
    if not (_install_with_venv() or _install_with_target()):
        raise SystemExit(
            "error: uv is missing and could not be installed. Do one of these, then run the same command again:\n"
            "  give this Python pip or venv (Debian, Ubuntu: apt-get install python3-venv),\n"
            "  or install uv yourself so that it is on PATH."
        )
    return str(TOOLS / "bin" / "uv")


def uv_environment() -> dict[str, str]:
    """`os.environ` with pip's indexes, find-links and certificates translated for uv, which does not read pip's.

    What is set for uv itself wins. `PIP_*` variables win over pip's configuration files, as in pip.
    """
    environment = dict(os.environ)
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    environment.pop("VIRTUAL_ENV", None)
    pip = _pip_settings()
    for option, variable, separator in (
        ("find-links", "UV_FIND_LINKS", ","),
        ("index-url", "UV_DEFAULT_INDEX", " "),
        ("extra-index-url", "UV_INDEX", " "),
        ("cert", "SSL_CERT_FILE", " "),
    ):
        if option in pip and variable not in environment:
            environment[variable] = separator.join(pip[option].split())
    if "UV_INDEX" in environment:
        environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip does: the best over all indexes
    return environment


def _pip_settings() -> dict[str, str]:
    """pip's effective options by name: its configuration files, then `PIP_*` variables over them."""
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        for line in _pip_config().splitlines():
            found = re.fullmatch(rf"{section}\.([\w-]+)='(.*)'", line.strip())
            if found:
                settings[found[1]] = found[2].replace("\\n", " ").strip()
    for option in ("find-links", "index-url", "extra-index-url", "cert"):
        value = os.environ.get("PIP_" + option.upper().replace("-", "_"))
        if value:
            settings[option] = value
    return settings


@functools.cache
def _pip_config() -> str:
    """What `pip config list` prints with whichever pip there is; nothing without one."""
    for command in ([sys.executable, "-m", "pip"], [str(TOOLS / "bin" / "python"), "-m", "pip"], ["pip"], ["pip3"]):
        with contextlib.suppress(OSError):
            listing = subprocess.run([*command, "config", "list"], capture_output=True, text=True)
            if listing.returncode == 0:
                return listing.stdout
    return ""


def _works(uv: str) -> bool:
    try:
        answer = subprocess.run([uv, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    version = re.match(r"uv (\d+)\.(\d+)\.(\d+)", answer.stdout)
    return version is not None and tuple(map(int, version.groups())) >= OLDEST


def _requirement() -> list[str]:
    return ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), "uv"]


def _install_with_venv() -> bool:
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(TOOLS)], capture_output=True)
    if made.returncode:
        return False
    installed = subprocess.run([str(TOOLS / "bin" / "python"), "-m", "pip", "install", *_requirement()])
    return installed.returncode == 0 and _works(str(TOOLS / "bin" / "uv"))


def _install_with_target() -> bool:
    """For a Python without ensurepip whose own pip works; the wheel's executable lands in `bin` beside the module."""
    shutil.rmtree(TOOLS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--target", str(TOOLS), *_requirement()]
    return subprocess.run(command).returncode == 0 and _works(str(TOOLS / "bin" / "uv"))


if __name__ == "__main__":  # `uv_tool.py ARGUMENTS...` runs uv with pip's settings
    print("+ uv " + shlex.join(sys.argv[1:]), file=sys.stderr)
    uv_path = find_uv()
    os.execve(uv_path, [uv_path, *sys.argv[1:]], uv_environment())
