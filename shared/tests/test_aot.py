"""Ahead-of-time compilation: real compilers, real targets, in a process of its own."""

from __future__ import annotations

import json
import textwrap

import pytest

pytest.importorskip("triton")

from icml26_shared import aot
from icml26_shared.kernels import KernelSpec

KERNELS = """
    from icml26_shared.kernels import KernelSpec, jit, triton_language
    tl = triton_language()

    @jit
    def double(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        tl.store(target_ptr + offsets, 2 * tl.load(source_ptr + offsets, mask=inside), mask=inside)

    @jit
    def reverse_big(source_ptr, target_ptr, BLOCK: tl.constexpr):
        # One warp holds 16,384 numbers, 512 a thread, all live at once: more than its registers.
        offsets = tl.arange(0, BLOCK)
        numbers = tl.load(source_ptr + offsets)
        tl.store(target_ptr + offsets, numbers / tl.sum(numbers))

    @jit
    def wrong(source_ptr, BLOCK: tl.constexpr):
        tl.store(source_ptr + tl.arange(0, BLOCK), undefined_name)

    def AOT_SPECS():
        return [KernelSpec("double", double, {"source_ptr": "*fp32", "target_ptr": "*fp32", "count": "i32"},
                           {"BLOCK": 256}, num_warps=2, divisible_by_16=("source_ptr", "target_ptr"))]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with kernels, importable from here and from the compiling process."""
    folder = tmp_path / "aot_example"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernels.py").write_text(textwrap.dedent(KERNELS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return "aot_example"


def test_compiles_for_the_three_targets(package):
    reports = aot.compile(package)
    assert [(report.name, report.target) for report in reports] == [("double", target) for target in aot.TARGETS]
    for report in reports:
        assert report.error == ""
        assert 0 < report.registers < 64
        assert (report.spills, report.stack_bytes, report.num_warps) == (0, 0, 2)


def test_specifications_compile_from_an_interpreting_process(package, monkeypatch):
    import importlib

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = importlib.import_module(f"{package}.kernels")
    reports = aot.compile(module.AOT_SPECS(), targets=("sm_90",))
    assert [report.error for report in reports] == [""]


def test_spills_and_failures_are_reported(package):
    import importlib

    module = importlib.import_module(f"{package}.kernels")
    pointers = {"source_ptr": "*fp32", "target_ptr": "*fp32"}
    specs = [
        KernelSpec("big", module.reverse_big, pointers, {"BLOCK": 16384}, num_warps=1),
        KernelSpec("wrong", module.wrong, {"source_ptr": "*fp32"}, {"BLOCK": 16}),
    ]
    big_nvidia, wrong_nvidia = aot.compile(specs, targets=("sm_80",))
    assert big_nvidia.spills > 0
    assert big_nvidia.stack_bytes > 0
    assert "undefined_name" in wrong_nvidia.error


def test_command_line(package, capsys):
    assert aot.main([package, "--target", "sm_80", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["name"], report["target"]) == ("double", "sm_80")
    assert aot.main([package, "--target", "sm_80"]) == 0
    assert "regs" in capsys.readouterr().out
    assert aot.main([package, "--target", "h100"]) == 2
    assert "unknown target 'h100'" in capsys.readouterr().err
    assert aot.main(["no_such_package_here"]) == 2
    assert "no_such_package_here" in capsys.readouterr().err


def test_kernels_without_a_module_are_refused():
    with pytest.raises(ValueError, match="must be a function of an importable module"):
        aot.compile([KernelSpec("local", lambda: None, {})])


def test_resource_parsers():
    log = "ptxas info : Function properties for k\n 24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
    log += "ptxas info : Used 255 registers, used 1 barriers"
    assert aot._nvidia_resources(log) == {"registers": 255, "spills": 3, "stack_bytes": 24}
    with pytest.raises(RuntimeError, match="no resource usage"):
        aot._nvidia_resources("")
    text = "  .private_segment_fixed_size: 16\n  .sgpr_spill_count: 2\n  .vgpr_count:     40\n  .vgpr_spill_count: 3\n"
    assert aot._amd_resources(text) == {"registers": 40, "spills": 5, "stack_bytes": 16}
