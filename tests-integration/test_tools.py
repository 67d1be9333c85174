"""The workspace's own tools: finding Python and uv, locking, releasing, new packages, the vLLM environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import build
import lock
import new_package
import report
import run_tests
import setup_env
import uv_tool
from house import toy
from workspace import ROOT, Member, member, members, packages


def _find_python(tmp_path: Path, programs: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs tools/python with only `programs` (name: shell script) and a few plain tools on PATH."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", "utf-8")
        (folder / name).chmod(0o755)
    command = ["/bin/sh", str(ROOT / "tools" / "python"), "-c", "print('ran')"]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(folder), **variables})


OLD = 'case "$2" in *version_info*) exit 1;; esac; echo "Python 3.9.2"'
NEW = f'exec "{sys.executable}" "$@"'


def test_an_old_python3_gives_way_to_a_versioned_one(tmp_path: Path) -> None:
    answer = _find_python(tmp_path, {"python3": OLD, "python3.11": "exit 127", "python3.12": NEW})
    assert (answer.returncode, answer.stdout) == (0, "ran\n"), answer.stderr


def test_no_new_enough_python_is_said_in_one_line(tmp_path: Path) -> None:
    answer = _find_python(tmp_path, {"python3": OLD})
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "Python >= 3.11 is needed; found: Python 3.9.2" in answer.stderr


def test_a_chosen_python_is_not_replaced(tmp_path: Path) -> None:
    answer = _find_python(tmp_path, {"python3": NEW, "mine": OLD}, PYTHON="mine")
    assert answer.returncode == 1
    assert "PYTHON=mine" in answer.stderr


@pytest.fixture
def no_pip_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip's configuration files nor anything set for uv or pip in this environment."""
    monkeypatch.setattr(uv_tool, "_pip_config", lambda: "")
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")) or name == "SSL_CERT_FILE":
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_pip_files")
def test_uv_sees_what_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "first second")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.org/x")
    environment = uv_tool.uv_environment()
    assert environment["UV_FIND_LINKS"] == "first,second"
    assert environment["UV_DEFAULT_INDEX"] == "https://mirror.example.org/x"
    assert environment["UV_PYTHON_DOWNLOADS"] == "never"
    assert "UV_INDEX" not in environment


@pytest.mark.usefixtures("no_pip_files")
def test_uv_sees_pips_files_and_its_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "global.find-links='from-file'\nglobal.extra-index-url='\\nhttps://a.example\\nhttps://b.example'\n"
    monkeypatch.setattr(uv_tool, "_pip_config", lambda: lines)
    environment = uv_tool.uv_environment()
    assert environment["UV_FIND_LINKS"] == "from-file"
    assert environment["UV_INDEX"] == "https://a.example https://b.example"
    assert environment["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    monkeypatch.setenv("PIP_FIND_LINKS", "from-variable")
    assert uv_tool.uv_environment()["UV_FIND_LINKS"] == "from-variable"
    monkeypatch.setenv("UV_FIND_LINKS", "for-uv")
    assert uv_tool.uv_environment()["UV_FIND_LINKS"] == "for-uv"


@pytest.mark.usefixtures("no_pip_files")
def test_without_pip_settings_uv_keeps_its_defaults() -> None:
    assert [name for name in uv_tool.uv_environment() if name.startswith("UV_")] == ["UV_PYTHON_DOWNLOADS"]


def test_pins_drop_local_versions_comments_and_torchs_own_parts() -> None:
    text = "# comment\ntorch==2.13.0+cpu\nNumPy==2.3.5\n    # via x\nnvidia-cublas==13.1\n-e x\nidna==3.20 ; extra\n"
    assert lock.pins(text) == {"torch": "2.13.0", "numpy": "2.3.5", "idna": "3.20"}


def test_constraints_cover_every_direct_dependency() -> None:
    pinned = set(lock.pins((ROOT / "constraints.txt").read_text("utf-8")))
    for each in members():
        extras = each.project.get("optional-dependencies", {})
        lines = [*each.project["dependencies"], *(line for name in each.main_extras for line in extras[name])]
        names = {line.partition(";")[0].strip().partition(">")[0].partition("=")[0].partition("[")[0] for line in lines}
        assert names - {other.name for other in members()} <= pinned, each.name


def test_a_release_tag_names_a_member_and_its_version() -> None:
    shared = members()[0]
    assert build.release(f"icml26-shared-v{shared.version}").name == shared.name


@pytest.mark.parametrize(
    ("tag", "complaint"),
    [
        ("v0.1.0", "not a release tag"),
        ("icml26-shared-0.1.0", "not a release tag"),
        ("icml26-shared-v999.0.0", "has version"),
        ("nothing-v0.1.0", "no package called 'nothing'"),
    ],
)
def test_a_wrong_release_tag_is_refused(tag: str, complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        build.release(tag)


def test_an_unfinished_package_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = Member(new_package.create("my-method", tmp_path))
    monkeypatch.setattr(build, "member", lambda name: unfinished)
    with pytest.raises(SystemExit, match="not finished; still to come: baselines"):
        build.release("my-method-v0.1.0")


@pytest.mark.parametrize("name", ["", "My-Method", "a--b", "1st", "../x", "a_b"])
def test_a_bad_package_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit, match="is no package name"):
        new_package.create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_package_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = new_package.create("my-method", tmp_path)
    (folder / "README.md").write_text("mine", "utf-8")
    with pytest.raises(SystemExit, match="is there already"):
        new_package.create("my-method", tmp_path)
    assert (folder / "README.md").read_text("utf-8") == "mine"


def test_an_unknown_package_is_named_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="no package called 'nothing'; there are: icml26-shared"):
        member("nothing")


