"""The weight of a prompt and the truncated log-likelihood."""

import math

import numpy as np
import pytest
import torch

from maxrl import weight
from maxrl.objective import truncated_log_likelihood


def test_golden():
    assert weight(0.1, order=4) == pytest.approx(3.439, abs=1e-12)
    assert weight(0.01, order=16) == pytest.approx(14.854223, abs=1e-6)
    assert weight(0.01, order=128) == pytest.approx(72.374833, abs=1e-6)
    assert truncated_log_likelihood(0.25, 4) == pytest.approx(-1.2509765625, abs=1e-12)


def test_limits():
    for order in (1, 7, 100_000):
        assert weight(0.0, order=order) == order
        assert weight(1.0, order=order) == 1
        assert weight(1e-13, order=order) == pytest.approx(order, rel=1e-7)
    assert weight(0.25) == weight(0.25, order=math.inf) == weight(0.25, "ml") == 4
    assert weight(0.0) == math.inf
    assert weight(0.3, order=1) == pytest.approx(1, abs=1e-15)


def test_small_pass_rates_keep_their_digits():
    for p in (1e-4, 1e-6, 1e-9):
        series = sum((1 - p) ** k for k in range(64))
        assert weight(p, order=64) == pytest.approx(series, rel=1e-12)


def test_weight_is_the_derivative_of_the_objective():
    p = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    h = 1e-6
    for order in (1, 3, 16, 5000):
        numeric = (truncated_log_likelihood(p + h, order) - truncated_log_likelihood(p - h, order)) / (2 * h)
        torch.testing.assert_close(weight(p, order=order), numeric, rtol=1e-6, atol=1e-6)
    assert truncated_log_likelihood(0.3, math.inf) == pytest.approx(math.log(0.3))
    assert truncated_log_likelihood(0.3, 400) == pytest.approx(math.log(0.3), abs=1e-12)


def test_other_objectives_and_kinds():
    assert weight(0.2, "grpo") == pytest.approx(1 / math.sqrt(0.16))
    assert weight(0.9, "grpo") > weight(0.5, "grpo")
    assert weight(0.2, "rloo") == 1
    assert weight(0.2, "pass_at_k", order=3) == pytest.approx(3 * 0.64)
    array = weight(np.array([[0.5, 0.25]]), order=2)
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, [[1.5, 1.75]])
    assert weight(torch.tensor([0.5]), order=2).dtype == torch.float64


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1.5,), "p = 1.5"),
        ((float("nan"),), "p = nan"),
        ((0.5, "dpo"), "unknown objective"),
        ((0.5, "maxrl", 0), "order = 0"),
    ],
)
def test_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        weight(*args)
