"""pass@k, coverage curves and test-time efficiency."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from maxrl import PassAtKCurve, pass_at_k
from maxrl.coverage import majority_at_k


def test_golden():
    assert pass_at_k(16, 1, 4) == 1 / 4
    assert pass_at_k(16, 3, 8) == 9 / 10
    assert pass_at_k(10, 8, 5) == 1
    assert pass_at_k(10, 0, 5) == 0


def test_arrays_agree_with_rationals():
    n = 12
    c, k = np.meshgrid(np.arange(n + 1), np.arange(1, n + 1))
    want = [[float(1 - Fraction(comb(n - cc, kk), comb(n, kk))) for cc in range(n + 1)] for kk in range(1, n + 1)]
    np.testing.assert_allclose(pass_at_k(n, c, k), want, rtol=1e-13, atol=1e-15)
    assert pass_at_k(np.zeros(0, int) + 4, np.zeros(0, int), 1).shape == (0,)


def test_enormous_counts():
    n = 100_000
    got = pass_at_k(np.full(3, n), np.array([1, 3, 99_999]), np.array([1, 50_000, 2]))
    np.testing.assert_allclose(got, [1e-5, pass_at_k(n, 3, 50_000), 1.0], rtol=1e-12)
    assert pass_at_k(n, 3, 50_000) == pytest.approx(0.87500375, abs=1e-8)


def test_estimate_is_unbiased():
    p, n = 0.3, 9
    for k in (1, 4, 9):
        mean = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


def test_curve_and_interval():
    curve = PassAtKCurve.from_counts(8, [0, 4, 8, 2], [8, 1, 2])
    assert curve.ks == (1, 2, 8)
    assert curve.values[0] == pytest.approx(14 / 32)
    assert curve.values[2] == pytest.approx(3 / 4)
    low, high = curve.interval()
    assert (low <= curve.values).all()
    assert (curve.values <= high).all()
    assert low[0] < high[0]
    again = PassAtKCurve.from_dict(curve.to_dict())
    np.testing.assert_array_equal(again.per_prompt, curve.per_prompt)
    exact = PassAtKCurve.from_probabilities([0.0, 0.5, 1.0], [1, 3])
    np.testing.assert_allclose(exact.per_prompt, [[0, 0], [0.5, 0.875], [1, 1]])


def test_speedup_interpolates_in_log_k():
    # a goes 0.2 -> 0.6 from k = 1 to 16; b reaches 0.4 at its last k = 16: a needs sqrt(16) = 4.
    a = PassAtKCurve((1, 16), np.array([[0.2, 0.6]]))
    b = PassAtKCurve((1, 16), np.array([[0.1, 0.4]]))
    assert a.k_to_reach(0.4) == pytest.approx(4)
    assert PassAtKCurve.speedup(a, b) == pytest.approx(4)
    assert PassAtKCurve.speedup(b, a) is None
    assert a.k_to_reach(0.7) is None
    assert a.k_to_reach(0.1) == 1
    assert PassAtKCurve.speedup(a, a) == pytest.approx(1)
    assert PassAtKCurve.speedup_interval(a, b) == pytest.approx((4, 4))
    assert PassAtKCurve.speedup_interval(b, a) is None


def test_majority():
    answers = [["a", "b", "b", "c"], ["x", "y", "y", "x"], ["q", "q", "r", "r"]]
    assert majority_at_k(answers, 3) == ["b", "y", "q"]
    assert majority_at_k(answers, 4) == ["b", "x", "q"]
    assert majority_at_k(answers, 4, reference=["b", "y", "q"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="k = 5"):
        majority_at_k(answers, 5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((4, 5, 1), "0..n"),
        ((4, 1, 5), "k must lie in 1..n"),
        ((4, 1, 0), "k must lie"),
        ((0, 0, 1), "n must be"),
        ((4, -1, 1), "0..n"),
    ],
)
def test_bad_counts(args, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*args)
    with pytest.raises(ValueError, match=message):
        pass_at_k(*(np.array([a]) for a in args))


def test_bad_curves():
    with pytest.raises(ValueError, match="no prompts"):
        PassAtKCurve.from_counts(4, [], [1])
    with pytest.raises(ValueError, match="at least one k"):
        PassAtKCurve.from_counts(4, [1], [])
    with pytest.raises(ValueError, match="needs 'ks' and 'per_prompt'"):
        PassAtKCurve.from_dict({"ks": [1]})
    with pytest.raises(ValueError, match="outside"):
        PassAtKCurve.from_dict({"ks": [1], "per_prompt": [[2.0]]})
