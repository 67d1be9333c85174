"""A small package in perfect order, made from the template, for tests that then break one thing."""

from __future__ import annotations

import re
from pathlib import Path

import new_package
from workspace import Member

NAME = "toymethod"

_FILES = {
    "src/toymethod/core.py": '"""The method."""\n\nimport torch\n\n\ndef score(x: torch.Tensor) -> torch.Tensor:\n'
    '    """x² (source: made up)."""\n    return x * x\n',
    "src/toymethod/__init__.py": '"""A toy."""\n\nfrom toymethod.core import score\n\n__version__ = "0.1.0"\n'
    '__all__ = ["fit", "predict", "score"]\n',
    "src/toymethod/integrations/__init__.py": "",
    "src/toymethod/integrations/host.py": "",
    "src/toymethod/host.py": "",
    "src/toymethod/kernels/__init__.py": '"""Kernels."""\n\n\ndef AOT_SPECS() -> list:\n    return []\n',
    "src/toymethod/kernels/other.py": "",
    "src/toymethod/kernels/score.py": "",
    "src/toymethod/baselines.py": "",
    "src/toymethod/bench.py": "",
    "src/toymethod/claims.py": "",
    "src/toymethod/demo.py": "",
    "tests/test_core.py": "def test_score() -> None:\n    assert 3 * 3 == 9\n",
    "tests/test_kernels.py": "def test_kernel() -> None:\n    assert 2 * 2 == 4\n",
}
_PROSE = "A sentence long enough to say what it is about, and for whom it was written."


def package(root: Path) -> Member:
    """A complete package `toymethod` in `root/packages`, beside a shared package."""
    shared(root)
    member = Member(new_package.create(NAME, root))
    for name, text in _FILES.items():
        _write(member.folder / name, text)
    pyproject = member.folder / "pyproject.toml"
    text = re.sub(r"^pending = .*$", "pending = []", pyproject.read_text("utf-8"), flags=re.MULTILINE)
    text = text.replace("# One extra a host", 'transformers = ["transformers>=5.0"]\n# One extra a host')
    pyproject.write_text(text, "utf-8")
    for path in member.folder.rglob("*"):
        if path.is_file():
            path.write_text(re.sub(r"TO WRITE[^\"\n]*", _PROSE, path.read_text("utf-8")), "utf-8")
    replace(member.folder / "README.md", "```bibtex\n", "```bibtex\n@inproceedings{toy2026, title={Toy}}\n")
    return member


def shared(root: Path) -> Member:
    """A shared package in `root/shared`, with the extras that packages name."""
    folder = root / "shared"
    project = '[project]\nname = "icml26-shared"\ndependencies = ["numpy>=1.26"]\n'
    extras = '[project.optional-dependencies]\nmodels = ["transformers>=5.0"]\nplots = ["matplotlib>=3.9"]\n'
    _write(folder / "pyproject.toml", project + extras)
    _write(folder / "src" / "icml26_shared" / "__init__.py", '__version__ = "0.1.0"\n')
    return Member(folder)


def append(path: Path, text: str) -> None:
    before = path.read_text("utf-8") if path.exists() else ""
    _write(path, f"{before}\n{text}\n")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    if old not in text:
        raise ValueError(f"{path} does not contain {old!r}")
    path.write_text(text.replace(old, new), "utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
