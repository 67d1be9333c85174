"""Completion-level pruning: golden values, designs, invariants, bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo import PruningConfig, prune_completions
from dppo.designs import expected_count, floor_count, systematic, truncated_binomial, water_fill
from dppo.draws import MaskGenerator, combine, occurrences
from dppo.pruning import effective_sample_size, stratify

T = torch.tensor
UNBIASED = ("bernoulli", "fixed", "systematic")


def grpo(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean()) / rewards.std(correction=0)


@pytest.mark.parametrize(
    ("g", "k", "success", "failure", "mu"), [(4, 1, 1.7321, 0.5774, 0.8660), (8, 3, 1.2910, 0.7746, 0.9682)]
)
def test_golden_3_majority_outcome_is_the_low_one(g, k, success, failure, mu):
    rewards = torch.zeros(g).double()
    rewards[:k] = 1
    advantages = grpo(rewards)
    assert advantages[0].item() == pytest.approx(success, abs=5e-5)
    assert -advantages[-1].item() == pytest.approx(failure, abs=5e-5)
    p = k / g
    assert advantages.abs().mean().item() == pytest.approx(mu, abs=5e-5)
    assert advantages.abs().mean().item() == pytest.approx(2 * math.sqrt(p * (1 - p)))
    assert stratify(advantages, g, PruningConfig()).low.tolist() == [False] * k + [True] * (g - k)


@pytest.mark.parametrize("g", [2, 4, 6, 8, 10, 12])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.3, 7.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_3_half_half_group_is_not_pruned(g, scale, dtype):
    rewards = torch.zeros(g, dtype=dtype)
    rewards[1::2] = scale
    for advantages in (grpo(rewards), rewards - rewards.mean()):
        result = prune_completions(advantages, g, PruningConfig(completion_rate=0.95), generator=0)
        assert result.keep.all()
        assert (result.weight == 1).all()


def test_dead_groups_are_free_and_only_if_told_so():
    advantages = T([0.0, 0, 0, 0, 0.75, -0.25, -0.25, -0.25])
    free = prune_completions(advantages, 4, PruningConfig(completion_rate=0), generator=0)
    assert free.keep.tolist() == [False] * 4 + [True] * 4
    assert free.free.tolist() == [True] * 4 + [False] * 4
    assert free.prob.tolist() == [1.0] * 4 + [0.0] * 4
    kept = prune_completions(advantages, 4, PruningConfig(completion_rate=0, free_zeros=False), generator=0)
    assert kept.keep.all()
    assert not kept.free.any()


def test_zero_within_a_live_group_is_low_when_not_free():
    advantages = T([1.0, -1.0, 0.0, 0.0])
    cfg = PruningConfig(free_zeros=False)
    assert stratify(advantages, 4, cfg).low.tolist() == [False, False, True, True]
    result = prune_completions(advantages, 4, cfg, generator=0)
    assert result.prob.tolist() == [0, 0, 0.5, 0.5]


def test_one_item_groups_and_empty_batches():
    result = prune_completions(T([0.3, -2.0, 0.0]), 1, generator=0)
    assert result.keep.tolist() == [True, True, False]
    empty = prune_completions(torch.zeros(0), 4, generator=0)
    assert len(empty.keep) == 0
    assert empty.stats["keep_fraction"] == 1.0
    assert len(prune_completions(torch.zeros(0), [], generator=0).keep) == 0


def test_weights_are_inverse_probabilities_and_zero_where_removed():
    advantages = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for mode in UNBIASED:
        result = prune_completions(advantages, 8, PruningConfig(mode=mode, completion_rate=0.7), generator=5)
        assert torch.equal(result.weight > 0, result.keep)
        kept = result.keep
        torch.testing.assert_close(result.weight[kept], 1 / (1 - result.prob[kept]), rtol=1e-5, atol=0)
        assert result.weight.dtype == result.prob.dtype == torch.float32


STEPS, COPIES = 100, 20


def draws(advantages, group_size, cfg, seed=0, sample_ids=None):
    """PruneResults of STEPS steps, each on COPIES copies of the groups side by side: 2,000 draws in 100 calls."""
    ids = None if sample_ids is None else torch.cat([sample_ids + 1000 * copy for copy in range(COPIES)])
    return [
        prune_completions(
            advantages.repeat(COPIES), group_size, cfg, generator=MaskGenerator(seed, step), sample_ids=ids
        )
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("mode", UNBIASED)
def test_mean_weight_over_masks_is_one(mode):
    """Monte-Carlo, 4 standard errors between steps (the copies of one step are not independent in every design)."""
    advantages = T([0.75, -0.25, -0.25, -0.25, 1.5, 0.1, -0.6, -1.0, 0.2, -0.2, 0.3, -0.3])
    cfg = PruningConfig(mode=mode, completion_rate=0.6)
    weights = torch.stack([r.weight.double().reshape(COPIES, 12).mean(0) for r in draws(advantages, 4, cfg, seed=1)])
    error = weights.std(0) / len(weights) ** 0.5
    assert ((weights.mean(0) - 1).abs() <= 4 * error + 1e-6).all()


@pytest.mark.parametrize("mode", ["bernoulli", "fixed"])
def test_true_inclusion_probabilities_with_a_minimum_per_group(mode):
    advantages = T([0.9, -0.1, -0.2, -0.3, -0.3])
    cfg = PruningConfig(mode=mode, completion_rate=0.9, min_keep_per_group=3)
    results = draws(advantages, 5, cfg)
    keeps = torch.cat([r.keep.reshape(COPIES, 5) for r in results]).double()
    assert (keeps.sum(1) >= 3).all()
    share = keeps.mean(0)
    expected = 1 - results[0].prob[:5].double()
    assert ((share - expected).abs() <= 4 * (expected * (1 - expected) / len(keeps)).sqrt() + 1e-12).all()
    weights = torch.cat([r.weight.reshape(COPIES, 5) for r in results]).double()
    assert ((weights.mean(0) - 1).abs() <= 4 * weights.std(0) / len(weights) ** 0.5 + 1e-6).all()


def test_minimum_beyond_the_group_keeps_all_but_free_ones():
    advantages = T([1.0, -1.0, 0.0, -0.5, 0.5])
    cfg = PruningConfig(completion_rate=0.95, min_keep_per_group=9)
    result = prune_completions(advantages, 5, cfg, generator=3)
    assert result.keep.tolist() == [True, True, False, True, True]
    assert result.weight.tolist() == pytest.approx([1, 1, 0, 1, 1])


def test_fixed_removes_exactly_floor():
    advantages = T([0.75] + [-0.25] * 3 + [0.9] + [-0.1] * 9 + [0.5, -0.5]).float()
    groups = T([0] * 4 + [1] * 10 + [2] * 2)
    for step in range(50):
        result = prune_completions(advantages, groups, PruningConfig(mode="fixed"), generator=MaskGenerator(0, step))
        assert (~result.keep[:4]).sum() == 1
        assert (~result.keep[4:14]).sum() == 4
        assert result.keep[14:].all()
    assert result.weight[1:4].max().item() == pytest.approx(1.5)
    assert result.weight[5:14].max().item() == pytest.approx(9 / 5)
    assert floor_count(0.29, T(100)) == 29


def test_deterministic_warns_and_removes_the_lowest_first():
    with pytest.warns(UserWarning, match="biased"):
        result = prune_completions(T([0.75, -0.25, -0.25, -0.25]), 4, PruningConfig(mode="deterministic"), generator=0)
    assert result.keep.tolist() == [True, False, True, True]
    assert result.weight.tolist() == [1, 0, 2, 2]


def test_mask_is_a_function_of_ids_and_step_only():
    rng = torch.Generator().manual_seed(3)
    advantages, groups = torch.randn(60, generator=rng), torch.arange(10).repeat_interleave(6) * 97 + 5
    for mode in ("bernoulli", "fixed", "systematic"):
        cfg = PruningConfig(mode=mode, completion_rate=0.8)
        ids = torch.arange(60) + 1000
        whole = prune_completions(advantages, groups, cfg, generator=MaskGenerator(2, 9), sample_ids=ids)
        order = torch.randperm(60, generator=rng)
        shuffled = prune_completions(
            advantages[order], groups[order], cfg, generator=MaskGenerator(2, 9), sample_ids=ids[order]
        )
        assert torch.equal(whole.keep[order], shuffled.keep), mode
        torch.testing.assert_close(whole.weight[order], shuffled.weight)
        other = prune_completions(advantages, groups, cfg, generator=MaskGenerator(2, 10), sample_ids=ids)
        assert not torch.equal(whole.keep, other.keep)
    halves = [
        prune_completions(
            advantages[part], groups[part], PruningConfig(), generator=MaskGenerator(2, 9), sample_ids=ids[part]
        ).keep
        for part in (slice(0, 30), slice(30, 60))
    ]
    whole = prune_completions(advantages, groups, PruningConfig(), generator=MaskGenerator(2, 9), sample_ids=ids)
    assert torch.equal(torch.cat(halves), whole.keep), "the number of processes does not change the mask"


def test_default_ids_survive_reordering_of_whole_groups():
    advantages = torch.randn(24, generator=torch.Generator().manual_seed(0))
    names = [f"prompt {i // 4}" for i in range(24)]
    first = prune_completions(advantages, names, generator=1)
    order = torch.arange(24).reshape(6, 4)[torch.randperm(6)].flatten()
    second = prune_completions(advantages[order], [names[i] for i in order], generator=1)
    assert torch.equal(first.keep[order], second.keep)


def test_duplicate_sample_ids_draw_independently_and_without_favour():
    """Ties would let the design "fixed" always remove the earlier of two duplicates."""
    advantages, ids = T([0.9, -0.3, -0.3, -0.3]), T([1, 2, 2, 3])
    cfg = PruningConfig(mode="fixed", completion_rate=0.4)
    keeps = torch.cat([r.keep.reshape(COPIES, 4) for r in draws(advantages, 4, cfg, sample_ids=ids)]).double()
    assert ((keeps.mean(0)[1:] - 2 / 3).abs() < 4 * (2 / 9 / 2000) ** 0.5).all()


def test_group_ids_of_any_kind_agree():
    advantages = T([0.75, -0.25, -0.25, -0.25, 0.5, -0.5])
    cfg = PruningConfig(mode="fixed")
    a = stratify(advantages, T([0, 0, 0, 0, 1, 1]), cfg).low
    b = stratify(advantages, np.array(["x", "x", "x", "x", "y", "y"], dtype=object), cfg).low
    c = stratify(advantages, np.array([7, 7, 7, 7, 9, 9], dtype=np.int32), cfg).low
    assert a.tolist() == b.tolist() == c.tolist() == [False, True, True, True, False, False]


def test_scores_with_lengths_and_callables():
    advantages, lengths = T([1.0, -1.0, 1.0, -1.0]), T([100, 1, 100, 1])
    cfg = PruningConfig(score="abs_advantage_x_len")
    assert stratify(advantages, 4, cfg, lengths=lengths).low.tolist() == [False, True, False, True]
    by_sign = PruningConfig(score=lambda a, n: (a > 0).double())
    assert stratify(advantages, 4, by_sign).low.tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="needs lengths"):
        prune_completions(advantages, 4, cfg, generator=0)
    with pytest.raises(ValueError, match="finite number >= 0"):
        prune_completions(advantages, 4, PruningConfig(score=lambda a, n: a), generator=0)


def test_zero_length_completion_keeps_its_weight_and_has_no_tokens():
    result = prune_completions(
        T([0.75, -0.25, -0.25, -0.25]), 4, PruningConfig(completion_rate=0), generator=0, lengths=T([0, 5, 6, 7])
    )
    assert result.weight[0] == 1
    assert result.stats["tokens"] == result.stats["tokens_kept"] == 18
    nothing = prune_completions(T([0.5, -0.5]), 2, generator=0, lengths=T([0, 0]))
    assert nothing.stats["token_fraction"] == 1.0


def test_annealing_stops_pruning_but_not_free_zeros():
    advantages = T([0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])
    cfg = PruningConfig(completion_rate=0.95, anneal=0.875)
    late = prune_completions(advantages, 4, cfg, generator=0, progress=0.875)
    assert late.keep.tolist() == [True] * 4 + [False] * 4
    assert late.weight.tolist() == [1.0] * 4 + [0.0] * 4
    assert not all(prune_completions(advantages, 4, cfg, generator=s, progress=0.874).keep[:4].all() for s in range(10))


def test_water_filling_meets_budget_and_is_optimal_against_perturbations():
    rng = np.random.default_rng(0)
    score, cost = T(rng.exponential(size=40)), T(rng.uniform(1, 9, size=40))
    budget = 0.5 * float(cost.sum())
    pi = water_fill(score, cost, budget)
    assert float((cost * pi).sum()) == pytest.approx(budget, rel=1e-9)
    assert (pi <= 1).all()
    assert (pi >= 0.05).all()
    best = float((score**2 / pi).sum())
    for _ in range(200):
        other = (pi * T(rng.uniform(0.9, 1.1, size=40))).clamp(0.05, 1)
        other = other * min(1.0, budget / float((cost * other).sum()))
        if other.min() >= 0.05:
            assert float((score**2 / other).sum()) >= best * (1 - 1e-9)
    assert (water_fill(score, cost, 1e9) == 1).all()
    assert torch.allclose(water_fill(torch.zeros(4).double(), torch.ones(4).double(), 2.0), T(0.5).double())


def test_systematic_draw_hits_its_inclusion_probabilities_exactly():
    pi = T([0.3, 1.0, 0.55, 0.9, 0.05, 0.2])
    order = T([3, 0, 5, 1, 2, 4])
    starts = (torch.arange(2000) + 0.5) / 2000
    keeps = torch.stack([systematic(pi.double(), order, float(u)) for u in starts]).double()
    assert torch.allclose(keeps.mean(0), pi.double(), atol=1.01 / 2000)
    assert set(keeps.sum(1).tolist()) <= {math.floor(pi.sum()), math.ceil(pi.sum())}


def test_truncated_binomial_against_enumeration():
    cumulative = truncated_binomial(T([4, 2, 0]), T([2, 0, 0]), 0.3)
    mass = [math.comb(4, k) * 0.3**k * 0.7 ** (4 - k) for k in range(5)]
    total = sum(mass[2:])
    expected = sum(k * mass[k] for k in (2, 3, 4)) / total
    assert expected_count(cumulative).tolist() == pytest.approx([expected, 0.6, 0.0])


@pytest.mark.parametrize("rate", [-0.1, 0.951, 1.0, float("nan")])
@pytest.mark.parametrize("name", ["prompt_rate", "completion_rate"])
def test_rates_outside_the_support_condition(name, rate):
    with pytest.raises(ValueError, match="support condition"):
        PruningConfig(**{name: rate})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "random"}, "mode='random'"),
        ({"anneal": 0.0}, "anneal"),
        ({"threshold": "step"}, "threshold"),
        ({"score": "length"}, "score"),
        ({"min_keep_per_group": -1}, "min_keep_per_group"),
        ({"min_keep_per_group": 2, "mode": "systematic"}, "inclusion probabilities"),
        ({"min_keep_per_group": 2, "mode": "deterministic"}, "inclusion probabilities"),
        ({"budget": "time"}, "budget"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PruningConfig(**options)


def test_bad_batches():
    with pytest.raises(ValueError, match="advantage of sample 2 is nan"):
        prune_completions(T([0.0, 1.0, float("nan"), 1.0]), 2, generator=0)
    with pytest.raises(ValueError, match="sample 1 is inf"):
        prune_completions(T([0.0, float("inf")]), 2, generator=0)
    with pytest.raises(ValueError, match="group_size=3 does not divide the batch of 4"):
        prune_completions(torch.randn(4), 3, generator=0)
    with pytest.raises(ValueError, match="group ids have shape"):
        prune_completions(torch.randn(4), T([0, 0, 1]), generator=0)
    with pytest.raises(TypeError, match="floating point"):
        prune_completions(T([1, 0]), 2, generator=0)
    with pytest.raises(TypeError, match="integers or texts"):
        prune_completions(torch.randn(2), T([0.0, 1.0]), generator=0)
    with pytest.raises(ValueError, match="shape"):
        prune_completions(torch.randn(2, 2), 2, generator=0)
    with pytest.raises(ValueError, match="needs lengths"):
        prune_completions(torch.randn(4), 2, PruningConfig(mode="systematic", budget="tokens"), generator=0)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=30),
    rate=st.floats(0, 0.95),
    mode=st.sampled_from(UNBIASED),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_invariants(values, rate, mode, seed, data):
    advantages = torch.tensor(values)
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=len(values), max_size=len(values))))
    result = prune_completions(
        advantages, groups, PruningConfig(completion_rate=rate, mode=mode), generator=MaskGenerator(seed)
    )
    assert (result.keep == (result.weight > 0)).all()
    assert (result.free == (advantages == 0)).all()
    assert not (result.keep & result.free).any()
    assert (result.prob[~result.free] <= 0.95 + 1e-6).all()
    assert torch.isfinite(result.weight).all()
    if mode != "systematic":
        certain = (~result.free) & (result.prob == 0)
        assert result.keep[certain].all()
        for g in groups.unique():
            members = groups == g
            if not result.free[members].all():
                assert result.keep[members].any(), "the largest |A| of a group is never below its mean"
    if rate == 0 and mode != "systematic":
        assert (result.weight[~result.free] == 1).all()


def test_effective_sample_size():
    assert effective_sample_size(T([1.0, 1, 1, 0])) == pytest.approx(3)
    assert effective_sample_size(T([2.0, 1.0])) == pytest.approx(9 / 5)
    assert effective_sample_size(torch.zeros(3)) == 0


def test_ids_of_default_are_stable_numbers():
    """The mask of a run must be the same after an upgrade of the package: the values are pinned."""
    ids = combine(T([10, 10, 11]), occurrences(T([10, 10, 11])))
    assert MaskGenerator(0, 0).uniform(ids).tolist() == pytest.approx(PINNED, rel=1e-15)


PINNED = [0.23497536214143067, 0.05264590446697193, 0.12825110334773948]
