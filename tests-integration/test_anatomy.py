"""Every package has its rooms, papers and tests; and each of these checks notices what it is there for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import new_package
from house import anatomy, toy
from workspace import ROOT, Member, members, packages

Change = Callable[[Member], object]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_is_in_order(package: Member) -> None:
    found = anatomy.problems(package)
    assert not found, "\n".join(found)


def test_the_shared_package_has_no_stubs_and_no_endless_files() -> None:
    shared = members()[0]
    found = [
        *anatomy.no_stubs(shared),
        *anatomy.sizes(shared),
        *anatomy.tests_assert(shared),
        *anatomy.changelog(shared),
    ]
    assert found == []
    assert (shared.source / "py.typed").is_file()


def test_the_ground_floor_is_there() -> None:
    files = (
        "README.md",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        ".ci/run",
        "LICENSE",
        "CONTRIBUTING.md",
        "CITATION.cff",
    )
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_toy_package_is_in_order(tmp_path: Path) -> None:
    assert anatomy.problems(toy.package(tmp_path)) == []


def _without(name: str) -> Change:
    return lambda member: (member.folder / name).unlink()


def _edited(name: str, old: str, new: str) -> Change:
    return lambda member: toy.replace(member.folder / name, old, new)


def _with(name: str, text: str) -> Change:
    return lambda member: toy.append(member.folder / name, text)


SRC = "src/toymethod"
LONG_FUNCTION = "def f() -> int:\n" + "    x = 1\n" * 81


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *((_without(name), f"{name} is missing") for name in ("README.md", "CHANGELOG.md", "CITATION.cff")),
        *((_without(f"{SRC}/{name}"), f"{name} is missing") for name in anatomy.ROOMS if name != "__init__.py"),
        (_without("tests/test_cli.py"), "tests/test_cli.py is missing"),
        (_without("tests/test_kernels.py"), "tests/test_kernels.py is missing"),
        (_without(f"{SRC}/core.py"), "no module with the method"),
        (_edited("pyproject.toml", "pending = []", 'pending = ["demo.py"]'), "declared as pending but is there"),
        (_edited("pyproject.toml", "pending = []", 'pending = ["lunch.py"]'), "'lunch.py' cannot be pending"),
        (_edited("pyproject.toml", 'name = "toymethod"', 'name = "toy"'), "is not the folder's name"),
        (_edited("pyproject.toml", "toymethod.cli:main", "toymethod.cli:start"), "the one console script is"),
        (_edited("pyproject.toml", 'license = "Apache-2.0"', ""), "license is missing"),
        (
            _edited("pyproject.toml", "A sentence", "TO WRITE: a sentence"),
            "description is missing or still to be written",
        ),
        (_edited("pyproject.toml", '">=3.11"', '">=3.9"'), "requires-python"),
        (_edited("pyproject.toml", '"torch>=2.6"', '"torch"'), "'torch' has no lower bound"),
        (_edited("README.md", "## Limits", "## Other"), "no section '## Limits'"),
        (_edited("README.md", "## Problem", "```\n## Problem\n```"), "no section '## Problem'"),
        (_edited("README.md", "A sentence", "TO WRITE"), "is still to be written"),
        (_edited("README.md", "```python", "```"), "no Python example"),
        (_edited("README.md", "pip install", "pip get"), "does not say pip install toymethod"),
        (_edited("README.md", "<!-- claims:end -->", ""), "no <!-- claims:end -->"),
        (_edited("README.md", "@inproceedings{", "inproceedings{"), "no BibTeX"),
        (_edited("CHANGELOG.md", "## 0.1.0", "## 0.0.9"), "no section '## 0.1.0'"),
        (_edited("CITATION.cff", "version: 0.1.0", "version: 0.2.0"), "must say version: 0.1.0"),
        (_edited("CITATION.cff", "preferred-citation:", "other:"), "no field preferred-citation"),
        (_edited(f"{SRC}/__init__.py", '"fit", "predict", ', ""), "offers 1 public names"),
        (_edited(f"{SRC}/__init__.py", "__all__ =", "names ="), "no __all__"),
        (_with(f"{SRC}/core.py", "def f() -> None:\n    pass"), "f does nothing"),
        (_with(f"{SRC}/core.py", "def f() -> None:\n    ..."), "f does nothing"),
        (_with(f"{SRC}/core.py", 'class A:\n    def f(self) -> None:\n        """Later."""'), "f does nothing"),
        (_with(f"{SRC}/core.py", "def f() -> None:\n    raise NotImplementedError"), "only raises NotImplementedError"),
        (
            _with(f"{SRC}/core.py", "def f() -> None:\n    raise NotImplementedError('later')"),
            "only raises NotImplemented",
        ),
        (_with(f"{SRC}/core.py", "x = 1\n" * 401), "split it at 400"),
        (_with(f"{SRC}/core.py", LONG_FUNCTION), "f has 81 lines of code"),
        (_with("tests/test_core.py", "def test_runs() -> None:\n    print(1)"), "test_runs asserts nothing"),
        (_with("tests/test_core.py", "def test_true() -> None:\n    assert True"), "test_true asserts nothing"),
    ],
)
def test_a_broken_package_is_noticed(tmp_path: Path, change: Change, complaint: str) -> None:
    member = toy.package(tmp_path)
    change(member)
    found = anatomy.problems(Member(member.folder))
    assert any(complaint in problem for problem in found), found
    assert all(problem.startswith("toy") for problem in found)


@pytest.mark.parametrize(
    "text",
    [
        'def f() -> None:\n    """No-op: there is nothing to undo."""',
        'def f() -> None:\n    """Raises NotImplementedError: latent caches hold no keys."""\n'
        "    raise NotImplementedError('layer 3 holds latents; use another cache')",
        "from abc import abstractmethod\nclass A:\n    @abstractmethod\n    def f(self) -> None: ...",
        "from typing import Protocol\nclass A(Protocol):\n    def f(self) -> None: ...",
        "def f(x: int) -> int:\n    if x:\n        raise NotImplementedError('x')\n    return 1",
    ],
)
def test_a_declared_no_op_or_refusal_is_no_stub(tmp_path: Path, text: str) -> None:
    member = toy.package(tmp_path)
    toy.append(member.source / "core.py", text)
    assert anatomy.problems(member) == []


def test_a_test_may_check_through_a_helper(tmp_path: Path) -> None:
    member = toy.package(tmp_path)
    helpers = "def compare(x: int) -> None:\n    inner(x)\ndef inner(x: int) -> None:\n    assert x == 1"
    toy.append(member.folder / "tests" / "test_core.py", f"{helpers}\ndef test_compared() -> None:\n    compare(1)")
    assert anatomy.problems(member) == []


def test_a_pending_room_may_be_missing(tmp_path: Path) -> None:
    member = toy.package(tmp_path)
    toy.replace(member.folder / "pyproject.toml", "pending = []", 'pending = ["claims.py"]')
    (member.source / "claims.py").unlink()
    assert anatomy.problems(Member(member.folder)) == []


def test_a_new_package_lacks_only_what_its_author_must_write(tmp_path: Path) -> None:
    member = Member(new_package.create("my-method", tmp_path))
    found = anatomy.problems(member)
    allowed = ("still to be written", "no module with the method", "public names", "no BibTeX")
    assert [problem for problem in found if not any(words in problem for words in allowed)] == []
    assert len(found) >= len(allowed)


def test_a_new_package_is_clean_for_ruff(tmp_path: Path) -> None:
    new_package.create("my-method", tmp_path)
    for command in (["check"], ["format", "--check"]):
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            *command,
            "--no-cache",
            "--config",
            str(ROOT / "pyproject.toml"),
            "packages",
        ]
        answer = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stdout + answer.stderr
