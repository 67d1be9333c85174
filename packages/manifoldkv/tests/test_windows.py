"""Windows: where they begin and end, and running means that keep their precision."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.windows import sliding_centroids, tumbling_bounds


@pytest.mark.parametrize(
    ("length", "window", "bounds"),
    [
        (10, None, [0, 10]),
        (0, None, [0, 0]),
        (0, 4, [0, 0]),
        (3, 4, [0, 3]),
        (4, 4, [0, 4]),
        (5, 4, [0, 5]),  # one key is fewer than half a window
        (6, 4, [0, 4, 6]),  # two are half of it
        (8, 4, [0, 4, 8]),
        (9, 4, [0, 4, 9]),
        (11, 4, [0, 4, 8, 11]),
        (7, 5, [0, 7]),  # two are fewer than 2.5
        (8, 5, [0, 5, 8]),
        (10, 5, [0, 5, 10]),
        (3, 2, [0, 2, 3]),
        (4096 * 2 + 2047, 4096, [0, 4096, 4096 * 2 + 2047]),
        (4096 * 2 + 2048, 4096, [0, 4096, 8192, 4096 * 2 + 2048]),
    ],
)
def test_bounds_worked_by_hand(length, window, bounds):
    assert tumbling_bounds(length, window) == bounds


@given(st.integers(1, 500), st.integers(2, 60))
def test_bounds_cover_everything_in_windows_of_the_right_size(length, window):
    bounds = tumbling_bounds(length, window)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, length)
    assert all(size == window for size in sizes[:-1])
    if len(sizes) > 1:
        assert window <= 2 * sizes[-1]
        assert 2 * sizes[-1] < 3 * window
    else:
        assert 2 * length < 3 * window


def joined(keys, window, **kwargs):
    pieces, stops = [], [0]
    for start, stop, centroids in sliding_centroids(keys, window, **kwargs):
        assert start == stops[-1]
        assert centroids.dtype == torch.float32
        pieces.append(centroids.expand(-1, -1, stop - start, -1))
        stops.append(stop)
    assert stops[-1] == keys.shape[2]
    return torch.cat(pieces, dim=2)


@pytest.mark.parametrize("unit", [False, True])
@given(length=st.integers(1, 40), window=st.integers(2, 20), chunk=st.integers(1, 9))
def test_trailing_means(unit, length, window, chunk):
    keys = torch.randn(2, 2, length, 3, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    means = joined(keys, window, unit=unit, chunk=chunk)
    counted = keys / keys.norm(dim=-1, keepdim=True) if unit else keys
    for i in range(length):
        stop = min(max(i + 1, window), length)
        expected = counted[:, :, max(stop - window, 0) : stop].mean(2)
        torch.testing.assert_close(means[:, :, i].double(), expected, atol=1e-6, rtol=1e-6)


def test_worked_by_hand():
    line = torch.tensor([1.0, 2.0, 6.0, 4.0, 2.0])[None, None, :, None]
    assert joined(line, 3)[0, 0, :, 0].tolist() == [3.0, 3.0, 3.0, 4.0, 4.0]
    assert joined(line, 9)[0, 0, :, 0].tolist() == [3.0] * 5


def test_long_streams_keep_their_precision():
    """Differences of float32 prefix sums would be off by more than the values themselves after a million tokens."""
    length, window = 200_000, 64
    keys = 1000 + torch.randn(1, 1, length, 1, generator=torch.Generator().manual_seed(0))
    means = joined(keys, window)[0, 0, :, 0]
    last = keys[0, 0, -window:, 0].double().mean()
    assert abs(float(means[-1]) - float(last)) < 1e-4
    drifted = keys[0, 0, :, 0].cumsum(0)
    assert abs(float((drifted[-1] - drifted[-1 - window]) / window) - float(last)) > 1e-3  # what float32 gives
