"""Off-policy advantages: exact expectations over the behaviour policy."""

from math import comb

import pytest
import torch

from maxrl import weight
from maxrl.off_policy import off_policy_advantages


def expectation(p_behaviour, p_policy, n, **kwargs):
    """E_b[(1/N) sum a_i S_i] of a one-logit policy, S = r - p_policy, success counts enumerated."""
    total = 0.0
    for k in range(n + 1):
        rewards = torch.tensor([1.0] * k + [0.0] * (n - k), dtype=torch.float64)
        log_ratio = torch.where(
            rewards == 1,
            torch.tensor(p_policy / p_behaviour).log(),
            torch.tensor((1 - p_policy) / (1 - p_behaviour)).log(),
        )
        a = off_policy_advantages(rewards, log_ratio, group_size=n, **kwargs).double()
        g = float((a * (rewards - p_policy)).mean())
        total += comb(n, k) * p_behaviour**k * (1 - p_behaviour) ** (n - k) * g
    return total


def test_golden():
    assert expectation(0.25, 0.5, 2, estimator="conditional") == pytest.approx(7 / 16, abs=1e-6)
    assert expectation(0.5, 0.5, 2, estimator="conditional") == pytest.approx(3 / 8, abs=1e-6)
    assert expectation(0.25, 0.5, 4, estimator="conditional") == pytest.approx(175 / 256, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "order", "t"), [("maxrl", None, 4), ("loo", 2, 2), ("control_variate", None, 5), ("maclaurin", 3, 3)]
)
def test_direction_is_right_and_weight_is_the_behaviours(estimator, order, t):
    for b, p in ((0.1, 0.4), (0.6, 0.3)):
        got = expectation(b, p, 5, estimator=estimator, order=order)
        assert got == pytest.approx(weight(b, order=t) * p * (1 - p), rel=1e-5)


def test_self_normalised_tends_to_the_log_likelihood_gradient():
    """All successes have one ratio here, so the estimate is the conditional one on the trained policy's score."""
    p = 0.4
    errors = [abs(expectation(0.3, p, n, mode="self_normalised") - (1 - p)) for n in (2, 8, 32)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    log_ratio = torch.tensor([900.0, 899.0, 5.0, 0.0, -700.0, 3.0])
    a = off_policy_advantages(rewards, log_ratio, group_size=3, mode="self_normalised")
    share = torch.softmax(log_ratio[:2], 0)
    torch.testing.assert_close(a, torch.tensor([3 * share[0], 3 * share[1], 0, 0, 0, 0]))


def test_on_policy_is_unchanged_and_bad_input():
    from maxrl import maxrl_advantages

    rewards = torch.tensor([1.0, 0, 0, 1])
    zero = torch.zeros(4)
    torch.testing.assert_close(
        off_policy_advantages(rewards, zero, group_size=4), maxrl_advantages(rewards, group_size=4)
    )
    with pytest.raises(ValueError, match="choose one of behaviour, self_normalised"):
        off_policy_advantages(rewards, zero, group_size=4, mode="magic")
    with pytest.raises(ValueError, match="NaN or infinite"):
        off_policy_advantages(rewards, zero.log(), group_size=4)
    valid = torch.tensor([True, True, False, True])
    ratio = torch.tensor([0.1, 0.2, float("nan"), 0.0])
    a = off_policy_advantages(rewards, ratio, group_size=4, valid=valid)
    assert a[2] == 0
    assert torch.isfinite(a).all()
