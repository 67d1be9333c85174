"""What must not be in the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from workspace import ROOT

LARGEST_FILE = 1_000_000  # bytes

# Written in pieces, so that this file does not contain what it looks for.
REGISTRY = re.compile(
    r"https?://[^\s\"'<>]*/simple(?![a-z])|https?://[^\s\"'<>]*pythonhosted[.]|(?:^|\s)--(?:extra-)?index-url[ =]\S"
    r"|^\s*(?:extra-)?index-url\s*=|registry\s*=\s*.https?:",
    re.MULTILINE,
)
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|home|farm|opt/wheels|opt/pypi|tmp)/[\w.-]+")
BINARY = {".png", ".jpg", ".gif", ".safetensors", ".parquet", ".npz"}


def _tracked() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout: nothing tells which files belong to the repository")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _texts() -> list[tuple[Path, str]]:
    paths = [path for path in _tracked() if path.suffix not in BINARY]
    return [(path.relative_to(ROOT), path.read_text("utf-8", errors="replace")) for path in paths]


def _registries(text: str) -> list[str]:
    return [found.group().strip() for found in REGISTRY.finditer(text)]


def _machine_paths(text: str) -> list[str]:
    return [found.group() for found in MACHINE_PATH.finditer(text)]


def test_no_registry_address() -> None:
    assert {str(path): found for path, text in _texts() if (found := _registries(text))} == {}


def test_no_path_of_one_machine() -> None:
    assert {str(path): found for path, text in _texts() if (found := _machine_paths(text))} == {}


def test_no_lock_file_with_addresses() -> None:
    locks = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock"}
    assert [path.name for path in _tracked() if path.name in locks] == []


def test_links_between_files_lead_somewhere() -> None:
    broken = {}
    for path, text in _texts():
        if path.suffix == ".md":
            targets = [found.partition("#")[0] for found in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in found]
            missing = [target for target in targets if target and not (ROOT / path.parent / target).exists()]
            broken |= {str(path): missing} if missing else {}
    assert broken == {}


def test_no_large_file() -> None:
    assert {path.name: size for path in _tracked() if (size := path.stat().st_size) > LARGEST_FILE} == {}


def test_no_unsafe_serialisation() -> None:
    """Results and models are JSON, parquet or safetensors."""
    unsafe = {".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib"}
    assert [path.name for path in _tracked() if path.suffix in unsafe] == []


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.!]*", line)] == []
    names = [line.partition("==")[0] for line in pins]
    assert names == sorted(set(names))
    assert {"torch", "transformers", "pytest", "ruff", "mypy", "uv"} <= set(names)


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "mirror.example.org/simple/",
        "pip install --index-url" + " file:///x torch",
        "index-url" + " = https://x",
    ],
)
def test_an_address_is_noticed(text: str) -> None:
    assert len(_registries(text)) == 1


@pytest.mark.parametrize("path", ["/" + "work/main/x.py", "'/" + "root/.cache'", "in /" + "home/alice/models, say"])
def test_a_machine_path_is_noticed(path: str) -> None:
    assert len(_machine_paths(path)) == 1


@pytest.mark.parametrize("text", ["https://docs.python.org/3", "a/simple/case", "framework/main", "../shared/data"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert _registries(text) == []
    assert _machine_paths(text) == []
