"""Unbiasedness by exact enumeration: golden values, every loss type, and the biased designs, in one harness."""

import math

import pytest
import torch

from dppo import PruningConfig, audit_unbiasedness
from dppo.audit import DynamicPruning, enumerate_weights
from dppo.baselines import Cppo, Greso, dapo_keep
from dppo.losses import LOSS_TYPES, Surrogate
from dppo.toy import ToyBatch

T = torch.tensor
ADVANTAGES = T([0.75, -0.25, -0.25, -0.25]).double()
SCORES = T([[3.0, -1], [1, 2], [-2, 1], [0, 5]]).double()
FULL = (5 / 8, -11 / 16)


def linear_loss(scores, advantages, normalizer):
    """Σ w A S·θ / Z, whose gradient in θ is Σ w A S / Z."""

    def loss(params, batch, weight):
        z = normalizer(weight) if callable(normalizer) else normalizer
        return (weight * advantages * (scores @ params[0])).sum() / z

    return loss


def audit(cfg, *, scores=SCORES, advantages=ADVANTAGES, z=4, groups=4, **more):
    theta = torch.zeros(scores.shape[1]).double().requires_grad_()
    batch = {"advantages": advantages, "groups": groups, **more}
    return audit_unbiasedness(linear_loss(scores, advantages, z), [theta], batch, cfg)


@pytest.mark.parametrize(
    ("cfg", "variance"),
    [
        (PruningConfig(completion_rate=0.5), (0.01953125, 0.1171875)),
        (PruningConfig(completion_rate=0.9), (0.17578125, 1.0546875)),
        (PruningConfig(completion_rate=0.5, mode="fixed"), (0.013671875, 0.025390625)),
    ],
)
def test_golden_1_unbiased_designs(cfg, variance):
    report = audit(cfg)
    assert report.full.tolist() == pytest.approx(FULL, abs=1e-15)
    assert report.mean.tolist() == pytest.approx(FULL, abs=1e-14)
    assert report.variance.tolist() == pytest.approx(variance, abs=1e-14)
    assert report.unbiased
    assert report.exact
    assert report.additive
    assert report.bias < 1e-14


def test_golden_1_dividing_by_the_number_kept_is_wrong():
    report = audit(PruningConfig(completion_rate=0.5), z=lambda weight: (weight > 0).sum())
    assert report.mean.tolist() == pytest.approx((1.14323, -1.05990), abs=5e-6)
    assert not report.unbiased
    assert not report.additive


def test_golden_1_fixed_with_the_nominal_weight_is_wrong():
    """One of three removed has weight 3/2, not 1/(1−r) = 2."""
    means = []
    for gone in (1, 2, 3):
        weight = T([1.0, 2, 2, 2]).double()
        weight[gone] = 0
        means.append((weight * ADVANTAGES) @ SCORES / 4)
    assert torch.stack(means).mean(0).tolist() == pytest.approx((31 / 48, -41 / 48))


def test_golden_1_deterministic_is_biased():
    report = audit(PruningConfig(completion_rate=0.5, mode="deterministic"))
    assert report.mean.tolist() == pytest.approx((0.8125, -0.9375))
    assert report.masks == 1
    assert not report.unbiased


def test_golden_2_two_levels():
    advantages = T([0.5, -0.5, 0.75, -0.25, -0.25, -0.25]).double()
    scores = T([[4.0], [1], [2], [-3], [5], [1]]).double() / T([2.0, 2, 4, 4, 4, 4]).double()[:, None]
    report = audit(
        PruningConfig(prompt_rate=0.5, completion_rate=0.5), scores=scores, advantages=advantages, z=2,
        groups=T([0, 0, 1, 1, 1, 1]), prompt_low=[True, False],
    )  # fmt: skip
    assert report.full.item() == pytest.approx(15 / 32)
    assert report.mean.item() == pytest.approx(15 / 32)
    assert report.variance.item() == pytest.approx(0.1748046875)
    assert report.completions_kept * 6 == pytest.approx(3.5)
    assert report.rollouts_kept * 6 == pytest.approx(5)
    assert report.unbiased
    assert report.masks == 16


