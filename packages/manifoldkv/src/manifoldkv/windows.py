"""Windows of consecutive keys, each with a centroid of its own (WindowedManifoldKV, arXiv 2602.08343).

One centroid over a very long context is the mean of many topics and far from every key; a centroid per window stays
local.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor


def tumbling_bounds(length: int, window: int | None) -> list[int]:
    """Window starts followed by ``length``: ``[0, window, 2 window, ..., length]``.

    A last window shorter than ``window / 2`` joins the one before. ``window=None`` or ``length <= window`` is one
    window.
    """
    if window is None or length <= window:
        return [0, length]
    starts = list(range(0, length, window))
    if 2 * (length - starts[-1]) < window:
        starts.pop()
    return [*starts, length]


def sliding_centroids(
    keys: Float[Tensor, "batch heads tokens dim"], window: int, unit: bool = False, chunk: int = 1024
) -> Iterator[tuple[int, int, Float[Tensor, "batch heads chunk dim"]]]:
    """Mean of the trailing ``window`` keys at each token, chunk by chunk: yields ``(start, stop, centroids)``.

    ``c_i = (1/window) sum_{j=i-window+1..i} k_j``. The first ``window`` tokens share the first full window's mean;
    fewer tokens than ``window`` share the mean of all. Running sums are float64, so that the difference of two long
    prefix sums keeps the precision of a direct sum; memory is one chunk.

    Args:
        keys: finite keys ``[B, H, T, D]``, any float dtype.
        unit: average ``k / ||k||`` instead of ``k``.
    """
    length = keys.shape[2]
    width = min(window, length)
    total = torch.zeros_like(keys[:, :, :0].sum(2, keepdim=True), dtype=torch.float64)
    for start in range(0, width, chunk):
        total += _float64(keys[:, :, start : min(start + chunk, width)], unit).sum(2, keepdim=True)
    yield 0, width, (total / width).float()
    for start in range(width, length, chunk):
        stop = min(start + chunk, length)
        gained = _float64(keys[:, :, start:stop], unit) - _float64(keys[:, :, start - width : stop - width], unit)
        sums = total + gained.cumsum(2)
        total = sums[:, :, -1:]
        yield start, stop, (sums / width).float()


def _float64(keys: Tensor, unit: bool) -> Tensor:
    keys = keys.double()
    return torch.nn.functional.normalize(keys, dim=-1) if unit else keys
