"""Who imports whom, and what importing costs: ARCHITECTURE's doors, over the shared package and every paper package."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from house import doors, toy
from workspace import Member, members, packages

SHARED = members()[0]
PACKAGES = packages()
NAMES = {package.module for package in PACKAGES}
EVERYONE = pytest.mark.parametrize("member", members(), ids=lambda member: member.name)
EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)

# Seconds, the best of several runs: what importing may cost; for a package, beyond torch.
SHARED_IMPORT = 0.3
PACKAGE_IMPORT = 1.5
# What "nothing heavier than numpy" leaves: shared's own hard dependencies and what those bring.
LIGHT = doors.hard_modules(SHARED) | {"markdown_it", "mdurl", "pygments"}


@EVERYONE
def test_imports_go_only_through_open_doors(member: Member) -> None:
    found = doors.violations(member, NAMES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("core.py", "from toymethod.integrations import host", "not integrations"),
        ("core.py", "from . import cli", "not cli"),
        ("core.py", "from toymethod import host", "not integrations"),
        ("core.py", "from .demo import run", "not demo"),
        ("core.py", "def f():\n    from toymethod.claims import CLAIMS", "not claims"),
        ("core.py", "import importlib\nimportlib.import_module('toymethod.bench')", "not bench"),
        ("core.py", "import transformers", "only hard dependencies"),
        ("core.py", "def f():\n    import transformers", "only hard dependencies"),
        ("core.py", "import triton", "only hard dependencies"),
        ("core.py", "import othermethod", "imports no other package"),
        ("cli.py", "from othermethod.core import g", "imports no other package"),
        ("cli.py", "import transformers", "inside the function"),
        ("demo.py", "import pandas", "neither a dependency nor an extra"),
        ("integrations/host.py", "import vllm", "neither a dependency nor an extra"),
        ("kernels/score.py", "from toymethod import core", "kernels import only kernels"),
        ("kernels/score.py", "import scipy", "only hard dependencies"),
        ("__init__.py", "from toymethod.integrations.host import Host", "must load only when used"),
    ],
)
def test_a_closed_door_is_noticed(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    member = toy.package(tmp_path)
    toy.append(member.source / file, line)
    found = doors.violations(member, {"toymethod", "othermethod"})
    assert len(found) == 1, found
    assert complaint in found[0]
    assert f"{file}:" in found[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core.py", "import math\nimport numpy\nfrom icml26_shared.kernels import choose_path\nfrom . import kernels"),
        ("cli.py", "from . import claims\nfrom .integrations import host\ndef f():\n    import transformers"),
        ("integrations/host.py", "import transformers\nfrom toymethod.core import score"),
        ("__main__.py", "from toymethod.cli import main"),
        ("host.py", "from toymethod.integrations.host import *\nimport transformers"),
        ("kernels/score.py", "import triton\nimport triton.language as tl\nfrom . import other"),
        (
            "kernels/score.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toymethod.core import score",
        ),
        ("__init__.py", "def __getattr__(name):\n    from toymethod.integrations import host\n    return host"),
        ("__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .integrations.host import Host"),
    ],
)
def test_an_open_door_is_left_alone(tmp_path: Path, file: str, line: str) -> None:
    member = toy.package(tmp_path)
    toy.append(member.source / file, line)
    assert doors.violations(member, {"toymethod", "othermethod"}) == []


def test_the_shared_package_may_not_import_a_package(tmp_path: Path) -> None:
    shared = toy.shared(tmp_path)
    toy.append(shared.source / "models.py", "def f():\n    import toymethod")
    assert len(doors.violations(shared, {"toymethod"})) == 1


@pytest.mark.parametrize(
    "module", ["icml26_shared", "icml26_shared.cli", "icml26_shared.errors", "icml26_shared.kernels"]
)
def test_importing_shared_is_quick_and_loads_nothing_heavier_than_numpy(module: str) -> None:
    cost = _import_cost(module, after="sys", runs=5)
    assert SHARED.module in cost.loaded
    installed = {name for name in cost.loaded if name in metadata.packages_distributions()}
    assert installed - {SHARED.module} <= LIGHT
    assert cost.seconds < SHARED_IMPORT


@EACH_PACKAGE
def test_importing_a_package_is_quick_and_loads_no_host_library(package: Member) -> None:
    cost = _import_cost(package.module, after="torch", runs=3)
    assert package.module in cost.loaded
    assert cost.loaded & (doors.optional_modules(package) - doors.hard_modules(package)) == set()
    assert cost.seconds < PACKAGE_IMPORT


@EACH_PACKAGE
def test_a_missing_host_library_is_named_with_its_extra(package: Member) -> None:
    """Each integration, imported without any host library, works, or says in one ImportError what to install."""
    hosts = (
        doors.optional_modules(package)
        - doors.hard_modules(package)
        - _import_cost("torch", after="sys", runs=1).loaded
    )
    names = [path.stem for path in (package.source / "integrations").iterdir() if not path.name.startswith("__")]
    answers = _python(
        f"""
import importlib, json, sys
import torch, {package.module}
sys.modules.update(dict.fromkeys({sorted(hosts)!r}))  # None: importing it raises ModuleNotFoundError
answers = {{}}
for name in {names!r}:
    try:
        importlib.import_module(f"{package.module}.integrations.{{name}}")
    except ImportError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""
    )
    assert answers.keys() <= set(names)
    for name, text in answers.items():
        assert "pip install" in text, f"{name}: {text}"
        assert f"{package.name}[" in text, f"{name}: {text}"


@dataclass(frozen=True)
class _Cost:
    seconds: float  # the quickest of the runs
    loaded: frozenset[str]  # top-level modules that the import added


@functools.cache
def _import_cost(module: str, after: str, runs: int) -> _Cost:
    """What `import module` costs in a new process that has imported `after`."""
    code = f"""
import json, sys, time
import {after}
before, start = set(sys.modules), time.perf_counter()
import {module}
print(json.dumps([time.perf_counter() - start, sorted(set(sys.modules) - before)]))
"""
    measured = [_python(code) for _ in range(runs)]
    loaded = frozenset(name.partition(".")[0] for name in measured[0][1])
    return _Cost(min(seconds for seconds, _ in measured), loaded)


def _python(code: str) -> Any:
    """Runs `code` in a new process and returns the JSON it prints."""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)
