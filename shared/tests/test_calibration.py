"""Calibration scores worked out by hand, and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from icml26_shared.evaluation.calibration import (
    brier_score,
    expected_calibration_error,
    reliability_bins,
    top_label,
)


def test_bins_by_hand():
    bins = reliability_bins([0.0, 0.1, 0.5, 0.55, 0.9, 1.0], [0, 1, 0, 1, 1, 1], bins=2)
    np.testing.assert_allclose(bins.edges, [0, 0.5, 1])
    np.testing.assert_array_equal(bins.count, [3, 3])  # 0.5 belongs to the lower bin
    np.testing.assert_allclose(bins.confidence, [0.2, 2.45 / 3])
    np.testing.assert_allclose(bins.accuracy, [1 / 3, 1])
    gaps = np.array([1 / 3 - 0.2, 1 - 2.45 / 3])
    assert bins.ece == pytest.approx(gaps.mean())
    assert bins.mce == pytest.approx(gaps.max())


def test_empty_bins_are_nan_and_count_for_nothing():
    bins = reliability_bins([0.95, 0.97], [1, 0], bins=10)
    np.testing.assert_array_equal(bins.count, [0] * 9 + [2])
    assert np.isnan(bins.accuracy[:9]).all()
    assert bins.ece == bins.mce == pytest.approx(0.46)


def test_quantile_bins_hold_equal_counts():
    confidence = np.random.default_rng(0).random(1000)
    bins = reliability_bins(confidence, confidence > 0.5, bins=8, strategy="quantile")
    np.testing.assert_array_equal(bins.count, [125] * 8)
    ties = reliability_bins([0.3] * 5, [1] * 5, bins=8, strategy="quantile")
    assert ties.count.tolist() == [5]
    assert ties.ece == pytest.approx(0.7)


def test_a_calibrated_forecast_has_small_error_and_an_overconfident_one_its_bias():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 0.9, 200_000)
    hit = rng.random(p.size) < p
    assert reliability_bins(p, hit).ece < 0.01
    assert reliability_bins(p + 0.1, hit).ece == pytest.approx(0.1, abs=0.01)


def test_the_top_label_decides():
    probabilities = [[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]
    confidence, correct = top_label(probabilities, [1, 1, 0])
    np.testing.assert_allclose(confidence, [0.8, 0.6, 0.5])
    np.testing.assert_array_equal(correct, [True, False, True])
    # bins of 0.1: gaps 0.2, 0.6 and 0.5
    assert expected_calibration_error(probabilities, [1, 1, 0], bins=10) == pytest.approx((0.2 + 0.6 + 0.5) / 3)


def test_brier_score_by_hand():
    assert brier_score([0.8, 0.3], [1, 0]) == pytest.approx((0.04 + 0.09) / 2)
    assert brier_score([[0.2, 0.8], [0.7, 0.3]], [1, 0]) == pytest.approx(0.04 + 0.09)
    assert brier_score([[0.5, 0.3, 0.2]], [2]) == pytest.approx(0.25 + 0.09 + 0.64)


def test_brier_score_is_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    p, y = rng.random(500), rng.integers(0, 2, 500)
    assert brier_score(p, y) == pytest.approx(metrics.brier_score_loss(y, p))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reliability_bins([], []), "N >= 1"),
        (lambda: reliability_bins([0.5, 1.2], [0, 1]), r"confidence must lie in \[0, 1\], got values from 0.5 to 1.2"),
        (lambda: reliability_bins([0.5, np.nan], [0, 1]), "confidence must lie in"),
        (lambda: reliability_bins([0.5], [2]), "correct must lie in"),
        (lambda: reliability_bins([0.5], [1], bins=0), "bins must be at least 1"),
        (lambda: reliability_bins([0.5], [1], strategy="even"), "strategy must be 'uniform' or 'quantile'"),
        (lambda: brier_score([[0.5, 0.6]], [0]), "must sum to 1"),
        (lambda: brier_score([0.5, 0.5], [0]), r"need probabilities \[N\] or \[N, C\]"),
        (lambda: brier_score([[0.5, 0.5]], [2]), "labels must be integers from 0 to 1"),
        (lambda: brier_score([0.5], [0.5]), "labels must be integers"),
        (lambda: top_label([0.5], [0]), r"must be \[N, C\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
