"""Share the rows of a CPU kernel among as many threads as torch uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


@functools.lru_cache(maxsize=8)
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="robuq")


def over_rows(run: Callable[[int, int], Any], rows: int, multiple: int, smallest: int) -> None:
    """``run(start, stop)`` over all rows, in one piece or one a thread.

    Args:
        run: works on rows ``start`` to ``stop`` and does not hold the interpreter's lock.
        rows: number of rows; with 0 nothing is called.
        multiple: pieces begin at multiples of this.
        smallest: fewest rows worth a thread.
    """
    threads = min(torch.get_num_threads(), max(1, rows // smallest))
    if rows == 0:
        return
    if threads == 1:
        run(0, rows)
        return
    size = -(-rows // threads)
    size = -(-size // multiple) * multiple
    waiting = [_pool(threads).submit(run, start, min(start + size, rows)) for start in range(size, rows, size)]
    run(0, min(size, rows))
    for piece in waiting:
        piece.result()
