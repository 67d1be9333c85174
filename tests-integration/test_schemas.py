"""CI and citation files match their public schemas (offline), and CI does what CONTRIBUTING says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import changed
from workspace import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


CITATIONS = [ROOT / "CITATION.cff", *sorted(ROOT.glob("packages/*/CITATION.cff"))]


def _check(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_workflows_match_the_public_schema() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    for path in WORKFLOWS:
        answer = _check(path, "github-workflows")
        assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("path", CITATIONS, ids=lambda path: path.parent.name)
def test_citation_files_match_the_public_schema(path: Path) -> None:
    answer = _check(path, "citation-file-format")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("github-workflows", "on: push\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n      - runs: make\n"),
        ("citation-file-format", "cff-version: 1.2.0\nmessage: Cite this.\ntitle: Something\n"),
    ],
)
def test_the_schema_check_can_fail(tmp_path: Path, schema: str, text: str) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(text, "utf-8")
    assert _check(broken, schema).returncode == 1


def test_workflows_run_only_targets_that_the_makefile_has() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if ":" in line}
    used = {
        step["run"].split()[1]
        for path in WORKFLOWS
        for job in YAML(typ="safe").load(path)["jobs"].values()
        for step in job["steps"]
        if step.get("run", "").startswith("make ")
    }
    assert {"lint", "test", "test-vllm"} <= used
    assert used <= targets


def test_publishing_needs_no_stored_token() -> None:
    release = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "release.yml")
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["packages/beta/src/beta/core.py", "README.md"], ["beta"]),
        (["packages/beta/README.md", "packages/alpha/tests/test_a.py"], ["alpha", "beta"]),
        (["shared/src/icml26_shared/cli.py"], ["shared", "alpha", "beta"]),
        (["constraints.txt"], ["shared", "alpha", "beta"]),
        (["docs/picture.png", "tests-integration/test_doors.py"], []),
        (["packages/removed/src/removed/core.py"], []),
        ([], []),
    ],
)
def test_a_change_touches_its_packages(files: list[str], expected: list[str]) -> None:
    assert changed.touched(files, ["shared", "alpha", "beta"]) == expected
