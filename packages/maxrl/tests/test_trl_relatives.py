"""Sequence ratios inside the real TRL, the mixin over RLOO's trainer, and `patch`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import trl_setup
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_setup import gradient, logged, passed, scored_batch, watch, weights

from maxrl import maxrl_advantages
from maxrl.integrations.trl import MaxRLArguments, MaxRLMixin, patch
from maxrl.off_policy import off_policy_advantages


@pytest.fixture(scope="module")
def one_trainer(tmp_path_factory):
    return trl_setup.trainer(tmp_path_factory.mktemp("drop"), rollout=trl_setup.scripted_rollout)


def test_sequence_ratio_replaces_token_clipping(one_trainer):
    trainer = one_trainer
    batch = scored_batch(trainer)
    trainer.loss_type = trainer.args.loss_type = "dr_grpo"
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    batch["old_per_token_logps"] = now.detach() - 0.3
    trainer.args.off_policy = "behaviour"
    try:
        _, got = gradient(trainer, batch)
    finally:
        trainer.args.off_policy = None
    trainer.model.zero_grad()
    now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    tokens = batch["completion_mask"]
    rho = torch.exp(0.3 * tokens.sum(1))
    want = -(rho * batch["advantages"] * (now * tokens).sum(1)).sum() / (8 * trainer.max_completion_length)
    want.backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_self_normalised_ratios_over_micro_batches(tmp_path):
    """A group is spread over the micro-batches; its normaliser is that of the current weights, in every one of them."""
    trainer = trl_setup.trainer(
        tmp_path,
        reward=passed,
        rollout=trl_setup.scripted_rollout,
        off_policy="self_normalised",
        loss_type="dr_grpo",
        per_device_train_batch_size=4,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        num_iterations=2,
    )
    rows = [row for row in trl_setup.dataset(2) for _ in range(4)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(rows)
    rewards = torch.tensor(passed(["x"] * 8))
    assert batch["advantages"].tolist() == maxrl_advantages(rewards, group_size=4, estimator="conditional").tolist()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width, tokens = batch["completion_ids"].shape[1], batch["completion_mask"]

    def log_probs():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]

    generator = torch.Generator().manual_seed(0)
    batch["old_per_token_logps"] = log_probs().detach() - 0.3 * torch.randn(tokens.shape, generator=generator)
    halves = [torch.tensor([0, 2, 5, 7]), torch.tensor([1, 3, 4, 6])]
    trainer._buffered_inputs = [
        {k: v[rows] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in batch.items()} for rows in halves
    ]
    trainer.current_gradient_accumulation_steps = 2
    for _ in range(2):  # again with other weights
        trainer.model.zero_grad()
        for half in trainer._buffered_inputs:
            trainer._compute_loss(trainer.model, half).backward()
        got = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
        now = log_probs()
        log_ratio = ((now.detach() - batch["old_per_token_logps"]) * tokens).sum(1)
        a = off_policy_advantages(rewards, log_ratio, mode="self_normalised", group_size=4)
        want = -(a * (now * tokens).sum(1)).sum() / (8 * trainer.max_completion_length)
        want.backward()
        expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        assert (got - expected).norm() / expected.norm() < 1e-5
        with torch.no_grad():
            for p in trainer.model.parameters():
                p += 0.02 * p.grad
        trainer.state.global_step += 1


def test_self_normalised_needs_no_other_estimator_and_trains(tmp_path):
    trainer = trl_setup.trainer(
        tmp_path, rollout=trl_setup.scripted_rollout, off_policy="self_normalised", num_iterations=2, max_steps=4
    )
    before = weights(trainer)
    trainer.train()
    assert (weights(trainer) - before).norm() > 1e-3
    assert logged(trainer, "maxrl/effective_order") == [4, 4]  # two generations, two updates each


@dataclass
class RLOOWithMaxRL(MaxRLArguments, RLOOConfig):
    pass


class MaxRLOverRLOO(MaxRLMixin, RLOOTrainer):
    pass


def test_mixin_over_rloo(tmp_path):
    torch.manual_seed(0)
    args = trl_setup.config(tmp_path, kind=RLOOWithMaxRL, beta=0.0, max_steps=2)
    trainer = MaxRLOverRLOO(
        model=trl_setup.model(),
        reward_funcs=trl_setup.digit_reward,
        args=args,
        train_dataset=trl_setup.dataset(),
        processing_class=trl_setup.tokenizer(),
    )
    scored, _ = watch(trainer)
    trainer.train()
    rewards = torch.tensor(list(trainer._logs["rewards"]["digit_reward"]))
    assert torch.equal(scored[-1][1]["advantages"], maxrl_advantages(rewards, group_size=4))
    batch = scored[0][1]
    trainer.model.train()
    batch["advantages"][:5] = 0
    trainer._drops_rows = False
    whole, expected = gradient(trainer, batch)
    trainer._drops_rows = True
    loss, got = gradient(trainer, batch)
    assert (got - expected).norm() <= 1e-6 * expected.norm()
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="adds the KL term to the reward"):
        MaxRLOverRLOO(
            model=trl_setup.model(),
            reward_funcs=trl_setup.digit_reward,
            args=trl_setup.config(tmp_path, kind=RLOOWithMaxRL, beta=0.1),
            train_dataset=trl_setup.dataset(),
            processing_class=trl_setup.tokenizer(),
        )


def test_patch_an_existing_trainer(tmp_path):
    torch.manual_seed(0)
    plain = GRPOTrainer(
        model=trl_setup.model(),
        reward_funcs=trl_setup.digit_reward,
        args=trl_setup.config(tmp_path, kind=GRPOConfig, max_steps=1),
        train_dataset=trl_setup.dataset(),
        processing_class=trl_setup.tokenizer(),
        rollout_func=trl_setup.scripted_rollout,
    )
    with pytest.raises(ValueError, match=r"unknown settings \['temperature'\]"):
        patch(plain, temperature=1.0)
    with pytest.raises(ValueError, match="unknown estimator"):
        patch(plain, estimator="magic")
    assert type(plain) is GRPOTrainer
    patched = patch(plain, estimator="conditional")
    assert patched is plain
    assert isinstance(patched, GRPOTrainer)
    patched.train()
    rewards = torch.tensor(list(patched._logs["rewards"]["digit_reward"]))
    want = maxrl_advantages(rewards, group_size=4, estimator="conditional")
    assert list(patched._logs["advantages"]) == want.tolist()
    with pytest.raises(TypeError, match="no GRPO-like trainer"):
        patch(object())
