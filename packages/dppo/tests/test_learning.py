"""The small tasks and the training harness."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from dppo.demo_tasks import Addition, Digits
from dppo.learning import METHODS, Curve, PromptSource, Recipe, grpo_advantages, train

T = torch.tensor


@pytest.fixture(scope="module")
def digits():
    task = Digits(n_prompts=600, n_test=200)
    return task, task.policy(0)


def test_advantages_by_hand():
    a = grpo_advantages(T([[1.0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]))
    assert a[0].tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert a[1].tolist() == [0, 0, 0, 0]
    assert a[2].tolist() == [1, 1, -1, -1]


def test_digits_are_disjoint_and_rewarded_by_label(digits):
    task, policy = digits
    train_images = {tuple(row) for row in task.inputs[:, :64].tolist()}
    assert not train_images & {tuple(row) for row in task.test_inputs[:, :64].tolist()}
    answers = task.labels[:3, None, None].expand(3, 2, 1).clone()
    answers[1, 1] = (answers[1, 1] + 1) % 100
    assert task.rewards(torch.arange(3), answers).tolist() == [[1, 1], [1, 0], [1, 1]]
    logps = task.logps(policy, T([5, 2, 5]), T([[1], [2], [3]]))
    expected = policy(task.inputs[[5, 2, 5]]).log_softmax(-1).gather(1, T([[1], [2], [3]]))
    torch.testing.assert_close(logps, expected)


def test_addition_answers_and_exact_probability():
    task = Addition(n_prompts=50, n_test=20, warm_up=2)
    for prompt, answer in zip(task.inputs.tolist(), task.answers.tolist(), strict=True):
        assert prompt[0] == task.BOS
        a, b = 10 * prompt[1] + prompt[2], 10 * prompt[4] + prompt[5]
        assert a + b == 100 * answer[0] + 10 * answer[1] + answer[2]
    assert not {tuple(p) for p in task.inputs.tolist()} & {tuple(p) for p in task.test_inputs.tolist()}
    policy = task.policy(0)
    rows, tokens = T([4, 1, 4, 0, 4]), torch.randint(10, (5, 3), generator=torch.Generator().manual_seed(0))
    logits = policy(torch.cat([task.inputs[rows], tokens], 1))[:, 6:9]
    plain = logits.log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
    shared = task.logps(policy, rows, tokens)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x.sum(), policy.parameters()) for x in (shared, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    prompts = torch.arange(2)
    answers = task.sample(policy, prompts, 4000, torch.Generator().manual_seed(0))
    right = task.rewards(prompts, answers).mean(1)
    exact = task.logps(policy, prompts, task.answers[:2]).sum(1).exp()
    assert ((right - exact).abs() <= 4 * (exact * (1 - exact) / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_counts(digits, method):
    task, policy = digits
    recipe = Recipe(method, steps=20, prompts=32, samples=8, optimizer="sgd", lr=0.1, clip=None, evaluate_every=10)
    if method == "deterministic":
        with pytest.warns(UserWarning, match="biased"):
            curve = train(task, recipe, 0, copy.deepcopy(policy))
    else:
        curve = train(task, recipe, 0, copy.deepcopy(policy))
    assert curve.step == [0, 10, 20]
    assert curve.accuracy[-1] > curve.accuracy[0]
    assert curve.generated[-1] == 20 * 32 * 8
    if method in ("grpo", "greso"):
        assert curve.updated == curve.generated
    else:
        assert 0 < curve.updated[-1] < curve.generated[-1]
    assert curve.full_generated[-1] >= curve.generated[-1]
    assert 0 < curve.nonzero[-1] < curve.generated[-1]
    assert (curve.cost_without_zeros() <= np.array(curve.generated) * 4).all()
    if method == "dppo":  # what it updates is part of what is not zero
        assert curve.updated[-1] < curve.nonzero[-1]


def test_same_seed_same_run_and_prompts_are_skipped_later(digits):
    task, policy = digits
    recipe = Recipe("dppo", steps=60, prompts=32, samples=8, optimizer="sgd", lr=0.1, clip=None, evaluate_every=60)
    first, second = (train(task, recipe, 3, copy.deepcopy(policy)) for _ in range(2))
    assert first.accuracy == second.accuracy
    assert first.updated == second.updated
    assert first.full_generated[-1] > first.generated[-1]


def test_source_covers_each_epoch_once():
    source = PromptSource(64, Recipe("grpo", 0, 0, prompts=16), 0)
    for _ in range(3):
        seen = torch.cat([source.next()[0] for _ in range(4)])
        assert sorted(seen.tolist()) == list(range(64))


def test_curve_interpolates():
    curve = Curve([0, 1, 2], [0.0, 0.3, 0.6], [0, 10, 20], [0, 0, 10], [0, 10, 20], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
    assert curve.cost().tolist() == [0, 10, 50]
    assert curve.smooth().tolist() == pytest.approx([0, 0.15, 0.3])
    assert curve.to_reach(0.225, curve.cost()) == pytest.approx(30)
    assert curve.to_reach(0.0, curve.cost()) == 0
    assert curve.to_reach(0.9, curve.cost()) == float("inf")
    assert curve.at_cost(5) == pytest.approx(0.075)
    assert curve.at_cost(1e9) == pytest.approx(0.3)


def test_recipe_of_unknown_method():
    with pytest.raises(ValueError, match="method='ppo'"):
        Recipe("ppo")


def test_variance_ratio_of_rate_zero_is_one():
    from dppo.claims_variance import gradient_variance

    found = gradient_variance((0.0, 0.5), 0, batches=20, warm_up=30)
    assert found["0"]["variance_ratio"] == pytest.approx(1, abs=1e-9)
    assert found["0"]["ess_share"] == pytest.approx(1)
    assert found["0.5"]["ess_share"] < 1
    assert np.isfinite(found["0.5"]["variance_ratio"])
