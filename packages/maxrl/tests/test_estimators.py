"""Each estimator: golden values, and the objective it truly ascends by exact enumeration in rationals and in
float64."""

from fractions import Fraction
from itertools import product
from math import comb

import pytest
import torch

from maxrl import effective_order, maxrl_advantages, weight
from maxrl.enumeration import bernoulli_moments, softmax_moments
from maxrl.estimators import ESTIMATORS

GOLDEN = [
    # rewards, estimator, options, advantages
    ([1, 0, 0, 0], "maxrl", {}, [3, -1, -1, -1]),
    ([1, 0, 0, 0], "conditional", {}, [4, 0, 0, 0]),
    ([1, 0, 0, 0], "control_variate", {}, [3, -1, -1, -1]),
    ([1, 0, 0, 0], "loo", {}, [4, -2 / 3, -2 / 3, -2 / 3]),
    ([1, 0, 0, 0], "subset", {"order": 2}, [2, 0, 0, 0]),
    ([1, 0, 0, 0], "rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
    ([1, 0, 0, 0], "grpo", {"eps": 1e-4}, [1.4997, -0.4999, -0.4999, -0.4999]),
    ([1, 0, 0, 0], "dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
    ([1, 0, 0, 0], "reinforce", {}, [1, 0, 0, 0]),
    ([1, 1, 0, 0], "maxrl", {}, [1, 1, -1, -1]),
    ([1, 1, 0, 0], "loo", {}, [4 / 3, 4 / 3, -8 / 9, -8 / 9]),
    ([1, 1, 0, 0], "subset", {"order": 2}, [5 / 3, 5 / 3, 0, 0]),
    ([1, 1, 1, 0], "maxrl", {}, [1 / 3, 1 / 3, 1 / 3, -1]),
    ([1, 1, 1, 0], "loo", {}, [4 / 9, 4 / 9, 4 / 9, -1]),
    ([1, 1, 1, 1], "maxrl", {}, [0, 0, 0, 0]),
    ([1, 1, 1, 1], "conditional", {}, [1, 1, 1, 1]),
    ([1, 1, 1, 1], "subset", {"order": 2}, [1, 1, 1, 1]),
    ([1, 1, 1, 1], "loo", {}, [0, 0, 0, 0]),
    ([0, 0, 0, 0], "maxrl", {}, [0, 0, 0, 0]),
    ([0, 0, 0, 0], "control_variate", {}, [-1, -1, -1, -1]),
    ([0, 0, 0, 0], "loo", {}, [0, 0, 0, 0]),
    ([0, 0, 0, 0], "grpo", {}, [0, 0, 0, 0]),
    ([0, 0, 0, 0], "maclaurin", {}, [-3, -3, -3, -3]),
    ([1, 0, 0, 0], "maclaurin", {"order": 2}, [1, -2 / 3, -2 / 3, -2 / 3]),
]


@pytest.mark.parametrize(("rewards", "estimator", "options", "expected"), GOLDEN)
def test_golden(rewards, estimator, options, expected):
    got = maxrl_advantages(torch.tensor(rewards), group_size=4, estimator=estimator, **options)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "options", "success", "failure"),
    [("maxrl", {}, 15, -1), ("loo", {}, 16, -8 / 15), ("subset", {"order": 2}, 2, 0)],
)
def test_lone_success_of_sixteen(estimator, options, success, failure):
    got = maxrl_advantages(torch.tensor([1.0] + [0.0] * 15), group_size=16, estimator=estimator, **options)
    torch.testing.assert_close(got, torch.tensor([success] + [failure] * 15, dtype=torch.float32))


# The formulas of the specification once more, in rationals and straight from their definitions (subset sums,
# products), so that the closed forms of the package are checked against something else.


def subset_c(n, k, t):
    """Mean over all subsets of size t: each of its j successes gets 1/j."""
    if k == 0:
        return Fraction(0)
    total = sum(Fraction(comb(k - 1, j - 1) * comb(n - k, t - j), j) for j in range(1, t + 1) if t - j <= n - k)
    return total / comb(n, t)


