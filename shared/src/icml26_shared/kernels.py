"""Which path an operation takes, and how a Triton kernel is declared so that Triton stays optional.

An operation of a package has up to three paths with one result:

``"triton"``  a Triton kernel: tensors on an NVIDIA or AMD GPU (or CPU tensors under Triton's interpreter, for tests)
``"cpu"``     vectorised torch tuned for caches and few cores: tensors on the CPU
``"torch"``   the plain reference: every other device, or a GPU without Triton

Importing this module imports neither torch nor Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

if TYPE_CHECKING:
    import torch

Path = Literal["triton", "cpu", "torch"]

ENVIRONMENT_VARIABLE = "ICML26_KERNELS"
_INSTALL = "pip install triton (Linux with an NVIDIA or AMD GPU; it comes with the GPU builds of torch)"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Looks for it without importing it."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` in the environment.

    Triton reads the variable when a kernel is declared, so set it before the module with the kernel is imported.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


def __getattr__(name: str) -> Any:
    if name == "HAS_TRITON":
        return has_triton()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_path(*tensors: torch.Tensor, prefer: Path | None = None) -> Path:
    """The path an operation on these tensors takes.

    Args:
        tensors: the operation's tensors, at least one, all on one device.
        prefer: the path the caller wants. ``None`` reads the environment variable ``ICML26_KERNELS``
            (``auto``, ``triton``, ``cpu`` or ``torch``); unset or ``auto`` picks by device: ``"triton"`` on a GPU that
            has it, ``"cpu"`` on the CPU, ``"torch"`` elsewhere. A GPU without Triton gets ``"torch"`` and one warning.

    Raises:
        ValueError: an unknown path, no tensors, tensors on several devices, or a path that cannot take these tensors
            (``"cpu"`` for a GPU tensor; ``"triton"`` for a CPU tensor outside Triton's interpreter).
        ImportError: ``"triton"`` was asked for and Triton is not installed.
    """
    if not tensors:
        raise ValueError("choose_path() needs at least one tensor; none was given")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"tensors lie on several devices ({names}); move them to one device")
    device = devices.pop()
    wanted, origin = _wanted(prefer)
    if wanted == "auto":
        return _automatic(device)
    if wanted == "triton":
        _check_triton(device, origin)
    if wanted == "cpu" and device.type != "cpu":
        raise ValueError(f"{origin} asks for the path 'cpu', but the tensors are on {device}; use 'auto' or 'torch'")
    return cast(Path, wanted)


def _wanted(prefer: str | None) -> tuple[str, str]:
    """The path that was asked for, and who asked, for the error's text."""
    if prefer is not None:
        wanted, origin, allowed = prefer, "the argument", get_args(Path)
    else:
        wanted, origin = os.environ.get(ENVIRONMENT_VARIABLE, "").lower() or "auto", ENVIRONMENT_VARIABLE
        allowed = ("auto", *get_args(Path))
    if wanted not in allowed:
        raise ValueError(f"unknown kernel path {wanted!r} from {origin}; allowed: {', '.join(map(repr, allowed))}")
    return wanted, origin


def _automatic(device: torch.device) -> Path:
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":  # torch calls AMD's GPUs "cuda" as well
        if has_triton():
            return "triton"
        _warn_missing_triton()
    return "torch"


@functools.cache
def _warn_missing_triton() -> None:
    warnings.warn(f"Triton is not installed; GPU tensors take the slower torch path. {_INSTALL}", stacklevel=4)


def _check_triton(device: torch.device, origin: str) -> None:
    if not has_triton():
        raise ImportError(f"{origin} asks for the path 'triton', but Triton is not installed: {_INSTALL}")
    if device.type == "cpu" and not interpreting():
        raise ValueError(
            f"{origin} asks for the path 'triton', but the tensors are on the CPU; move them to a GPU, "
            "or set TRITON_INTERPRET=1 before Python starts to run kernels in Triton's interpreter"
        )
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"{origin} asks for the path 'triton', but the tensors are on {device}; it needs a GPU")


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which a kernel is launched on this tensor's device: ``with launching_on(x): kernel[grid](x, ...)``.

    Triton launches on the *current* GPU, which is not the tensor's where a model is spread over several.
    """
    if tensor.device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.device(tensor.device)


def triton_language() -> Any:
    """``triton.language`` where Triton is installed, else ``None``: ``tl = triton_language()`` atop a kernel's file."""
    if not has_triton():
        return None
    return importlib.import_module("triton.language")


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` where Triton is installed; elsewhere an object that raises one clear ImportError when launched.

    So a file with a kernel imports on a machine without Triton, and its other paths work there.
    """
    if not has_triton():
        return MissingKernel(function.__name__)
    return importlib.import_module("triton").jit(function)


@dataclass(frozen=True)
class MissingKernel:
    """Stands for a kernel where Triton is not installed."""

    name: str

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        raise ImportError(f"kernel {self.name!r} needs Triton: {_INSTALL}")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel in one configuration, for compiling it ahead of time (`icml26_shared.aot`).

    Args:
        name: shown in the report, such as ``"key_stats bf16 D=128"``.
        fn: the kernel, a function of some module decorated with `jit`.
        signature: Triton type of every argument that is not a constexpr, in order: ``{"x_ptr": "*bf16", "n": "i32"}``.
        constexprs: value of every constexpr argument: int, float, bool, str or None.
        num_warps: warps (AMD: wavefronts) of one program.
        num_stages: depth of the software pipeline.
        divisible_by_16: arguments that are divisible by 16 where the kernel is launched in earnest (pointers from
            torch's allocator, strides of wide rows), which lets loads be vectorised. Triton finds this out itself
            when it launches; ahead of time it must be told.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, int | float | bool | str | None] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    divisible_by_16: tuple[str, ...] = ()
