"""Compile Triton kernels ahead of time for real GPUs on a machine without one, and report what the compilers made.

    python -m icml26_shared.aot manifoldkv            # a table; exit code 1 when a kernel fails to compile
    python -m icml26_shared.aot manifoldkv --json

Each package lists its kernels with ``AOT_SPECS()`` in its module ``kernels``. Compiling always happens in a process of
its own, with ``TRITON_INTERPRET`` unset, so it can be called from a process in which Triton interprets.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from icml26_shared.kernels import KernelSpec, has_triton

TARGETS = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of one kernel for one target.

    Args:
        name: the kernel specification's name.
        target: ``"sm_80"``, ``"sm_90"``, ``"gfx942"``, ...
        registers: 32-bit vector registers a thread holds (NVIDIA: at most 255; AMD: VGPRs and AGPRs, at most 512).
        spills: registers a thread spills to memory. NVIDIA: bytes of spill stores / 4; AMD: VGPRs plus SGPRs spilled.
        stack_bytes: memory a thread uses beside its registers, spills among it (NVIDIA: stack frame; AMD: scratch).
        shared_bytes: shared memory (AMD: LDS) of one program.
        num_warps: warps of one program.
        error: why it did not compile; empty when it did.
    """

    name: str
    target: str
    registers: int = 0
    spills: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    num_warps: int = 0
    error: str = ""


def compile(source: str | Iterable[KernelSpec], targets: Sequence[str] = TARGETS) -> list[CompileReport]:
    """Compile kernels in a new process.

    Args:
        source: the name of a package whose module ``kernels`` has ``AOT_SPECS()``, or specifications.
        targets: ``"sm_NN"`` for NVIDIA, ``"gfxNNN"`` for AMD.

    Returns:
        One report for each specification and target; a kernel that does not compile has its `error` set.

    Raises:
        ValueError: an unknown target, or a specification whose kernel is not a module's function.
        ImportError: Triton is not installed.
        RuntimeError: the compiling process failed as a whole; its output is in the message.
    """
    for target in targets:
        _parse_target(target)
    _require_triton()
    request = {"targets": list(targets)}
    if isinstance(source, str):
        request["package"] = source  # type: ignore[assignment]
    else:
        request["specs"] = [_to_plain(spec) for spec in source]  # type: ignore[misc]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "icml26_shared.aot", "--request"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"compiling ahead of time ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return [CompileReport(**report) for report in json.loads(done.stdout)]


def package_specs(package: str) -> list[KernelSpec]:
    """The kernels a package lists: ``PACKAGE.kernels.AOT_SPECS()``."""
    module = importlib.import_module(f"{package}.kernels")
    if not hasattr(module, "AOT_SPECS"):
        raise ValueError(f"{module.__name__} has no AOT_SPECS(); it must return a list of KernelSpec")
    return list(module.AOT_SPECS())


def _require_triton() -> None:
    if not has_triton():
        raise ImportError("compiling kernels ahead of time needs Triton: pip install triton")


def _to_plain(spec: KernelSpec) -> dict[str, Any]:
    function = getattr(spec.fn, "fn", spec.fn)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module in {None, "__main__"} or "<" in name:
        raise ValueError(f"kernel of {spec.name!r} must be a function of an importable module, not {module}.{name}")
    return {**{key: value for key, value in vars(spec).items() if key != "fn"}, "fn": f"{module}:{name}"}


def _from_plain(data: dict[str, Any]) -> KernelSpec:
    module, name = data["fn"].split(":")
    function = getattr(importlib.import_module(module), name)
    return KernelSpec(**{**data, "fn": function, "divisible_by_16": tuple(data["divisible_by_16"])})


def _parse_target(target: str) -> tuple[str, int | str, int]:
    if match := re.fullmatch(r"sm_(\d+)", target):
        return "cuda", int(match[1]), 32
    if re.fullmatch(r"gfx9\w+", target):
        return "hip", target, 64
    if re.fullmatch(r"gfx1\w+", target):
        return "hip", target, 32
    raise ValueError(f"unknown target {target!r}; give 'sm_NN' (NVIDIA, such as 'sm_90') or 'gfxNNN' (AMD)")


