"""`maxrl_advantages`: grouping, invariants, options and bad input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxrl import maxrl_advantages
from maxrl.advantages import group_statistics
from maxrl.estimators import ESTIMATORS

batches = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=6)
names = st.sampled_from(sorted(ESTIMATORS))


def flatten(groups):
    rewards = torch.tensor([float(r) for group in groups for r in group])
    ids = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    return rewards, ids


@settings(max_examples=60, deadline=None)
@given(batches, names, st.randoms())
def test_permuting_rollouts_permutes_advantages(groups, name, random):
    rewards, ids = flatten(groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = maxrl_advantages(rewards, group_ids=ids, estimator=name)
    shuffled = maxrl_advantages(rewards[order], group_ids=ids[order], estimator=name)
    assert torch.equal(shuffled, straight[order])


@settings(max_examples=60, deadline=None)
@given(batches, names)
def test_other_groups_and_their_order_are_irrelevant(groups, name):
    rewards, ids = flatten(groups)
    alone = [maxrl_advantages(torch.tensor([float(r) for r in g]), group_size=len(g), estimator=name) for g in groups]
    assert torch.equal(maxrl_advantages(rewards, group_ids=ids, estimator=name), torch.cat(alone))
    doubled, double_ids = flatten([*groups, groups[0]])
    assert torch.equal(
        maxrl_advantages(doubled, group_ids=double_ids, estimator=name)[: len(rewards)], torch.cat(alone)
    )


@settings(max_examples=60, deadline=None)
@given(batches)
def test_sums_and_the_relation_to_rloo(groups):
    rewards, ids = flatten(groups)
    for name in ("maxrl", "rloo", "dr_grpo", "grpo"):
        a = maxrl_advantages(rewards, group_ids=ids, estimator=name)
        sums = torch.zeros(len(groups)).index_add_(0, ids, a)
        assert sums.abs().max() < 1e-5
    maxrl = maxrl_advantages(rewards, group_ids=ids)
    rloo = maxrl_advantages(rewards, group_ids=ids, estimator="rloo")
    for g, group in enumerate(groups):
        n, k = len(group), sum(group)
        rows = ids == g
        if k:
            torch.testing.assert_close(maxrl[rows], rloo[rows] * (n - 1) / k)
        else:
            assert not maxrl[rows].any()


@settings(max_examples=40, deadline=None)
@given(batches, names)
def test_equal_groups_equal_ids(groups, name):
    size = min(len(g) for g in groups)
    rewards, ids = flatten([g[:size] for g in groups])
    by_size = maxrl_advantages(rewards, group_size=size, estimator=name)
    labels = [f"prompt-{i}" for i in ids.tolist()]
    for given_ids in (ids, ids * 1000 - 5, ids.to(torch.int32), ids.numpy(), labels, np.array(labels, dtype=object)):
        assert torch.equal(maxrl_advantages(rewards, group_ids=given_ids, estimator=name), by_size)


def test_low_pass_rate_limit():
    """One success of N: the failures weigh -1, the success N - 1, whatever N."""
    for n in (2, 100, 100_000):
        a = maxrl_advantages(torch.eye(1, n)[0], group_size=n)
        assert a[0] == n - 1
        assert (a[1:] == -1).all()


@pytest.mark.parametrize("name", ["subset", "subset_cv", "loo", "maclaurin", "pkpo"])
def test_enormous_groups_neither_overflow_nor_lose_digits(name):
    n, order = 100_000, 50_000
    rewards = (torch.arange(n) % 1000 == 0).float()
    a = maxrl_advantages(rewards, group_size=n, estimator=name, order=order)
    assert torch.isfinite(a).all()
    if name == "subset":
        # 100 successes: a subset of half the rollouts misses all of them with probability about 2**-100.
        assert a[0] == pytest.approx(n / 100, rel=1e-6)
        tiny = maxrl_advantages(torch.eye(1, n)[0], group_size=n, estimator=name, order=1)
        assert tiny[0] == pytest.approx(1.0, rel=1e-6)


def test_dtypes_devices_and_graph():
    bits = [1, 0, 1, 1, 0, 0]
    want = maxrl_advantages(torch.tensor(bits, dtype=torch.float32), group_size=3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool):
        got = maxrl_advantages(torch.tensor(bits, dtype=dtype), group_size=3)
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    tracked = torch.tensor(bits, dtype=torch.float32, requires_grad=True)
    assert not maxrl_advantages(tracked, group_size=3).requires_grad
    strided = torch.tensor(bits * 2, dtype=torch.float32).view(2, 6).T.reshape(-1)[::2]
    assert torch.equal(maxrl_advantages(strided, group_size=3), want)


def test_empty_batch():
    for kwargs in ({"group_size": 4}, {"group_ids": []}, {"group_ids": torch.zeros(0, dtype=torch.long)}):
        got = maxrl_advantages(torch.zeros(0), **kwargs)
        assert got.shape == (0,)
        assert got.dtype == torch.float32


def test_invalid_rollouts_leave_n_and_k():
    nan = float("nan")
    rewards = torch.tensor([1, nan, 0, 0, 0, nan, 1, nan, nan, nan])
    valid = ~rewards.isnan()
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    got = maxrl_advantages(rewards, group_ids=ids, valid=valid)
    # Group 0 is 1 of 3; groups 1 and 2 have one rollout left and nothing to compare it with; group 3 is gone.
    assert got.tolist() == [2, 0, -1, -1, 0, 0, 0, 0, 0, 0]
    got = maxrl_advantages(rewards, group_ids=ids, valid=valid, estimator="conditional")
    assert got.tolist() == [3, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    # An order that the surviving rollouts cannot reach is lowered to their number (one here, so N c(1) = 1).
    got = maxrl_advantages(rewards[:2], group_size=2, valid=valid[:2], estimator="subset", order=2)
    assert got.tolist() == [1, 0]
    odd = torch.tensor([0.5, 1.0, 0.0, -3.0])
    assert maxrl_advantages(odd, group_size=4, valid=torch.tensor([False, True, True, False])).tolist() == [0, 1, -1, 0]


def test_batch_scale_weighs_prompts_equally():
    rewards = torch.tensor([1, 0, 1, 0, 0, 0, 0, 1, 0, 0.0])
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 2, 2])
    valid = torch.tensor([True] * 8 + [False] * 2)
    score = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    a = maxrl_advantages(rewards, group_ids=ids, valid=valid, scale="batch")
    plain = maxrl_advantages(rewards, group_ids=ids, valid=valid)
    per_prompt = torch.stack([(plain[:2, None] * score[:2]).mean(0), (plain[2:8, None] * score[2:8]).mean(0)])
    torch.testing.assert_close((a[:, None] * score).mean(0), per_prompt.mean(0))
    equal = torch.tensor([1, 0, 0, 1, 1, 0.0])
    assert torch.equal(maxrl_advantages(equal, group_size=3, scale="batch"), maxrl_advantages(equal, group_size=3))


def test_nonnegative_rewards():
    rewards = torch.tensor([0.5, 1.5, 1.0, 0.0, 0.0, 0.0])
    got = maxrl_advantages(rewards, group_size=3, reward_mode="nonnegative")
    torch.testing.assert_close(got, torch.tensor([-0.5, 0.5, 0.0, 0, 0, 0]))
    bits = torch.tensor([1, 0, 0, 1, 1, 0.0])
    for name in ("maxrl", "conditional", "control_variate", "rloo", "dr_grpo", "grpo", "reinforce"):
        torch.testing.assert_close(
            maxrl_advantages(bits, group_size=3, estimator=name, reward_mode="nonnegative"),
            maxrl_advantages(bits, group_size=3, estimator=name),
        )
    with pytest.raises(ValueError, match="pass/fail rewards only; non-negative rewards: maxrl, conditional"):
        maxrl_advantages(bits, group_size=3, estimator="loo", reward_mode="nonnegative")


def test_standard_deviation_does_not_cancel():
    """[0, .95, .95, ...]: a deviation from the counts or from centred values stays sane where E[x^2] - E[x]^2 does
    not."""
    rewards = torch.full((16,), 0.95)
    rewards[0] = 0.0
    got = maxrl_advantages(rewards, group_size=16, estimator="grpo", reward_mode="nonnegative")
    want = (rewards - rewards.mean()) / rewards.std()
    torch.testing.assert_close(got, want)
    same = torch.full((8,), 0.1)
    assert maxrl_advantages(same, group_size=8, estimator="grpo", reward_mode="nonnegative").abs().max() < 1e-6


def test_threshold_is_compared_in_the_dtype_of_the_rewards():
    rewards = torch.tensor([0.7, 0.69, 0.71, 0.0])
    assert maxrl_advantages(rewards, group_size=4, threshold=0.7).tolist() == [1, -1, 1, -1]
    assert maxrl_advantages(rewards.bfloat16(), group_size=4, threshold=0.7)[0] == 1
    assert maxrl_advantages(torch.tensor([1, 2, 3, 0]), group_size=4, threshold=1.5).tolist() == [-1, 1, 1, -1]


def test_eps_and_ddof_match_the_official_code():
    rewards = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0.0])
    official = (rewards - rewards.mean()) / (rewards.mean() + 1e-6)
    torch.testing.assert_close(maxrl_advantages(rewards, group_size=8, eps=1e-6), official)
    gap = (maxrl_advantages(rewards, group_size=8) - official).abs() / official.abs()
    assert gap.max() <= 1e-6 / float(rewards.mean()) + 1e-6
    population = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    got = maxrl_advantages(rewards, group_size=8, estimator="grpo", ddof=0, eps=1e-6)
    torch.testing.assert_close(got, population)


def test_group_statistics():
    stats = group_statistics(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0.0]), group_size=2)
    assert stats.successes.tolist() == [1, 2, 0, 0]
    assert stats.share_without_success == 0.5
    assert stats.share_all_success == 0.25


@pytest.mark.parametrize(
    ("rewards", "kwargs", "message"),
    [
        ([1, 0, 0], {"group_size": 2}, r"group_size = 2 does not divide the 3 rewards"),
        ([1, 0], {}, r"exactly one of group_size and group_ids, got neither"),
        ([1, 0], {"group_size": 2, "group_ids": [0, 0]}, r"got both"),
        ([1, 0], {"group_size": 0}, r"at least one rollout"),
        ([1], {"group_size": 1}, r"'maxrl' compares the rollouts .* has 1: draw at least 2, or use 'conditional'"),
        ([1, 0, 1], {"group_ids": [0, 0, 1], "estimator": "loo"}, r"'loo' compares"),
        ([1, 0, 1], {"group_ids": [0, 0, 1], "estimator": "grpo"}, r"'grpo' compares"),
        ([1, 0, 1], {"group_ids": [0, 0, 1], "estimator": "rloo"}, r"'rloo' compares"),
        ([1, float("nan")], {"group_size": 2}, r"reward nan at row 1: rewards must be finite; exclude"),
        ([float("inf"), 0], {"group_size": 2}, r"reward inf at row 0"),
        ([1, 0.5], {"group_size": 2}, r"reward 0\.5 at row 1 .*threshold=.*reward_mode='nonnegative'"),
        ([1.0001, 0.0], {"group_size": 2}, r"reward 1\.000\d+ at row 0 is neither 0 nor 1"),
        ([1, 1e-12], {"group_size": 2}, r"neither 0 nor 1"),
        ([1, -1], {"group_size": 2}, r"reward -1\.0 at row 1 is negative"),
        ([1, -1], {"group_size": 2, "reward_mode": "nonnegative"}, r"is negative"),
        ([1, -1], {"group_size": 2, "threshold": 0.5}, r"is negative"),
        ([1, 0], {"group_size": 2, "estimator": "subset", "order": 0}, r"order = 0"),
        ([1, 0], {"group_size": 2, "estimator": "subset", "order": 3}, r"order = 3, but a group has only 2 rollouts"),
        ([1, 0], {"group_size": 2, "order": 1}, r"fixed order"),
        ([1, 0], {"group_size": 2, "reward_mode": "real"}, r"choose one of binary, nonnegative"),
        ([1, 0], {"group_size": 2, "scale": "sum"}, r"choose one of mean, batch"),
        (
            [1, 0],
            {"group_size": 2, "reward_mode": "nonnegative", "threshold": 1.0},
            r"use it with reward_mode='binary'",
        ),
        ([1, 0], {"group_size": 2, "eps": -1.0}, r"eps = -1"),
        ([1, 0], {"group_size": 2, "drop_empty": True}, r"belongs to estimator 'subset_cv'"),
        ([1, 0], {"group_ids": [0]}, r"one id per reward"),
        ([1, 0], {"group_ids": torch.tensor([[0, 0]])}, r"one id per reward"),
        ([1, 0], {"group_ids": [0.0, float("nan")]}, r"NaN, which equals no group"),
        ([1, 0], {"group_size": 2, "estimator": "ppo"}, r"unknown estimator 'ppo'"),
    ],
)
def test_bad_input(rewards, kwargs, message):
    with pytest.raises(ValueError, match=message):
        maxrl_advantages(torch.tensor(rewards, dtype=torch.float64), **kwargs)


def test_bad_types():
    with pytest.raises(TypeError, match="torch tensor, got list"):
        maxrl_advantages([1.0, 0.0], group_size=2)
    with pytest.raises(ValueError, match=r"shape \(B,\), got \(1, 2\)"):
        maxrl_advantages(torch.zeros(1, 2), group_size=2)
    with pytest.raises(TypeError, match="integers are needed"):
        maxrl_advantages(torch.zeros(2), group_ids=torch.zeros(2))
    with pytest.raises(TypeError, match="hashable"):
        maxrl_advantages(torch.zeros(2), group_ids=[[0], [0]])
    with pytest.raises(ValueError, match="one device"):
        maxrl_advantages(torch.zeros(2), group_ids=torch.zeros(2, dtype=torch.long, device="meta"))
    with pytest.raises(ValueError, match="bool tensor"):
        maxrl_advantages(torch.zeros(2), group_size=2, valid=torch.ones(3, dtype=torch.bool))
