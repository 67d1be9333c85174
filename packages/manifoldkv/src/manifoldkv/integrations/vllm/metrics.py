"""Counters of the plug-in, and log lines that come once.

In a worker: ``llm.collective_rpc(manifoldkv.integrations.vllm.metrics.read)`` where workers run in this process, or
``LLM(..., worker_extension_cls="manifoldkv.integrations.vllm.metrics.WorkerExtension")`` and
``llm.collective_rpc("manifoldkv_counters")`` anywhere.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from typing import Any

_seen: set[str] = set()
_lock = threading.Lock()


@dataclass
class RequestUsage:
    """Blocks of one request, as the scheduler counts them."""

    freed: int = 0
    peak: int = 0
    tokens: int = 0


@dataclass
class SchedulerCounters:
    """Of the scheduler process, over all requests since the start."""

    requests: int = 0
    blocks_freed: int = 0
    peak_blocks: int = 0

    def add(self, usage: RequestUsage | None) -> None:
        if usage is not None:
            self.requests += 1
            self.blocks_freed += usage.freed
            self.peak_blocks = max(self.peak_blocks, usage.peak)


@dataclass
class WorkerCounters:
    """Of a worker process, summed over requests; one count per KV cache group, not per layer.

    Attributes:
        evictions: events carried out (several at once count as one).
        tokens_evicted: tokens dropped per key-value head.
        blocks_freed: blocks that the scheduler takes back because of them.
        peak_blocks: most blocks of one request that a step read or wrote.
        failures: selections that failed, per layer and batch of rows; their middle region kept its older tokens.
    """

    evictions: int = 0
    tokens_evicted: int = 0
    blocks_freed: int = 0
    peak_blocks: int = 0
    failures: int = 0


worker = WorkerCounters()
scheduler = SchedulerCounters()


def read(_worker: Any = None) -> dict[str, int]:
    """The counters of the process it runs in; pass it to ``llm.collective_rpc``."""
    return asdict(worker)


class WorkerExtension:
    """For vLLM's ``worker_extension_cls``: adds ``manifoldkv_counters`` to every worker."""

    def manifoldkv_counters(self) -> dict[str, int]:
        return read(self)


def log_once(logger: logging.Logger, message: str) -> None:
    """Log an error with the current exception, the first time this process meets the message."""
    with _lock:
        if message in _seen:
            return
        _seen.add(message)
    logger.exception("manifoldkv: %s (logged once)", message)