def compile_here(spec: KernelSpec, target: str) -> CompileReport:
    """Compile one kernel in this process, in which Triton must not interpret."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp_size = _parse_target(target)
    names = spec.fn.arg_names
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    signature = {name: "constexpr" if name in spec.constexprs else spec.signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible_by_16}
    source = ASTSource(spec.fn, signature, constexprs, attributes)
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):  # Triton prints the log of NVIDIA's assembler
            made = triton.compile(
                source,
                target=GPUTarget(backend, arch, warp_size),
                options={"num_warps": spec.num_warps, "num_stages": spec.num_stages},
            )
    except Exception as error:  # noqa: BLE001 the compilers raise anything; it is reported as this kernel's result
        return CompileReport(spec.name, target, error=f"{type(error).__name__}: {error}"[:2000] or "failed")
    resources = _nvidia_resources(log.getvalue()) if backend == "cuda" else _amd_resources(made.asm["amdgcn"])
    return CompileReport(
        spec.name, target, shared_bytes=made.metadata.shared, num_warps=made.metadata.num_warps, error="", **resources
    )


def _nvidia_resources(log: str) -> dict[str, int]:
    """From ``ptxas -v``: ``Used 40 registers``, ``8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads``."""
    registers = re.findall(r"Used (\d+) registers", log)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not frames:
        raise RuntimeError(f"no resource usage in the log of ptxas; this needs Triton >= 3.4. The log:\n{log[-2000:]}")
    spilled = max(max(int(stores), int(loads)) for _, stores, loads in frames)
    return {
        "registers": max(map(int, registers)),
        "spills": -(-spilled // 4),
        "stack_bytes": max(int(stack) for stack, _, _ in frames),
    }


def _amd_resources(assembly: str) -> dict[str, int]:
    """From the kernel's metadata at the end of the assembly: ``.vgpr_count: 40``, ``.vgpr_spill_count: 0``, ..."""

    def metadata(key: str) -> int:
        values = re.findall(rf"^\s*-?\s*\.{key}:\s+(\d+)", assembly, re.MULTILINE)
        if not values:
            raise RuntimeError(f"the AMD assembly has no metadata .{key}")
        return max(map(int, values))

    return {
        "registers": metadata("vgpr_count"),
        "spills": metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        "stack_bytes": metadata("private_segment_fixed_size"),
    }


def _compile_all(specs: Iterable[KernelSpec], targets: Sequence[str]) -> list[CompileReport]:
    # Results must come from compiling, with the assembler's log, not from a cache of earlier runs.
    os.environ.update(TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1")
    return [compile_here(spec, target) for spec in specs for target in targets]


def _answer_request() -> int:
    request = json.load(sys.stdin)
    package = request.get("package")
    specs = package_specs(package) if package else [_from_plain(data) for data in request["specs"]]
    print(json.dumps([asdict(report) for report in _compile_all(specs, request["targets"])]))
    return 0


def _print_table(package: str, reports: list[CompileReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = "regs and spills: per thread; stack: bytes per thread; shared: bytes per program"
    table = Table(title=f"{package}: kernels compiled ahead of time", caption=caption)
    for heading in ("kernel", "target", "regs", "spills", "stack B", "shared B", "warps"):
        text = heading in {"kernel", "target"}
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for report in reports:
        if report.error:
            table.add_row(report.name, report.target, f"failed: {report.error.splitlines()[0]}")
            continue
        figures = (report.registers, report.spills, report.stack_bytes, report.shared_bytes, report.num_warps)
        table.add_row(report.name, report.target, *map(str, figures))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit code 0: all compiled; 1: a kernel did not compile or spills; 2: bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m icml26_shared.aot", description=__doc__.split("\n")[0])
    parser.add_argument("package", nargs="?", help="import name of a package with kernels")
    parser.add_argument("--target", action="append", metavar="T", help=f"default: {' '.join(TARGETS)}; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--request", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.request:
        return _answer_request()
    if options.package is None:
        parser.error("name a package, such as: python -m icml26_shared.aot manifoldkv")
    try:
        importlib.import_module(options.package)
        reports = compile(options.package, options.target or TARGETS)
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print_table(options.package, reports)
    return 1 if any(report.error or report.spills for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
