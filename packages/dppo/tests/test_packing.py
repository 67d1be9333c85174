"""Packing: golden rows, no loss, order promises, density, masks, bad input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo.packing import (
    pack_best_fit_decreasing,
    pack_first_fit_decreasing,
    pack_next_fit,
    pack_window,
    pad_batches,
)

GOLDEN = [6, 5, 4, 3, 3, 2, 7, 1, 4, 5]


def rows(packing):
    return [row.tolist() for row in packing.rows]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (1, [[0], [1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (2, [[0, 2], [1, 3, 5], [4, 6], [7, 9, 8]]),
        (3, [[0, 2], [1, 3, 5], [4, 6], [7, 9, 8]]),
        (4, [[0, 2], [1, 3, 5], [4, 6], [7, 9, 8]]),
        (10, [[0, 2], [1, 9], [3, 6], [4, 8, 5, 7]]),
    ],
)
def test_golden_4(window, expected):
    packing = pack_window(GOLDEN, 10, window)
    assert rows(packing) == expected
    assert packing.density == pytest.approx(40 / (10 * len(expected)))
    if window == 1:
        assert rows(pack_next_fit(GOLDEN, 10)) == expected


def law(name: str, n: int, capacity: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "uniform":
        return rng.integers(64, 3001, n)
    mean, sigma = {"lognormal 400": (400, 0.6), "lognormal 800": (800, 0.7)}[name]
    return np.clip(np.round(rng.lognormal(np.log(mean), sigma, n)), 16, capacity).astype(int)


@pytest.mark.parametrize("name", ["lognormal 400", "lognormal 800", "uniform"])
def test_density_on_the_three_length_laws(name):
    lengths = law(name, 2000, 4096)
    assert pack_window(lengths, 4096, 64).density >= 0.97
    assert pack_first_fit_decreasing(lengths, 4096).density >= pack_window(lengths, 4096, 64).density
    assert pad_batches(lengths, 8).density < 0.65
    densities = [pack_window(lengths, 4096, w).density for w in (1, 8, 64)]
    assert densities == sorted(densities)


def assert_complete(packing, lengths, capacity):
    flat = sorted(i for row in rows(packing) for i in row)
    assert flat == list(range(len(lengths))), "every item exactly once"
    for row in packing.rows:
        assert packing.lengths[row].sum() <= capacity


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    capacity=st.integers(40, 90),
    window=st.sampled_from([1, 2, 3, 8, 1000]),
)
def test_nothing_lost_nothing_over_capacity_and_order_promises(lengths, capacity, window):
    packing = pack_window(lengths, capacity, window)
    assert_complete(packing, lengths, capacity)
    placed = {item: row for row, items in enumerate(rows(packing)) for item in items}
    for item, row in placed.items():
        assert row <= item, "an item at queue position k is placed in row k at the latest"
    remaining = list(range(len(lengths)))
    for items in rows(packing):
        assert items[0] == remaining[0], "each row opens with the head of the queue"
        room = capacity
        for item in items:
            look = remaining[:1] if item == items[0] else remaining[:window]
            fitting = [i for i in look if lengths[i] <= room]
            assert item == max(fitting, key=lambda i: (lengths[i], -i))
            remaining.remove(item)
            room -= lengths[item]
        assert all(lengths[i] > room for i in remaining[:window]), "closed only when nothing in the window fits"
    for packer in (pack_first_fit_decreasing, pack_best_fit_decreasing):
        assert_complete(packer(lengths, capacity), lengths, capacity)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=200), window=st.sampled_from([2, 8, 64]))
def test_never_far_behind_next_fit(lengths, window):
    """Neighbouring rows of either packer hold more than C together, so both use at most 2·tokens/C + 1 rows."""
    ours, next_fit = pack_window(lengths, 100, window), pack_next_fit(lengths, 100)
    assert len(ours.rows) <= 2 * sum(lengths) / 100 + 1
    assert len(ours.rows) <= len(next_fit.rows) + 1


def test_first_fit_decreasing_by_the_textbook():
    lengths = np.random.default_rng(1).integers(1, 50, 300)
    free: list[int] = []
    expected: list[list[int]] = []
    for item in np.argsort(-lengths, kind="stable"):
        row = next((r for r, room in enumerate(free) if room >= lengths[item]), len(free))
        if row == len(free):
            free.append(64)
            expected.append([])
        free[row] -= lengths[item]
        expected[row].append(int(item))
    assert rows(pack_first_fit_decreasing(lengths, 64)) == expected


def test_a_hundred_thousand_items():
    lengths = law("lognormal 400", 100_000, 4096)
    packing = pack_window(lengths, 4096, 64)
    assert sorted(np.concatenate(packing.rows).tolist()) == list(range(100_000))
    assert packing.density > 0.97
    assert max(int(lengths[row].sum()) for row in packing.rows) <= 4096
    assert int(packing.position_ids(flat=True).sum()) == int((lengths * (lengths - 1) // 2).sum())
    assert int(packing.cu_seqlens()[-1]) == int(lengths.sum())


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), window=st.sampled_from([1, 4, 64]), data=st.data())
def test_unpack_inverts_pack(lengths, window, data):
    with_prefix = data.draw(st.booleans())
    options = {}
    if with_prefix:
        groups = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
        sizes = data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4))
        options = {"prefix_ids": groups, "prefix_lengths": [sizes[g] for g in groups]}
    packing = pack_window(lengths, 16, window, **options)
    items = [torch.randn(n, 3) for n in lengths]
    prefixes = {g: torch.randn(5, 3) for g in range(4)}
    for flat in (False, True):
        back = packing.unpack(packing.pack(items, prefixes, flat=flat), flat=flat)
        assert all(torch.equal(a, b) for a, b in zip(items, back, strict=True))
    assert int(packing.cu_seqlens()[-1]) == packing.tokens
    for row in packing.rows:
        room = sum(lengths[i] for i in row)
        if with_prefix:
            room += sum(dict(zip(options["prefix_ids"], options["prefix_lengths"], strict=True))[g]
                        for g in {groups[i] for i in row})  # fmt: skip
        assert room <= 16


def test_positions_segments_and_mask_by_hand():
    packing = pack_window([2, 1], 7, prefix_ids=["p", "p"], prefix_lengths=[2, 2])
    assert packing.position_ids().tolist() == [[0, 1, 2, 3, 2, 0, 0]]
    assert packing.segment_ids().tolist() == [[0, 0, 1, 1, 2, -1, -1]]
    assert packing.cu_seqlens().tolist() == [0, 2, 4, 5]
    assert packing.block_mask()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    plain = pack_window([2, 1], 4)
    assert plain.position_ids().tolist() == [[0, 1, 0, 0]]
    assert plain.block_mask()[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_prefix_is_stored_once_a_row_and_saves_tokens():
    packing = pack_window([128] * 8, 2048, prefix_ids=[0] * 8, prefix_lengths=[256] * 8)
    assert len(packing.rows) == 1
    assert packing.tokens == 256 + 8 * 128
    saved = 1 - packing.tokens / (8 * (256 + 128))
    assert saved >= 0.55
    split = pack_window([128] * 8, 768, prefix_ids=[0] * 8, prefix_lengths=[256] * 8)
    assert len(split.rows) == 2
    assert split.tokens == 2 * 256 + 8 * 128


def test_overflow():
    with pytest.raises(ValueError, match=r"item 1 has 12 tokens, a row 10 \(2 such items\)"):
        pack_window([3, 12, 2, 11], 10)
    own = pack_window([3, 12, 2, 11], 10, overflow="own_row")
    assert rows(own) == [[0, 2], [1], [3]]
    assert own.widths.tolist() == [10, 12, 11]
    assert own.density == pytest.approx(28 / 33)
    cut = pack_window([3, 12, 2, 11], 10, overflow="truncate")
    assert cut.truncated.tolist() == [1, 3]
    assert cut.lengths.tolist() == [3, 10, 2, 10]
    for packer in (pack_first_fit_decreasing, pack_best_fit_decreasing):
        packing = packer([3, 12, 2, 11], 10, overflow="own_row")
        assert sorted(len(r) for r in packing.rows) == [1, 1, 2]
        assert packing.density == pytest.approx(28 / 33)


def test_degenerate_input():
    empty = pack_window([], 10)
    assert empty.rows == []
    assert empty.density == 1.0
    assert empty.position_ids().shape == (0, 0)
    zero = pack_window([0, 5, 0], 5)
    assert rows(zero) == [[0, 1, 2]]
    assert pad_batches([], 4).density == 1.0
    for bad, message in (
        ({"lengths": [1, -1], "capacity": 4}, "item 1 is -1"),
        ({"lengths": [1], "capacity": 0}, "capacity=0"),
        ({"lengths": [1], "capacity": 4, "window": 0}, "window=0"),
        ({"lengths": [1], "capacity": 4, "overflow": "drop"}, "overflow='drop'"),
        ({"lengths": [1], "capacity": 4, "prefix_ids": ["a"]}, "given together"),
        ({"lengths": [1, 1], "capacity": 9, "prefix_ids": ["a", "a"], "prefix_lengths": [1, 2]}, "one prefix"),
        ({"lengths": [1], "capacity": 9, "prefix_ids": ["a"], "prefix_lengths": [1, 2]}, "one each"),
        ({"lengths": [1], "capacity": 4, "prefix_ids": ["a"], "prefix_lengths": [5], "overflow": "truncate"}, "alone"),
        ({"lengths": [[1]], "capacity": 4}, "one dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_window(**bad)
    with pytest.raises(TypeError, match="whole numbers"):
        pack_window([1.5], 4)
    with pytest.raises(ValueError, match="batch_size=0"):
        pad_batches([1], 0)
