"""Exponents: golden values, peers, statistics, invariants, degenerate spectra."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise_lr import fit_tail, spectrum
from layerwise_lr.tail import ALPHA_MAX


def gaussian(m=200, n=120):
    return torch.from_numpy(np.random.default_rng(0).normal(size=(m, n)))


@pytest.mark.parametrize(("eigs", "alpha", "n"), [([1, 2, 4, 8], 3.88539008, 2), ([1, 2, 4, 8, 16], 2.44269504, 3)])
def test_golden(eigs, alpha, n):
    fit = fit_tail(eigs)
    assert fit.alpha == pytest.approx(alpha, abs=5e-9)
    assert (fit.n_tail, fit.xmin) == (n, 4)
    assert fit.sigma == pytest.approx((alpha - 1) / math.sqrt(n))
    assert fit_tail([7 * value for value in eigs]).alpha == pytest.approx(alpha, abs=5e-9)


def test_distance_by_hand():
    fit = fit_tail([1, 2, 4, 8])
    # lambda/xmin = 1, 2; alpha - 1 = 2/ln 2, so 2^(1 - alpha) = e^-2; (j - i)/n = 0, 1/2
    assert pytest.approx(max(0.0, abs(1 - math.exp(-2) - 0.5))) == fit.D


def test_golden_gaussian():
    eigs = spectrum(gaussian(), "svd")
    assert fit_tail(eigs).alpha == pytest.approx(2.584682, abs=5e-7)
    assert fit_tail(eigs, "gof").alpha == pytest.approx(15.558955, abs=5e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_golden_rank_power():
    """Eigenvalues that fall like a power of their rank: powerlaw fits the same."""
    powerlaw = pytest.importorskip("powerlaw")
    eigs = np.sort((np.arange(1, 501) / 500.0) ** (-1 / 1.344))
    fit = fit_tail(eigs, "gof")
    peer = powerlaw.Fit(eigs, verbose=False)
    assert fit.alpha == pytest.approx(peer.power_law.alpha, abs=1e-6)
    assert fit.xmin == pytest.approx(peer.power_law.xmin, abs=1e-6)
    assert pytest.approx(peer.power_law.D, abs=1e-6) == fit.D


@pytest.mark.parametrize("exponent", [2, 2.5, 3, 4])
def test_pareto_samples(exponent):
    sample = np.random.default_rng(1).pareto(exponent - 1, size=2000) + 1
    fit = fit_tail(sample, k=math.inf)
    assert fit.n_tail == 2000
    assert abs(fit.alpha - exponent) <= 4 * fit.sigma


def test_gof_is_the_smallest_distance_over_all_thresholds():
    eigs = spectrum(gaussian(80, 70), "svd").numpy()
    best = (math.inf, 0.0, 0.0)
    for i in range(len(eigs) - 1):
        tail = eigs[i:]
        alpha = 1 + len(tail) / np.log(tail / tail[0]).sum()
        distance = np.abs(1 - (tail / tail[0]) ** (1 - alpha) - np.arange(len(tail)) / len(tail)).max()
        best = min(best, (distance, alpha, tail[0]))
    fit = fit_tail(eigs, "gof")
    assert (fit.D, fit.alpha, fit.xmin) == pytest.approx(best)


def test_fix_finger_looks_around_the_fullest_bin():
    eigs = spectrum(gaussian(300, 200), "svd").numpy()
    counts, edges = np.histogram(np.log10(eigs), bins=100)
    peak = 10 ** edges[counts.argmax()]
    fit = fit_tail(eigs, "fix_finger")
    assert 0.95 * peak <= fit.xmin <= 1.5 * peak
    every = [(fit_tail(eigs[i:], k=math.inf)) for i in range(199) if 0.95 * peak <= eigs[i] <= 1.5 * peak]
    assert pytest.approx(min(each.D for each in every)) == fit.D


def test_filter_zeros_moves_the_median():
    eigs = [0.0] * 4 + [1e-6] * 2 + [1.0, 2.0, 4.0, 8.0]
    assert fit_tail(eigs, filter_zeros=True).alpha == pytest.approx(3.88539008, abs=5e-9)
    assert fit_tail(eigs).xmin == pytest.approx(1e-6)


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=60), st.floats(1e-3, 1e3))
def test_scale_and_order_change_nothing(eigs, scale):
    fit = fit_tail(eigs)
    if not fit.saturated:
        assert fit_tail([scale * e for e in reversed(eigs)]).alpha == pytest.approx(fit.alpha, rel=1e-6)
    assert 1 < fit.alpha <= ALPHA_MAX


def test_equal_eigenvalues_are_cut():
    for method in ("median", "gof"):
        fit = fit_tail([3.0] * 60, method)
        assert (fit.alpha, fit.saturated, fit.degenerate) == (50, True, "")
    assert fit_tail([3.0] * 60, alpha_max=20).alpha == 20


@pytest.mark.parametrize("eigs", [[0.0, 0.0, 0.0], [1.0], [0.0]])
def test_nothing_to_fit(eigs):
    for method in ("median", "gof", "fix_finger"):
        fit = fit_tail(eigs, method)
        assert fit.degenerate
        assert math.isnan(fit.alpha)
        assert math.isnan(fit.sigma)


def test_half_rank_is_degenerate():
    fit = fit_tail([0.0, 1e-18, 1e-17, 2.0, 3.0])
    assert "rank at most 2 of 5" in fit.degenerate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "N >= 1 eigenvalues"),
        (([[1.0, 2.0]],), r"got shape \(1, 2\)"),
        (([1.0, math.nan],), "must be finite"),
        (([1.0, math.inf],), "must be finite"),
        (([-1.0, 2.0],), "not negative, got -1"),
        (([1.0, 2.0], "mean"), "unknown method 'mean'; choose from median, gof, fix_finger"),
        (([1.0, 2.0], "median", 1), "k must be above 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_tail(*arguments)


def test_rounding_below_zero_is_zero():
    assert fit_tail(torch.tensor([-1e-9, 1.0, 2.0, 4.0])).alpha == fit_tail(torch.tensor([0.0, 1.0, 2.0, 4.0])).alpha