def maclaurin_failure(n, k, t):
    f, total = n - k, Fraction(0)
    for order in range(2, min(t, f) + 1):
        term = Fraction(1)
        for j in range(1, order):
            term *= Fraction(f - j, n - j)
        total += term
    return -total


def rational_coefficients(name, n, k, t, beta=Fraction(1)):
    """(success, failure) for k of n; an entry is None where no such rollout exists."""
    f = n - k
    zero = Fraction(0)
    if name == "conditional":
        return (Fraction(n, k) if k else zero, zero)
    if name == "control_variate":
        return ((Fraction(n, k) if k else zero) - beta, -beta)
    if name == "maxrl":
        return (Fraction(f, k), Fraction(-1)) if k else (zero, zero)
    if name == "subset":
        return (n * subset_c(n, k, t), zero)
    if name == "subset_cv":
        return (n * subset_c(n, k, t) - beta, -beta)
    if name == "loo":
        success = n * (1 - Fraction(k - 1, n - 1)) * subset_c(n, k, t) if k else zero
        failure = n * -Fraction(k, n - 1) * subset_c(n, k + 1, t) if f else zero
        return success, failure
    if name == "maclaurin":
        return Fraction(1), maclaurin_failure(n, k, t)
    if name == "reinforce":
        return Fraction(1), zero
    if name == "rloo":
        return Fraction(f, n - 1), -Fraction(k, n - 1)
    if name == "dr_grpo":
        return Fraction(f, n), -Fraction(k, n)
    if name == "pkpo":
        ways = comb(n - 1, t - 1)
        success = (1 - beta * Fraction(k - 1, n - 1)) * Fraction(comb(f, t - 1), ways) if k else zero
        failure = -beta * Fraction(k, n - 1) * Fraction(comb(f - 1, t - 1), ways) if f else zero
        return success, failure
    raise AssertionError(name)


def rational_weight(name, n, p, t):
    """E[g] / grad p by enumeration of the success count; S = r - p and grad p = p (1 - p)."""
    total = Fraction(0)
    for k in range(n + 1):
        success, failure = rational_coefficients(name, n, k, t)
        g = (k * success * (1 - p) - (n - k) * failure * p) / n
        total += comb(n, k) * p**k * (1 - p) ** (n - k) * g
    return total / (p * (1 - p))


def w(t, p):
    return sum(((1 - p) ** (j - 1) for j in range(1, t + 1)), Fraction(0))


PASS_RATES = [Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(9, 10)]
WITH_ORDER = ["conditional", "control_variate", "maxrl", "subset", "subset_cv", "loo", "maclaurin", "reinforce", "rloo"]


def cases():
    for name in [*WITH_ORDER, "dr_grpo", "pkpo"]:
        known = ESTIMATORS[name]
        for n in range(known.min_group, 9):
            for order in range(1, n + 1) if known.takes_order else (None,):
                yield name, n, order


@pytest.mark.parametrize("name", [*WITH_ORDER, "dr_grpo", "pkpo"])
def test_expectation_is_the_gradient_of_its_order_in_rationals(name):
    checked = 0
    for estimator, n, order in cases():
        if estimator != name:
            continue
        t = order or n
        for p in PASS_RATES:
            got = rational_weight(name, n, p, t)
            if name == "pkpo":
                assert got == (1 - p) ** (t - 1)
            elif name == "dr_grpo":
                assert got == 1 - Fraction(1, n)
            else:
                assert got == w(effective_order(name, n, order), p), (n, order, p)
            checked += 1
    assert checked >= 28


@pytest.mark.parametrize("name", [*WITH_ORDER, "dr_grpo", "pkpo"])
def test_package_coefficients_equal_the_rational_definitions(name):
    for estimator, n, order in cases():
        if estimator != name:
            continue
        for k in range(n + 1):
            rewards = torch.tensor([1.0] * k + [0.0] * (n - k))
            got = maxrl_advantages(rewards, group_size=n, estimator=name, order=order)
            success, failure = rational_coefficients(name, n, k, order or n)
            want = torch.tensor([float(success)] * k + [float(failure)] * (n - k))
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("estimator", "n", "order"), list(cases()))
def test_expectation_in_float64(estimator, n, order):
    for p in (0.1, 0.25, 0.5, 0.9):
        got = float(bernoulli_moments(p, n, estimator=estimator, order=order).mean) / (p * (1 - p))
        if estimator == "pkpo":
            want = (1 - p) ** ((order or n) - 1)
        elif estimator == "dr_grpo":
            want = 1 - 1 / n
        else:
            t = effective_order(estimator, n, order)
            want = weight(p, order=t) if t else 0.0
        assert got == pytest.approx(want, abs=1e-12, rel=1e-12)


