"""pass@k against the definition: the share of k-subsets of the samples with a success in them."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from icml26_shared.evaluation.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_the_share_of_subsets_with_a_success(n):
    for c in range(n + 1):
        results = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(results, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 1), (10_000, 1, 100), (100_000, 50_000, 7), (5000, 4990, 11)])
def test_large_counts_are_exact(n, c, k):
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert float(pass_at_k(n, c, k)) == pytest.approx(float(exact), rel=1e-12)


def test_a_tiny_chance_is_not_lost():
    assert float(pass_at_k(10**9, 1, 1)) == pytest.approx(1e-9, rel=1e-12)


def test_problems_are_scored_one_by_one_and_broadcast():
    np.testing.assert_allclose(pass_at_k(4, [0, 1, 4], 2), [0.0, 0.5, 1.0])
    np.testing.assert_allclose(pass_at_k([2, 4], [1, 1], 1), [0.5, 0.25])
    assert pass_at_k(4, 2, 1).shape == ()
    assert pass_at_k(4, np.array([], dtype=int), 1).shape == (0,)


def test_the_mean_is_over_problems():
    assert mean_pass_at_k([[True, False], [False, False], [True, True, True]], 1) == pytest.approx(0.5)


def test_it_is_unbiased():
    """The mean of the estimate over draws of n samples is the true chance 1 - (1-p)^k (seed 0, 4 standard errors)."""
    p, n, k, draws = 0.2, 8, 3, 20_000
    passed = np.random.default_rng(0).binomial(n, p, size=draws)
    estimates = pass_at_k(n, passed, k)
    assert abs(estimates.mean() - (1 - (1 - p) ** k)) < 4 * estimates.std() / draws**0.5


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0), ([5, 2], [1, 1], 3)])
def test_counts_out_of_range_are_refused(n, c, k):
    with pytest.raises(ValueError, match="must lie between"):
        pass_at_k(n, c, k)


def test_other_bad_input_is_refused():
    with pytest.raises(TypeError, match="must be integers"):
        pass_at_k(5.0, 1, 1)
    with pytest.raises(ValueError, match="no problems"):
        mean_pass_at_k([], 1)
    with pytest.raises(ValueError, match="k=3 with n=2"):
        mean_pass_at_k([[True, False], [True, False, True]], 3)
