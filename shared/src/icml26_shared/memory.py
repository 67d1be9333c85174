"""Peak memory of a call; public names are also in :mod:`icml26_shared.bench`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["PeakMemory", "peak_memory"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_SAMPLE_S = 0.001


@dataclass(frozen=True)
class PeakMemory:
    """Memory of a call at its highest point, above what was in use when it began, in bytes.

    Attributes:
        rss_bytes: resident memory of the process.
        torch_bytes: memory of torch tensors on the CPU; None when torch is not loaded.
        device_bytes: memory of torch tensors on the GPU; None when none is in use.
        method: how ``rss_bytes`` was measured: ``"kernel"`` (the kernel's own high-water mark) or ``"sampled"``.
    """

    rss_bytes: int
    torch_bytes: int | None
    device_bytes: int | None
    method: str

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> PeakMemory:
        """What :meth:`to_json` wrote."""
        return cls(**kept)


def peak_memory(fn: Callable[[], Any], *, warmup: int = 1) -> PeakMemory:
    """Measure how much memory ``fn()`` needs beyond what is in use already, its result included.

    ``fn`` is called ``warmup`` times first (imports, thread pools, compiled code), then once for each figure:

    * **Resident memory.** Garbage is collected, free heap is handed back to the system (``malloc_trim``), and the
      kernel's high-water mark of the process is reset (Linux: ``5`` into ``/proc/self/clear_refs``). The figure is the
      mark after the call minus the resident memory before it. The kernel keeps the mark whenever memory is unmapped,
      so a peak of a microsecond counts too. It counts pages that were *touched*, all libraries' memory, and is
      exact to about a MiB (the kernel batches its counters; free memory inside the heap may be reused). Where there is
      no such mark, the resident memory is sampled every millisecond, which misses shorter peaks; ``method`` says so.
    * **Torch on the CPU.** Every allocation and release of torch's CPU allocator during the call, from
      torch's own profiler: the highest running sum, exact to the byte, untouched pages included. Memory of other
      libraries (numpy, oneDNN's own scratch) is not in it.
    * **Torch on the GPU**, when one is in use: ``torch.cuda.max_memory_allocated``.

    Raises:
        ValueError: ``warmup`` below 0.
    """
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    for _ in range(warmup):
        fn()
    rss, method = _resident(fn)
    torch = sys.modules.get("torch")
    if torch is None:
        return PeakMemory(rss, None, None, method)
    device = _device(torch, fn) if torch.cuda.is_initialized() else None
    return PeakMemory(rss, _torch_cpu(torch, fn), device, method)


def _resident(fn: Callable[[], Any]) -> tuple[int, str]:
    gc.collect()
    _trim_heap()
    if _reset_mark():
        before = _status("VmRSS")
        fn()
        return max(0, _status("VmHWM") - before), "kernel"
    return _sampled(fn), "sampled"


def _reset_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return _STATUS.is_file()


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no line {name}")


def _trim_heap() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # glibc has it, musl has not
            trim(0)


def _sampled(fn: Callable[[], Any]) -> int:
    import psutil

    process = psutil.Process()
    before = highest = process.memory_info().rss
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(_SAMPLE_S):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = fn()  # kept until the last sample: the result counts
        highest = max(highest, process.memory_info().rss)
        del result
    finally:
        over.set()
        thread.join()
    return max(0, highest - before)


def _torch_cpu(torch: Any, fn: Callable[[], Any]) -> int:
    # torch.profiler, its wrapper, imports the whole compiler first: seconds
    with _silent_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    current = highest = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        current += change
        highest = max(highest, current)
    return highest


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """Torch's profiler prints remarks of its own on stderr; this is how to ask it not to."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _device(torch: Any, fn: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