@pytest.mark.parametrize(
    ("which", "stderr", "expected"),
    [
        ("vllm", "No solution found when resolving dependencies\n cause: there is no version of torch==2.13.0+cpu", 75),
        ("vllm", "Failed to fetch: connection refused", "error: resolving the vllm environment failed"),
        ("vllm", "No solution found when resolving dependencies\n cause: rich conflicts with rich", "error: resolving"),
        ("kvpress", "No solution found when resolving dependencies:\n ╰─▶ there is no version of\n kvpress==0.5.5", 75),
        ("kvpress", "No solution found when resolving dependencies: kvpress was not found in the registry", 75),
        ("kvpress", "No solution found when resolving dependencies: kvpress depends on numpy<1", "error: resolving"),
        ("kvpress", "Failed to fetch: kvpress", "error: resolving the kvpress environment failed"),
    ],
)
def test_an_environment_is_skipped_only_where_it_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str, stderr: str, expected: int | str
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit 1\n", "utf-8")
    uv.chmod(0o755)
    with pytest.raises(SystemExit) as stopped:
        setup_env._probe(which, [str(uv)], dict(os.environ))
    if isinstance(expected, int):
        assert stopped.value.code == expected
        assert capsys.readouterr().out.count("\n") == 1
    else:
        assert str(stopped.value.code).startswith(expected)


def test_an_environment_may_replace_versions() -> None:
    lines = {}
    for which in ("vllm", "kvpress"):
        with setup_env._constraints(which) as file:
            lines[which] = setup_env.ROOT.joinpath(file).read_text("utf-8").splitlines()
    assert lines["vllm"] == (setup_env.ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert "transformers==5.2.0" in lines["kvpress"]
    names = [line.partition("==")[0] for line in lines["kvpress"] if not line.startswith("#")]
    assert len(names) == len(set(names))
    own = {line.partition("==")[0] for line in lines["vllm"] if not line.startswith("#")}
    assert own <= set(names)


@pytest.mark.parametrize(
    ("arguments", "cores", "workers"),
    [([], 2, "2"), (["-q", "-k", "x"], 4, "2"), (["--pdb"], 2, None), (["-n", "4"], 2, None), ([], 1, None)],
)
def test_the_whole_suite_takes_two_workers_unless_steered(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], cores: int, workers: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    added = run_tests._parallel(arguments)
    assert added[:2] == (["-n", workers] if workers else [])


def test_report_writes_one_row_a_package(tmp_path: Path) -> None:
    package = toy.package(tmp_path)
    table = "| Claim | Verdict |\n| --- | --- |\n| `a` | **holds** |\n| `b` | **fails** |\n| `c` | **needs: a GPU** |\n"
    toy.replace(package.folder / "README.md", "<!-- claims:begin -->\n", f"<!-- claims:begin -->\n{table}")
    readme = tmp_path / "README.md"
    readme.write_text("# Top\n<!-- packages:begin -->\nwas here\n<!-- packages:end -->\nbelow\n", "utf-8")
    report.write(readme, [package])
    text = readme.read_text("utf-8")
    assert text.startswith("# Top\n<!-- packages:begin -->\n")
    assert text.endswith("<!-- packages:end -->\nbelow\n")
    assert "was here" not in text
    assert "[toymethod](packages/toymethod)" in text
    assert "1 holds, 1 fails, 1 needs other hardware or data" in text


def test_report_says_what_is_still_to_come(tmp_path: Path) -> None:
    package = Member(new_package.create("my-method", tmp_path))
    assert "to come: baselines, bench, claims, demo, integrations, kernels" in report.state(package)


def test_the_readmes_table_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", copy)
    report.write(copy, packages())
    assert copy.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8"), "run `make report`"
