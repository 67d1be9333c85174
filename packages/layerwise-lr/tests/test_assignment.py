"""Maps from exponents to ratios."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise_lr.assignment import ASSIGNS, assign_ratios, shrink

ALPHAS = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 2.5}


def test_golden():
    ratios = assign_ratios(ALPHAS, 1, 5)
    assert [1e-3 * ratio for ratio in ratios.values()] == pytest.approx([1e-3, 3e-3, 5e-3, 2e-3], rel=1e-12)


def test_by_hand():
    assert assign_ratios(ALPHAS, 1, 5, inverse=True) == pytest.approx({"a": 5, "b": 3, "c": 1, "d": 4})
    roots = {name: math.sqrt(a) for name, a in ALPHAS.items()}
    assert assign_ratios(ALPHAS, method="sqrt") == pytest.approx(
        {n: 4 * r / sum(roots.values()) for n, r in roots.items()}
    )
    logs = {name: math.log2(a) for name, a in ALPHAS.items()}
    assert assign_ratios(ALPHAS, method="log2") == pytest.approx(
        {n: 4 * r / sum(logs.values()) for n, r in logs.items()}
    )
    two = assign_ratios({"a": 2.0, "b": 4.0}, method="sigmoid")  # z = -1, 1
    assert two == pytest.approx({"a": 2 / (1 + math.exp(4)), "b": 2 / (1 + math.exp(-4))})


def test_equal_values():
    same = dict.fromkeys("abc", 3.0)
    assert set(assign_ratios(same, 1.5, 4).values()) == {1.5}
    assert set(assign_ratios(same, 1.5, 4, inverse=True).values()) == {1.5}
    for method in ("sqrt", "log2", "sigmoid"):
        assert set(assign_ratios(same, method=method).values()) == {1.0}
    assert assign_ratios({}) == {}


def test_within_blocks():
    values = {"0.a": 2.0, "0.b": 3.0, "1.a": 7.0, "1.b": 9.0}
    ratios = assign_ratios(values, 1, 3, block_of=lambda name: name[0])
    assert ratios == {"0.a": 1, "0.b": 3, "1.a": 1, "1.b": 3}


@given(
    st.dictionaries(st.text(min_size=1), st.floats(1.01, 50), min_size=2, max_size=9),
    st.floats(0.1, 5),
    st.floats(0, 5),
)
def test_linear_stays_within_its_bounds_and_attains_them(values, s1, more):
    ratios = assign_ratios(values, s1, s1 + more)
    assert all(s1 <= ratio <= s1 + more for ratio in ratios.values())
    assert min(ratios.values()) == s1
    if len(set(values.values())) > 1:
        assert max(ratios.values()) == s1 + more
    ordered = sorted(values, key=values.__getitem__)
    assert all(ratios[a] <= ratios[b] for a, b in itertools.pairwise(ordered))


@given(st.dictionaries(st.text(min_size=1), st.floats(1.01, 50), min_size=1, max_size=9), st.sampled_from(ASSIGNS))
def test_equal_bounds_and_positive_ratios(values, method):
    assert all(ratio > 0 for ratio in assign_ratios(values, method=method).values())
    assert set(assign_ratios(values, 1, 1).values()) == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ALPHAS, 3, 1), "0 < s1 <= s2, got s1 = 3, s2 = 1"),
        ((ALPHAS, 0, 1), "0 < s1 <= s2"),
        ((ALPHAS, -1, 1), "0 < s1 <= s2"),
        ((ALPHAS, 1, math.inf), "0 < s1 <= s2"),
        ((ALPHAS, 1, 3, "cubic"), "unknown assignment 'cubic'"),
        (({"a": math.nan},), "must be finite, got {'a': nan}"),
        (({"a": 1.0, "b": 1.0}, 1, 3, "log2"), "'log2' needs values above 1"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        assign_ratios(*arguments)


def test_shrinking():
    sigma = {"a": 0.0, "b": 0.1, "c": 10.0, "d": 0.0}
    assert set(shrink(ALPHAS, sigma).values()) == {2.875}  # errors explain all of the spread
    mild = shrink(ALPHAS, {"a": 0.0, "b": 0.0, "c": 0.5, "d": 0.0})
    assert (mild["a"], mild["b"]) == (2.0, 3.0)
    variance, noise = 0.546875, 0.25
    kept = (variance - noise / 4) / (variance - noise / 4 + noise)
    assert mild["c"] == pytest.approx(2.875 + kept * 1.125)
