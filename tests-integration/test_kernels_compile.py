"""Every kernel of every package compiles for real GPUs, ahead of time, without spilling registers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from icml26_shared import aot
from workspace import Member, packages

TARGETS = ("sm_80", "sm_90", "gfx942")
LARGEST_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # of one block
WITH_KERNELS = [package for package in packages() if "kernels/__init__.py" not in package.pending]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton has no build for this platform, and nothing else compiles kernels",
)


@pytest.mark.slow
@pytest.mark.parametrize("package", WITH_KERNELS, ids=lambda package: package.name)
def test_kernels_compile_for_real_gpus(package: Member, record_property: Callable[[str, object], None]) -> None:
    reports = aot.compile(package.module, targets=TARGETS)
    for report in reports:
        line = f"{report.registers} registers, {report.spills} spills, {report.shared_bytes} bytes of shared memory"
        record_property(f"{report.name} {report.target}", line)
        print(f"{report.name} {report.target}: {report.error or line}")
    assert {report.target for report in reports} == set(TARGETS)
    assert {f"{report.name} {report.target}": report.error for report in reports if report.error} == {}
    explained = package.explained_spills  # "says why": per kernel name, with its reason, in the package's pyproject
    spilling = {f"{report.name} {report.target}": report.spills for report in reports if report.spills}
    assert {name: spills for name, spills in spilling.items() if name not in explained} == {}
    assert {name for name in explained if name not in spilling} == set(), "explained, but no longer spilling"
    assert all(report.registers > 0 for report in reports)
    too_much = [report for report in reports if report.shared_bytes > LARGEST_SHARED_BYTES[report.target]]
    assert too_much == []
