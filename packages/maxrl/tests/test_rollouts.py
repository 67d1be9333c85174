"""Sequential rollouts: exact order and cost, by enumeration of every reward sequence."""

from itertools import product

import pytest
import torch

from maxrl import rollout_until_success, weight
from maxrl.rollouts import RolloutBatch, expected_rollouts


def scripted(sequence):
    """A sampler that replays one fixed sequence of rewards, and how many it handed out."""
    state = {"used": 0}

    def sample(prompts):
        start = state["used"]
        state["used"] += len(prompts)
        return sequence[start : start + len(prompts)]

    return sample, lambda prompts, completions: completions


def enumerate_expectation(p, cap, chunk, successes=1, beta=0.0):
    """E[g] of the one-logit policy and E[rollouts], over all 2**cap outcomes."""
    mean = cost = 0.0
    for outcome in product((0, 1), repeat=cap):
        sample, verify = scripted(list(outcome))
        batch = rollout_until_success(sample, verify, ["x"], chunk=chunk, max_rollouts=cap, min_successes=successes)
        probability = p ** sum(outcome) * (1 - p) ** (cap - sum(outcome))
        a = batch.advantages(beta=beta).double()
        mean += probability * float((a * (batch.rewards.double() - p)).mean())
        cost += probability * batch.cost
    return mean, cost


def test_golden():
    mean, cost = enumerate_expectation(0.25, 4, 1)
    assert mean == pytest.approx(0.5126953125, abs=1e-6)
    assert cost == pytest.approx(2.734375, abs=1e-12)
    mean, cost = enumerate_expectation(0.25, 4, 2)
    assert mean == pytest.approx(0.5126953125, abs=1e-6)
    assert cost == pytest.approx(3.125, abs=1e-12)
    assert weight(0.1, order=16) * 0.09 == pytest.approx(0.7332281830, abs=1e-9)
    assert expected_rollouts(0.1, 16, 4) == pytest.approx(9.475986986, abs=1e-9)
    assert expected_rollouts(0.1, 128) == pytest.approx(10, abs=2e-5)


@pytest.mark.parametrize(
    ("cap", "chunk", "successes", "beta"), [(6, 4, 1, 0), (7, 3, 2, 0), (6, 1, 3, 0), (6, 2, 1, 0.7)]
)
def test_order_is_the_cap_whatever_the_chunk(cap, chunk, successes, beta):
    for p in (0.1, 0.5):
        mean, cost = enumerate_expectation(p, cap, chunk, successes, beta)
        assert mean == pytest.approx(weight(p, order=cap) * p * (1 - p), rel=1e-5)
        assert cost == pytest.approx(expected_rollouts(p, cap, chunk, successes), rel=1e-9)


def test_unfinished_prompts_are_sampled_together():
    calls = []

    def sample(prompts, generator):
        calls.append(list(prompts))
        return [f"{p}:{float(torch.rand((), generator=generator)):.3f}" for p in prompts]

    def verify(prompts, completions):
        return [1 if p == "easy" else 0 for p in prompts]

    batch = rollout_until_success(
        sample, verify, ["easy", "hard"], chunk=2, max_rollouts=5, generator=torch.Generator().manual_seed(0)
    )
    assert calls == [["easy", "easy", "hard", "hard"], ["hard", "hard"], ["hard"]]
    assert batch.n_drawn.tolist() == [2, 5]
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert batch.successes.tolist() == [2, 0]
    assert batch.cost == 7
    assert len(batch.completions) == 7
    assert batch.completions[0].startswith("easy:")
    assert batch.advantages().tolist() == [1, 1, 0, 0, 0, 0, 0]
    scaled = batch.advantages(scale="batch")
    assert float(scaled.mean()) == pytest.approx(0.5)  # prompt 1 contributes its mean coefficient 1, prompt 2 nothing


def test_unscorable_rollouts_count_as_drawn_and_weigh_nothing():
    sample, verify = scripted([None, 0, 1, 0])
    batch = rollout_until_success(sample, verify, ["x"], chunk=1, max_rollouts=4)
    assert batch.n_drawn.tolist() == [3]
    assert batch.advantages(beta=0.5).tolist()[0] == 0
    assert batch.advantages().tolist() == [0, 0, 3]


def test_empty_and_bad_input():
    empty = rollout_until_success(lambda p: [], lambda p, c: [], [])
    assert isinstance(empty, RolloutBatch)
    assert empty.cost == 0
    assert empty.advantages(scale="batch").shape == (0,)
    sample, verify = scripted([0.5] * 8)
    with pytest.raises(ValueError, match=r"verify_fn returned 0\.5"):
        rollout_until_success(sample, verify, ["x"])
    with pytest.raises(ValueError, match="sample_fn returned 1 completions for 8"):
        rollout_until_success(lambda p: ["a"], verify, ["x"])
    with pytest.raises(ValueError, match="chunk = 0"):
        rollout_until_success(sample, verify, ["x"], chunk=0)
    with pytest.raises(ValueError, match="exceeds max_rollouts"):
        rollout_until_success(sample, verify, ["x"], min_successes=9, max_rollouts=8)