@pytest.mark.parametrize("name", WITH_ORDER)
def test_expectation_for_a_softmax_policy_with_four_actions(name):
    logits = torch.tensor([0.3, -1.0, 0.5, 0.2], dtype=torch.float64)
    correct = torch.tensor([True, False, True, False])
    policy = logits.softmax(0)
    p = policy[correct].sum()
    grad_p = policy * (correct.double() - p)
    known = ESTIMATORS[name]
    for n, order in product((2, 3, 5), (None, 2)):
        if order is not None and not known.takes_order:
            continue
        t = effective_order(name, n, order)
        got = softmax_moments(logits, correct, n, estimator=name, order=order).mean
        torch.testing.assert_close(got, weight(float(p), order=t) * grad_p, rtol=0, atol=1e-12)


def test_default_does_not_have_order_n():
    """The claim that `maxrl` has order N is false for every N and p: the gap is the dropped term (1-p)^(N-1)."""
    for n in range(2, 9):
        for p in PASS_RATES:
            got = rational_weight("maxrl", n, p, n)
            assert got != w(n, p)
            assert w(n, p) - got == (1 - p) ** (n - 1)


def test_expected_gradients_of_the_bernoulli_logit():
    def mean(estimator, n, p):
        return float(bernoulli_moments(p, n, estimator=estimator).mean)

    assert mean("conditional", 4, 0.25) == pytest.approx(0.5126953125, abs=1e-14)
    assert mean("control_variate", 4, 0.25) == pytest.approx(0.5126953125, abs=1e-14)
    assert mean("loo", 4, 0.25) == pytest.approx(0.5126953125, abs=1e-14)
    assert mean("maxrl", 4, 0.25) == pytest.approx(0.43359375, abs=1e-14)
    assert mean("rloo", 4, 0.25) == pytest.approx(0.1875, abs=1e-14)
    assert mean("dr_grpo", 4, 0.25) == pytest.approx(0.140625, abs=1e-14)
    assert mean("maxrl", 2, 0.1) == pytest.approx(0.09, abs=1e-14)
    assert mean("rloo", 2, 0.1) == pytest.approx(0.09, abs=1e-14)


@pytest.mark.parametrize(
    ("p", "variances"),
    [
        (0.1, {"conditional": 0.1986, "control_variate": 0.1323, "maxrl": 0.1703, "loo": 0.2023, "rloo": 0.00749}),
        (0.5, {"conditional": 0.00097, "control_variate": 0.03027, "maxrl": 0.03123, "loo": 0.02512, "rloo": 0.00223}),
    ],
)
def test_variances_of_eight_rollouts(p, variances):
    for name, want in variances.items():
        got = float(bernoulli_moments(p, 8, estimator=name).variance)
        assert got == pytest.approx(want, abs=6e-5 if want > 0.05 else 6e-6), name


def test_two_rollouts_are_rloo_and_beta_does_not_move_the_mean():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1])
    torch.testing.assert_close(
        maxrl_advantages(rewards, group_size=2), maxrl_advantages(rewards, group_size=2, estimator="rloo")
    )
    for beta in (0.0, 0.5, 2.0):
        for name in ("control_variate", "subset_cv", "pkpo"):
            moved = bernoulli_moments(0.2, 5, estimator=name, beta=beta).mean
            torch.testing.assert_close(moved, bernoulli_moments(0.2, 5, estimator=name).mean, rtol=1e-12, atol=0)


