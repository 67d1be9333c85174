"""KVConfig: what it accepts, what it refuses, and how many tokens it keeps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import KVConfig


def test_defaults_are_those_of_the_documentation():
    cfg = KVConfig()
    assert dataclasses.asdict(cfg) == {
        "metric": "auto",
        "compression_ratio": None,
        "budget": None,
        "window": None,
        "allocation": "global",
        "n_sink": 4,
        "n_recent": 32,
        "space": "post",
        "head_budget": "uniform",
        "phase": "prefill",
        "interval": 128,
        "seed": 0,
        "kind": "tumbling",
        "centroid": "all",
        "lambda_rad": 1.0,
        "lambda_ang": 1.0,
        "rho0": "centroid",
        "rho_x": "self",
        "per_layer": False,
    }


def test_is_frozen_and_hashable():
    cfg = KVConfig(budget=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.budget = 9
    assert len({cfg, KVConfig(budget=8), KVConfig(budget=9)}) == 2


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, -1, math.nan, math.inf])
def test_ratio_outside_the_half_open_unit_interval(ratio):
    with pytest.raises(ValueError, match=r"^compression_ratio=\S+ must be in \[0, 1\)"):
        KVConfig(compression_ratio=ratio)


@pytest.mark.parametrize("ratio", [0, 0.0, 0.5, 0.999, np.float64(0.25)])
def test_ratio_inside(ratio):
    assert KVConfig(compression_ratio=ratio).compression_ratio == ratio


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_below_one(budget):
    with pytest.raises(ValueError, match=rf"^budget={budget} must be an integer >= 1"):
        KVConfig(budget=budget)


def test_ratio_and_budget_together():
    with pytest.raises(ValueError, match=r"^compression_ratio=0.5 and budget=64 were both given; give one of them"):
        KVConfig(compression_ratio=0.5, budget=64)


@pytest.mark.parametrize("window", [1, 0, -4])
def test_window_below_two(window):
    with pytest.raises(ValueError, match=rf"^window={window} must be an integer >= 2"):
        KVConfig(window=window)


@pytest.mark.parametrize(("field", "least"), [("n_sink", 0), ("n_recent", 0), ("seed", 0), ("interval", 1)])
def test_counts_below_their_least(field, least):
    with pytest.raises(ValueError, match=rf"^{field}={least - 1} must be an integer >= {least}"):
        KVConfig(**{field: least - 1})
    assert getattr(KVConfig(**{field: least}), field) == least


@pytest.mark.parametrize("field", ["budget", "window", "n_sink", "n_recent", "seed", "interval"])
@pytest.mark.parametrize("value", [4.0, "4", True, [4]])
def test_counts_of_another_type(field, value):
    with pytest.raises(TypeError, match=rf"^{field}=.* must be an integer"):
        KVConfig(**{field: value})


@pytest.mark.parametrize("value", ["0.5", True, [0.5]])
def test_ratio_of_another_type(value):
    with pytest.raises(TypeError, match=r"^compression_ratio=.* must be a number in \[0, 1\)"):
        KVConfig(compression_ratio=value)


@pytest.mark.parametrize(
    "field", ["metric", "phase", "allocation", "kind", "centroid", "space", "head_budget", "rho0", "rho_x"]
)
@pytest.mark.parametrize("value", ["nonsense", None, 1, ["l2"]])
def test_choices_name_the_allowed_ones(field, value):
    with pytest.raises(ValueError, match=rf"^{field}=.* is not one of \w+, "):
        KVConfig(**{field: value})


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
@pytest.mark.parametrize("field", ["lambda_rad", "lambda_ang"])
def test_weights_of_the_decomposed_metric(field, value):
    with pytest.raises(ValueError, match=rf"^{field}="):
        KVConfig(**{field: value})


def test_per_layer_is_a_switch():
    with pytest.raises(TypeError, match=r"^per_layer='yes' must be True or False"):
        KVConfig(per_layer="yes")


@pytest.mark.parametrize("metric", ["knorm", "random", "streaming"])
def test_windows_need_a_metric_with_a_centroid(metric):
    with pytest.raises(ValueError, match=rf"^window=8 has no meaning for metric='{metric}'"):
        KVConfig(metric=metric, window=8)


@pytest.mark.parametrize("settings", [{}, {"window": 8, "kind": "sliding"}])
def test_per_window_allocation_needs_tumbling_windows(settings):
    with pytest.raises(ValueError, match=r"^allocation='per_window' needs tumbling windows"):
        KVConfig(metric="l2", allocation="per_window", **settings)


def test_sliding_windows_need_a_window_and_a_plain_centroid():
    with pytest.raises(ValueError, match=r"^kind='sliding' needs window=N"):
        KVConfig(metric="l2", kind="sliding")
    with pytest.raises(ValueError, match=r"^kind='sliding' averages every key of its window"):
        KVConfig(metric="l2", kind="sliding", window=8, centroid="evictable")
    with pytest.raises(ValueError, match=r"^metric='decomposed' needs tumbling windows"):
        KVConfig(metric="decomposed", kind="sliding", window=8)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999])
def test_keep_count_of_a_ratio(ratio):
    cfg = KVConfig(compression_ratio=ratio)
    assert [cfg.keep_count(t) for t in range(1, 201)] == [max(int(t * (1 - ratio)), 1) for t in range(1, 201)]


def test_keep_counts_worked_by_hand():
    assert [KVConfig(compression_ratio=0.4).keep_count(t) for t in (1, 2, 3, 5, 10)] == [1, 1, 1, 3, 6]
    assert [KVConfig(budget=7).keep_count(t) for t in (0, 1, 6, 7, 8, 1000)] == [0, 1, 6, 7, 7, 7]
    assert [KVConfig().keep_count(t) for t in (0, 1, 999)] == [0, 1, 999]
    assert KVConfig(compression_ratio=0.99).keep_count(0) == 0


def test_keep_count_of_a_negative_length():
    with pytest.raises(ValueError, match=r"^length=-1 is negative"):
        KVConfig(budget=4).keep_count(-1)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 120))
def test_protection_fits_the_budget_recent_first_then_earliest_sinks(n_sink, n_recent, keep):
    sinks, recent = KVConfig(n_sink=n_sink, n_recent=n_recent).protected(keep)
    assert sinks + recent <= keep
    assert recent == min(n_recent, keep)
    assert sinks == min(n_sink, keep - recent)


def test_protection_worked_by_hand():
    cfg = KVConfig(n_sink=4, n_recent=32)
    assert [cfg.protected(n) for n in (100, 36, 35, 32, 10, 0)] == [(4, 32), (4, 32), (3, 32), (0, 32), (0, 10), (0, 0)]


def test_two_ways_to_divide_the_budget():
    with pytest.raises(ValueError, match=r"^allocation='per_window' and head_budget='adaptive' both divide the budget"):
        KVConfig(metric="l2", window=8, allocation="per_window", head_budget="adaptive")
