"""Reading all spectra of a model: at once or in a thread, on one rank or shared among several."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from layerwise_lr.layers import Matrix
from layerwise_lr.measurement import LayerReport, Measure

Reports = dict[str, LayerReport]


def ranks(process_group: Any = None) -> tuple[int, int]:
    """This rank and their number."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(process_group), distributed.get_world_size(process_group)


class Reader:
    """Measures matrices: rank r of R measures each R-th one, and all ranks end with the same reports.

    Args:
        measure: how.
        background: measure in a thread, on copies of the weights.
        process_group: ranks that train together; default all.
    """

    def __init__(self, measure: Measure, background: bool = False, process_group: Any = None) -> None:
        self.measure, self.background, self.process_group = measure, background, process_group
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[Reports] | None = None

    @torch.no_grad()
    def read(self, layers: Sequence[Matrix]) -> Reports:
        """Measure now."""
        return self._exchange(self._measured(self._weights(layers, copy=False)))

    @torch.no_grad()
    def start(self, layers: Sequence[Matrix]) -> None:
        """Copy the weights and measure them in the thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="layerwise-lr")
        weights = list(self._weights(layers, copy=True))
        self._future = self._pool.submit(self._in_thread, weights)

    @property
    def pending(self) -> bool:
        """Whether a measurement was started and not collected."""
        return self._future is not None

    @property
    def ready(self) -> bool:
        """Whether `collect` would return without waiting."""
        return self._future is not None and self._future.done()

    def collect(self) -> Reports:
        """Wait for what was started; its errors are raised here."""
        future, self._future = self._future, None
        if future is None:
            raise RuntimeError("no measurement was started")
        return self._exchange(future.result())

    def close(self) -> None:
        """Wait for the thread and end it; what it measured can still be collected."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool = None

    def _weights(self, layers: Sequence[Matrix], copy: bool) -> Any:
        """(name, weight) of what this rank measures; gathering a sharded weight takes all ranks, each in turn."""
        rank, count = ranks(self.process_group)
        for index, layer in enumerate(layers):
            weight = layer.read()
            if index % count == rank:
                yield layer.name, weight.clone() if copy else weight

    def _measured(self, weights: Any) -> Reports:
        return {name: self.measure(name, weight) for name, weight in weights}

    @torch.no_grad()
    def _in_thread(self, weights: list[tuple[str, Tensor]]) -> Reports:
        device = weights[0][1].device if weights else torch.device("cpu")
        if device.type != "cuda":
            return self._measured(weights)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            return self._measured(weights)

    def _exchange(self, mine: Reports) -> Reports:
        """All ranks' reports."""
        _, count = ranks(self.process_group)
        if count == 1:
            return mine
        parts: list[Any] = [None] * count
        torch.distributed.all_gather_object(parts, mine, group=self.process_group)
        return {name: report for part in parts for name, report in part.items()}