REWARDS = T([[1.0, 0, 0, 0, 0], [1, 1, 0, 1, 1]]).double()
CONFIGS = {
    "bernoulli": PruningConfig(completion_rate=0.6),
    "bernoulli, minimum 3": PruningConfig(completion_rate=0.6, min_keep_per_group=3),
    "fixed": PruningConfig(completion_rate=0.6, prompt_rate=0.5, mode="fixed"),
    "systematic": PruningConfig(completion_rate=0.6, mode="systematic"),
    "systematic tokens": PruningConfig(completion_rate=0.6, mode="systematic", budget="tokens"),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_has_the_full_gradient(loss_type, level):
    """Claims 1 and 7: clipped, off-policy, with KL, two levels of pruning, all masks."""
    toy = ToyBatch(REWARDS)
    surrogate = Surrogate(loss_type, level, beta=0.1, delta=1.5, max_length=7, epsilon_high=0.28)
    ratio = (toy.logps(toy.params) - toy.old).exp()
    assert ((ratio < 0.8) | (ratio > 1.28)).any(), "the clip is at work"
    for name, cfg in CONFIGS.items():
        prompts = {"prompt_low": [True, False]} if name in ("bernoulli", "bernoulli, minimum 3") else {}
        if name == "fixed":
            prompts = {"prompt_low": [True, True]}
        report = audit_unbiasedness(toy.loss_fn(surrogate), toy.params, toy.batch(**prompts), cfg)
        assert report.exact, name
        assert report.bias <= 1e-12 * float(report.full.norm()), name
        assert report.variance.sum() > 0, name
        assert report.unbiased, name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_biased_variants_show_their_bias_in_the_same_harness(loss_type):
    toy = ToyBatch(REWARDS)
    surrogate = Surrogate(loss_type, max_length=7)
    greso = Greso()
    for _ in range(2):
        greso.update([0, 1], [0.0, 0.5])
    designs = {
        "deterministic": PruningConfig(mode="deterministic"),
        "cppo": Cppo(0.5),
        "greso": greso,
    }
    for name, design in designs.items():
        batch = toy.batch(prompt_ids=[0, 1])
        report = audit_unbiasedness(toy.loss_fn(surrogate), toy.params, batch, design)
        assert report.relative_bias > 0.01, name
        assert not report.unbiased, name
    kept = toy.loss_fn(surrogate, normalizer="kept")
    if loss_type != "bnpo":
        report = audit_unbiasedness(kept, toy.params, toy.batch(), PruningConfig())
        assert not report.unbiased, "renormalising by what is kept"
        assert report.relative_bias > 0.01


def test_single_precision_enumeration():
    toy = ToyBatch(REWARDS, dtype=torch.float32)
    report = audit_unbiasedness(toy.loss_fn(Surrogate()), toy.params, toy.batch(), PruningConfig())
    assert report.bias <= 1e-6 * float(report.full.norm())


def test_free_zeros_are_exact_without_kl_and_wrong_with_it():
    rewards = T([[1.0, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).double()
    toy = ToyBatch(rewards)
    plain = audit_unbiasedness(toy.loss_fn(Surrogate()), toy.params, toy.batch(), PruningConfig())
    assert plain.unbiased
    with_kl = toy.loss_fn(Surrogate(beta=0.1))
    wrong = audit_unbiasedness(with_kl, toy.params, toy.batch(), PruningConfig())
    assert not wrong.unbiased, "a dead group has a KL gradient"
    right = audit_unbiasedness(with_kl, toy.params, toy.batch(), PruningConfig(free_zeros=False))
    assert right.unbiased


def test_sampling_finds_bias_and_its_absence():
    toy = ToyBatch(torch.rand(8, 6, generator=torch.Generator().manual_seed(1)).double().round(decimals=1))
    loss = toy.loss_fn(Surrogate())
    with pytest.raises(ValueError, match=r"too many to enumerate .at most 65536.; give n=10_000"):
        audit_unbiasedness(loss, toy.params, toy.batch(), PruningConfig())
    good = audit_unbiasedness(loss, toy.params, toy.batch(), PruningConfig(), n=4000, generator=1)
    assert good.unbiased
    assert not good.exact
    assert good.standard_error > 0
    bad = audit_unbiasedness(loss, toy.params, toy.batch(), Cppo(0.5), n=100)
    assert not bad.unbiased
    assert 1 < good.variance_inflation < 3
    assert 0.5 < good.tokens_kept < 1


def test_bernoulli_variance_formula():
    """Var = (1/Z²) Σ_low P/(1−P) ‖ℓ'‖²."""
    for rate in (0.5, 0.7, 0.9):
        low = (ADVANTAGES[1:, None] * SCORES[1:]).square().sum(0) / 16
        report = audit(PruningConfig(completion_rate=rate))
        assert torch.allclose(report.variance, rate / (1 - rate) * low)


def test_optimal_inclusion_has_less_variance_than_the_mean_threshold_rule_at_equal_budget():
    rng = torch.Generator().manual_seed(0)
    advantages = torch.randn(12, generator=rng).double()
    scores = torch.eye(12).double()
    rule = audit(PruningConfig(completion_rate=0.5), scores=scores, advantages=advantages, z=12, groups=6)
    rate = 1 - rule.completions_kept
    best = audit(
        PruningConfig(completion_rate=rate, mode="systematic"), scores=scores, advantages=advantages, z=12, groups=6
    )
    assert best.unbiased
    assert best.completions_kept == pytest.approx(rule.completions_kept, abs=1e-9)
    assert best.variance.sum() < rule.variance.sum()


def test_enumeration_is_a_distribution():
    toy = ToyBatch(REWARDS)
    for name, cfg in CONFIGS.items():
        probability, weight = enumerate_weights(DynamicPruning(cfg).components(toy.batch()), 10)
        assert float(probability.sum()) == pytest.approx(1, abs=1e-14), name
        assert (probability @ weight).tolist() == pytest.approx([1.0] * 10, abs=1e-13), name


def test_all_pruned_by_chance_is_a_zero_gradient_not_a_division_by_zero():
    toy = ToyBatch(REWARDS)
    for loss_type in LOSS_TYPES:
        surrogate = Surrogate(loss_type, max_length=7)
        loss = toy.loss_fn(surrogate)(toy.params, {}, torch.zeros(10).double())
        assert loss.item() == 0
        grads = torch.autograd.grad(loss, toy.params)
        assert all((g == 0).all() for g in grads)


def test_audit_bad_input():
    theta = torch.zeros(2).double()
    batch = {"advantages": ADVANTAGES, "groups": 4}
    loss = linear_loss(SCORES, ADVANTAGES, 4)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        audit_unbiasedness(loss, [theta], batch, PruningConfig())
    with pytest.raises(ValueError, match="n=1"):
        audit_unbiasedness(loss, [theta.requires_grad_()], batch, PruningConfig(), n=1)


def test_cppo_keeps_the_largest_and_allocates():
    cppo = Cppo(0.5, allocation=True)
    assert cppo.keep(T([0.1, -3.0, 2.0, 0.5, 0.0])).tolist() == [False, True, True, True, False]
    assert cppo.prune(T([0.1, -3.0])).weight.tolist() == [0.0, 1.0]
    assert cppo.prompts_per_batch(8) == 16
    assert Cppo(0.75, allocation=False).prompts_per_batch(8) == 8


def test_greso_streaks_and_adaptation():
    greso = Greso()
    greso.update([1, 2, 3], [1.0, 0.05, 0.5])
    assert greso.skip_probability([1, 2, 3, 4]).tolist() == pytest.approx([1 - 0.49, 1 - 0.49, 0, 0])
    greso.update([1, 2, 3], [1.0, 0.5, 0.5])
    assert greso.p_easy == pytest.approx(0.48)
    assert greso.p_hard == pytest.approx(0.50)
    assert greso.skip_probability([1, 2]).tolist() == pytest.approx([1 - 0.48**2, 0])
    for _ in range(20):
        greso.update([1], [1.0])
    assert greso.skip_probability([1]).item() == pytest.approx(0.99), "the floor"
    for _ in range(100):
        greso.update([1, 5], [1.0, 0.5])
    assert greso.p_easy == 0.05
    assert greso.p_hard == 0.95


def test_dapo_dynamic_sampling():
    assert dapo_keep(T([1.0, 1, 0, 0, 1, 0]), 2).tolist() == [False] * 4 + [True] * 2
    with pytest.raises(ValueError, match="divide"):
        dapo_keep(T([1.0, 1, 0]), 2)


def test_variance_grows_with_the_rate_as_stated():
    assert math.isclose(0.9 / 0.1, 9, rel_tol=1e-9)
    one = audit(PruningConfig(completion_rate=0.5)).variance.sum()
    nine = audit(PruningConfig(completion_rate=0.9)).variance.sum()
    assert nine / one == pytest.approx(9)