def test_dropping_empty_groups_costs_the_last_term():
    """`subset_cv` with drop_empty has the weight w_T - beta (1-p)^(N-1); with T = N, beta = 1 it is `maxrl`."""
    for n, t in ((4, 2), (6, 3), (5, 5)):
        for p in (0.1, 0.5):
            got = float(bernoulli_moments(p, n, estimator="subset_cv", order=t, drop_empty=True).mean) / (p * (1 - p))
            assert got == pytest.approx(weight(p, order=t) - (1 - p) ** (n - 1), abs=1e-12)
    rewards = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1, 0])
    torch.testing.assert_close(
        maxrl_advantages(rewards, group_size=3, estimator="subset_cv", drop_empty=True),
        maxrl_advantages(rewards, group_size=3),
    )


@pytest.mark.parametrize(("n", "k", "per_pass_at_k", "per_estimand"), [(4, 2, 0.5185, 1.0370), (6, 3, 0.348, 1.0444)])
def test_official_pkpo_is_biased(n, k, per_pass_at_k, per_estimand):
    """Expectation over grad pass@k, and over what the same coefficients without a baseline estimate, (1/k) grad
    pass@k."""
    p = 0.1
    grad_pass_at_k = k * (1 - p) ** (k - 1) * p * (1 - p)
    got = float(bernoulli_moments(p, n, estimator="pkpo_official", order=k).mean)
    assert got / grad_pass_at_k == pytest.approx(per_pass_at_k, abs=2e-4)
    assert got / (grad_pass_at_k / k) == pytest.approx(per_estimand, abs=2e-4)
    ours = float(bernoulli_moments(p, n, estimator="pkpo", order=k).mean)
    assert ours / (grad_pass_at_k / k) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ["conditional", "control_variate", "maxrl", "loo", "subset_cv", "maclaurin", "rloo"])
def test_monte_carlo_agrees_with_the_expectation(name):
    """200,000 sampled groups of a four-action softmax: every coordinate within 4 standard errors of w_T grad p."""
    logits = torch.tensor([0.0, 1.0, 1.0, 1.2])
    correct = torch.tensor([True, False, False, False])
    n, groups = 4, 200_000
    policy = logits.double().softmax(0)
    generator = torch.Generator().manual_seed(0)
    actions = torch.multinomial(policy.float(), groups * n, replacement=True, generator=generator)
    a = maxrl_advantages(correct[actions], group_size=n, estimator=name).double()
    score = torch.eye(4, dtype=torch.float64)[actions] - policy
    g = (a[:, None] * score).view(groups, n, 4).mean(1)
    p = policy[0]
    grad_p = policy * (correct.double() - p)
    want = weight(float(p), order=effective_order(name, n)) * grad_p
    z = (g.mean(0) - want) / (g.std(0) / groups**0.5)
    assert z.abs().max() < 4


def test_monte_carlo_rejects_order_n_for_the_default():
    p, n, groups = 0.02, 4, 200_000
    rewards = (torch.rand(groups * n, generator=torch.Generator().manual_seed(1)) < p).double()
    a = maxrl_advantages(rewards, group_size=n).double()
    g = (a * (rewards - p)).view(groups, n).mean(1)
    error = float(g.std()) / groups**0.5

    def z(order):
        return abs(float(g.mean()) - weight(p, order=order) * p * (1 - p)) / error

    assert z(n - 1) < 4
    assert z(n) > 6


def test_effective_order():
    assert effective_order("maxrl", 16) == 15
    assert effective_order("maxrl", 1) == 0
    assert effective_order("conditional", 16) == 16
    assert effective_order("loo", 16, 4) == 4
    assert effective_order("rloo", 16) == 1
    assert effective_order("grpo", 16) is None
    assert effective_order("pkpo", 16, 8) is None
    with pytest.raises(ValueError, match=r"unknown estimator 'magic': choose one of maxrl, conditional"):
        effective_order("magic", 4)
    with pytest.raises(ValueError, match=r"order = 5 with 4 rollouts"):
        effective_order("loo", 4, 5)
    with pytest.raises(ValueError, match=r"at least 1"):
        effective_order("loo", 4, 0)
    with pytest.raises(ValueError, match=r"fixed order; an order can be chosen for: subset"):
        effective_order("maxrl", 4, 2)
