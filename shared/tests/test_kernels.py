"""Path choice, optional Triton, and the pytest plugin for Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from icml26_shared import kernels  # noqa: E402

pytest_plugins = "pytester"


@pytest.fixture
def no_variables(monkeypatch):
    monkeypatch.delenv("ICML26_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class OnDevice:
    """A tensor's device is all that the choice reads; this machine may have no GPU."""

    def __init__(self, name):
        self.device = torch.device(name)


@pytest.mark.parametrize(("device", "path"), [("cpu", "cpu"), ("cuda", "triton"), ("mps", "torch"), ("meta", "torch")])
def test_path_follows_the_device(no_variables, monkeypatch, device, path):
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    assert kernels.choose_path(OnDevice(device)) == path


def test_gpu_without_triton_takes_torch_and_warns_once(no_variables, monkeypatch):
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    kernels._warn_missing_triton.cache_clear()
    with pytest.warns(UserWarning, match="pip install triton") as caught:
        assert [kernels.choose_path(OnDevice("cuda")) for _ in range(3)] == ["torch"] * 3
    assert len(caught) == 1
    kernels._warn_missing_triton.cache_clear()


def test_environment_forces_and_argument_wins(no_variables, monkeypatch):
    monkeypatch.setenv("ICML26_KERNELS", "torch")
    assert kernels.choose_path(torch.ones(1)) == "torch"
    assert kernels.choose_path(torch.ones(1), prefer="cpu") == "cpu"
    monkeypatch.setenv("ICML26_KERNELS", "auto")
    assert kernels.choose_path(torch.ones(1)) == "cpu"


def test_triton_on_the_cpu_needs_the_interpreter(no_variables, monkeypatch):
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.choose_path(torch.ones(1), prefer="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.choose_path(torch.ones(1), prefer="triton") == "triton"


def test_bad_choices(no_variables, monkeypatch):
    with pytest.raises(ValueError, match="at least one tensor"):
        kernels.choose_path()
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        kernels.choose_path(torch.ones(1), torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="'fast' from the argument; allowed: 'triton', 'cpu', 'torch'"):
        kernels.choose_path(torch.ones(1), prefer="fast")
    with pytest.raises(ValueError, match="are on meta"):
        kernels.choose_path(torch.ones(1, device="meta"), prefer="cpu")
    monkeypatch.setenv("ICML26_KERNELS", "cuda")
    with pytest.raises(ValueError, match="'cuda' from ICML26_KERNELS; allowed: 'auto'"):
        kernels.choose_path(torch.ones(1))
    monkeypatch.delenv("ICML26_KERNELS")
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    with pytest.raises(ImportError, match="pip install triton"):
        kernels.choose_path(torch.ones(1), prefer="triton")


def test_kernels_launch_on_the_tensors_device(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    with kernels.launching_on(torch.ones(1)):
        assert entered == []
    kernels.launching_on(OnDevice("cuda:1"))
    assert entered == [torch.device("cuda:1")]


def test_without_triton_a_kernel_can_be_declared_but_not_launched(monkeypatch):
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert kernels.triton_language() is None

    @kernels.jit
    def add_kernel(x_ptr, n):
        pass

    with pytest.raises(ImportError, match="'add_kernel' needs Triton: pip install triton"):
        add_kernel[(1,)](None, 0)


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, icml26_shared.kernels, icml26_shared.aot, icml26_shared.testing.plugin\n"
        "print(sorted({'torch', 'triton', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


MARKED = """
    import os
    import pytest

    @pytest.fixture(scope="module")
    def shared_number():
        yield os.getpid()

    def test_plain():
        assert "TRITON_INTERPRET" not in os.environ

    @pytest.mark.triton_interpreter
    @pytest.mark.parametrize("n", [1, 2])
    def test_marked(n, shared_number, record_property):
        record_property("pid", str(shared_number))
        assert os.environ["TRITON_INTERPRET"] == "1"
        assert os.getpid() == shared_number

    @pytest.mark.triton_interpreter
    def test_fails():
        print("said in the child")
        assert {"given": 1} == {"given": 2}

    @pytest.mark.triton_interpreter
    def test_skips():
        pytest.skip("not today")

    @pytest.mark.triton_interpreter
    @pytest.mark.xfail(reason="known", strict=True)
    def test_known_failure():
        raise RuntimeError("as expected")

    def test_plain_again(shared_number):
        assert shared_number == os.getpid()
"""


@pytest.fixture
def run(pytester, no_variables, monkeypatch):
    """Run pytest in its own process; it finds the plugin by the entry point of the installed package, as for users."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def start(source, *arguments):
        pytester.makepyfile(textwrap.dedent(source))
        return pytester.runpytest_subprocess(*arguments)

    start.folder = pytester.path
    return start


def test_marked_tests_run_in_one_child_and_report_one_by_one(run):
    result = run(MARKED, "-v", "-rs", "--junitxml=out.xml")
    result.assert_outcomes(passed=4, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*test_marked?1? PASSED*", "*test_fails FAILED*", "*test_skips SKIPPED*"])
    result.stdout.fnmatch_lines(["*{'given': 1} == {'given': 2}*", "*said in the child*", "*SKIPPED*not today*"])
    assert run.folder.joinpath("out.xml").read_text().count('<property name="pid"') == 2


def test_selection_and_stop_at_the_first_failure(run):
    result = run(MARKED, "-x", "-k", "not plain")
    result.assert_outcomes(passed=2, failed=1, deselected=2)


def test_a_dying_child_fails_its_test_and_the_rest_goes_on(run):
    source = """
        import faulthandler, os
        import pytest
        pytestmark = pytest.mark.triton_interpreter

        def test_before():
            assert os.environ["TRITON_INTERPRET"] == "1"

        def test_dies():
            faulthandler._sigsegv()

        def test_after():
            assert os.environ["TRITON_INTERPRET"] == "1"
    """
    result = run(source)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*ended with exit code -11*", "*Segmentation fault*", "*in test_dies*"])


def test_debug_option_interprets_in_this_process(run):
    source = """
        import os, pytest
        pids = {os.getpid()}

        @pytest.mark.triton_interpreter
        def test_marked():
            assert os.environ["TRITON_INTERPRET"] == "1"
            pids.add(os.getpid())

        def test_plain():
            assert os.environ["TRITON_INTERPRET"] == "1"
            assert pids == {os.getpid()}
    """
    run(source, "--triton-interpret").assert_outcomes(passed=2)


def test_works_under_xdist(run):
    pytest.importorskip("xdist")
    run(MARKED, "-n", "2").assert_outcomes(passed=4, failed=1, skipped=1, xfailed=1)


tl = kernels.triton_language()


@kernels.jit
def double_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(target_ptr + offsets, 2 * tl.load(source_ptr + offsets, mask=inside), mask=inside)


@pytest.mark.triton_interpreter
def test_a_kernel_runs_on_cpu_tensors():
    pytest.importorskip("triton")
    assert kernels.interpreting()
    source, target = torch.arange(10.0), torch.zeros(10)
    double_kernel[(3,)](source, target, 10, BLOCK=4)
    assert target.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
