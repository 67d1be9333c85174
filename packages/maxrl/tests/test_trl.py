"""`MaxRLTrainer` inside the real TRL, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import trl_setup
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl_setup import gradient, logged, passed, scored_batch, watch, weights

from maxrl import MaxRLConfig, MaxRLTrainer, maxrl_advantages


def test_advantages_logged_are_the_ones_used(tmp_path):
    trainer = trl_setup.trainer(tmp_path)
    scored, losses = watch(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    for (training, batch), used in zip(scored, losses, strict=True):
        assert training
        assert torch.equal(batch["advantages"].sort().values, used["advantages"].sort().values)
    last = scored[-1][1]["advantages"]
    assert list(trainer._logs["advantages"]) == last.tolist()
    rewards = torch.tensor(list(trainer._logs["rewards"]["digit_reward"]))
    assert torch.equal(last, maxrl_advantages(rewards, group_size=4))
    assert logged(trainer, "maxrl/effective_order") == [3, 3, 3]
    assert logged(trainer, "maxrl/max_advantage")[-1] == float(last.max())
    assert any(batch["advantages"].any() for _, batch in scored)


def test_group_sizes_of_training_and_evaluation_differ(tmp_path):
    changes = {"num_generations_eval": 2, "per_device_eval_batch_size": 16, "eval_strategy": "steps", "max_steps": 1}
    trainer = trl_setup.trainer(
        tmp_path, evaluation=trl_setup.dataset(8), rollout=trl_setup.scripted_rollout, **changes
    )
    scored, _ = watch(trainer)
    trainer.evaluate()
    (training, batch), rewards = scored[-1], torch.tensor(list(trainer._logs["rewards"]["digit_reward"]))
    assert not training
    # The log keeps one generation batch (8 rows), fewer than the 16 of an evaluation batch.
    assert torch.equal(batch["advantages"][-8:], maxrl_advantages(rewards, group_size=2))
    assert list(trainer._logs["advantages"]) == batch["advantages"][-8:].tolist()
    assert batch["advantages"].any()
    assert logged(trainer, "eval_maxrl/effective_order") == [1]
    trainer.train()
    assert scored[-2][0] or scored[-1][0]
    assert logged(trainer, "maxrl/effective_order") == [3]


def test_evaluation_with_one_generation_has_no_advantage(tmp_path):
    changes = {"num_generations_eval": 1, "per_device_eval_batch_size": 8, "eval_strategy": "steps"}
    trainer = trl_setup.trainer(
        tmp_path, evaluation=trl_setup.dataset(8), rollout=trl_setup.scripted_rollout, **changes
    )
    scored, _ = watch(trainer)
    trainer.evaluate()
    assert not scored[-1][1]["advantages"].any()


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_gradient_accumulation_makes_the_same_step(tmp_path, loss_type):
    common = {"rollout": trl_setup.scripted_rollout, "max_steps": 1, "optim": "sgd", "loss_type": loss_type}
    whole = trl_setup.trainer(tmp_path / "a", **common)
    before = weights(whole)
    whole.train()
    parts = trl_setup.trainer(tmp_path / "b", per_device_train_batch_size=2, gradient_accumulation_steps=4, **common)
    parts.train()
    moved = (weights(whole) - before).norm()
    assert moved > 1e-3
    assert (weights(parts) - weights(whole)).norm() / moved < 1e-5


@pytest.mark.slow  # three more processes, each with its own TRL
def test_two_processes_agree_with_one(tmp_path):
    script = Path(__file__).parent / "trl_two_processes.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, *pair = (torch.load(tmp_path / f"result-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone["used"].any()
    assert torch.equal(torch.cat([part["used"] for part in pair], dim=1), alone["used"])
    for part in pair:
        assert torch.equal(part["logged"], alone["logged"])
        torch.testing.assert_close(part["weights"], alone["weights"], rtol=0, atol=1e-5)
    assert torch.equal(pair[0]["weights"], pair[1]["weights"])
    assert alone["dropped"].sum() > 0


# -- leaving out rollouts with advantage 0
# ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_trainer(tmp_path_factory):
    return trl_setup.trainer(tmp_path_factory.mktemp("drop"), rollout=trl_setup.scripted_rollout)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "grpo", "bnpo", "luspo", "cispo", "sapo", "vespo"])
def test_dropping_keeps_loss_and_gradient(one_trainer, loss_type):
    trainer = one_trainer
    batch = scored_batch(trainer)
    trainer.loss_type = trainer.args.loss_type = loss_type
    # A slightly stale policy, so that ratios differ from 1.
    batch["old_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].shape[1],
    )[0].detach() - 0.05 * torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(0))
    trainer._drops_rows = False
    whole, expected = gradient(trainer, batch)
    trainer._drops_rows = True
    trainer._metrics["train"].clear()
    loss, got = gradient(trainer, batch)
    assert expected.norm() > 1e-2
    assert (got - expected).norm() / expected.norm() < 1e-6
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
    dead = batch["completion_mask"][[0, 1, 2, 3, 6]].sum()
    assert trainer._metrics["train"]["maxrl/dropped_tokens"] == [float(dead)]


def test_all_rollouts_dead_is_a_step_of_zero(tmp_path):
    trainer = trl_setup.trainer(tmp_path, reward=lambda completions, **_: [0.0] * len(completions), max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert torch.equal(weights(trainer), before)
    assert logged(trainer, "loss") == [0, 0]
    assert logged(trainer, "grad_norm") == [0, 0]
    assert logged(trainer, "maxrl/frac_groups_no_success") == [1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"beta": 0.1}, "the KL term"),
        ({"entropy_coef": 0.01}, "the entropy bonus"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
    ],
)
def test_dropping_is_off_where_dead_rollouts_have_a_gradient(tmp_path, changes, reason):
    trl_setup.model().save_pretrained(tmp_path / "policy")  # the KL term loads its reference from the policy's folder
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with pytest.warns(UserWarning, match=f"drop_zero_advantage is off: {reason}"):
        trainer = trl_setup.trainer(tmp_path, policy=policy, rollout=trl_setup.scripted_rollout, max_steps=1, **changes)
    assert not trainer._drops_rows
    trainer.train()
    assert logged(trainer, "maxrl/dropped_tokens") == []


def test_dropping_is_off_for_a_mixture_of_experts(tmp_path):
    from icml26_shared.tiny_models import tiny

    experts = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    }
    policy = tiny("mixtral", vocab_size=16, **experts)
    with pytest.warns(UserWarning, match="load-balancing loss"):
        trainer = trl_setup.trainer(tmp_path, policy=policy)
    assert not trainer._drops_rows


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Three updates of two micro-steps on each generation, two passes: checkpoints fall inside a window.
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 6,
            "num_iterations": 2,
        },
    ],
)
def test_resuming_makes_the_same_next_step(tmp_path, changes):
    common = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, **changes}
    straight = trl_setup.trainer(tmp_path / "run", **common)
    straight.train()
    for step in (3, 5):
        resumed = trl_setup.trainer(tmp_path / "run", **common)
        scored, _ = watch(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert resumed.state.global_step == 8
        assert torch.equal(weights(resumed), weights(straight))
        assert logged(resumed, "maxrl/max_advantage") == logged(straight, "maxrl/max_advantage")
        if not changes:
            assert len(scored) == 8 - step


def test_changed_window_cannot_resume(tmp_path):
    trl_setup.trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    changed = trl_setup.trainer(tmp_path, max_steps=2, num_iterations=2)
    with pytest.raises(ValueError, match=r"made with 1 updates per generation and the run has 2"):
        changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_unscorable_rollouts_are_invalid(tmp_path):
    def reward(completions, **_):
        return [None if i % 4 == 1 else float(i % 4 == 0) for i in range(len(completions))]

    trainer = trl_setup.trainer(tmp_path, reward=reward, rollout=trl_setup.scripted_rollout, max_unscorable=3)
    rows = [row for row in trl_setup.dataset(2) for _ in range(4)]
    trainer.model.train()
    assert trainer._generate_and_score_completions(rows)["advantages"].tolist() == [2, 0, -1, -1] * 2
    with pytest.raises(RuntimeError, match="4 rollouts could not be scored, more than max_unscorable = 3"):
        trainer._generate_and_score_completions(rows)


def style(completions, **_):
    return [-1.0 if i % 4 == 0 else 1.0 for i in range(len(completions))]


def test_named_success_and_auxiliary_rewards(tmp_path):
    trainer = trl_setup.trainer(
        tmp_path,
        reward=[passed, style],
        rollout=trl_setup.scripted_rollout,
        success_reward="passed",
        aux_weight=0.5,
        reward_weights=[1.0, 3.0],
    )
    rows = [row for row in trl_setup.dataset(2) for _ in range(4)]
    got = trainer._generate_and_score_completions(rows)["advantages"]
    aux = torch.tensor([-3.0, 3, 3, 3])
    loo = (aux - aux.mean()) * 4 / 3
    torch.testing.assert_close(got, (torch.tensor([-1.0, 1, -1, 1]) + 0.5 * loo).repeat(2))


def test_product_of_rewards_is_the_success(tmp_path):
    def second(completions, **_):
        return [float(i % 4 > 1) for i in range(len(completions))]

    trainer = trl_setup.trainer(tmp_path, reward=[passed, second], rollout=trl_setup.scripted_rollout)
    rows = [row for row in trl_setup.dataset(2) for _ in range(4)]
    assert trainer._generate_and_score_completions(rows)["advantages"].tolist() == [-1, -1, -1, 3] * 2

    def two(completions, **_):
        return [2.0] * len(completions)

    def half(completions, **_):
        return [0.5] * len(completions)

    trainer = trl_setup.trainer(tmp_path, reward=[two, half], rollout=trl_setup.scripted_rollout)
    with pytest.raises(ValueError, match=r"reward 2\.0 at row 0 is neither 0 nor 1"):
        trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_rewards": "batch"}, r"scale_rewards = 'batch' would be ignored"),
        ({"scale_rewards": False}, r"scale_rewards = 'none' would be ignored"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "would be ignored"),
        ({"estimator": "magic"}, "unknown estimator 'magic'"),
        ({"estimator": "loo", "order": 5}, "order = 5 with num_generations = 4"),
        ({"order": 2}, "fixed order"),
        ({"reward_mode": "real"}, "reward_mode = 'real'"),
        ({"aux_weight": 0.1}, "name success_reward"),
        ({"off_policy": "self_normalised", "estimator": "loo"}, "would ignore estimator = 'loo'"),
        (
            {"off_policy": "self_normalised", "aux_weight": 0.1, "success_reward": "passed"},
            "cannot be mixed with aux_weight",
        ),
        ({"off_policy": "replay"}, "choose None, 'behaviour' or 'self_normalised'"),
    ],
)
def test_bad_settings(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trl_setup.config(tmp_path, **changes)


def test_bad_reward_functions(tmp_path):
    with pytest.raises(
        ValueError, match=r"success_reward = 'pass' must name one reward function; there are: passed, style"
    ):
        trl_setup.trainer(tmp_path, reward=[passed, style], success_reward="pass")
    with pytest.raises(ValueError, match="reward_weights would be ignored"):
        trl_setup.trainer(tmp_path, reward=[passed, style], reward_weights=[1.0, 0.5])
    with pytest.warns(UserWarning, match="only logged: style"):
        trl_setup.trainer(tmp_path, reward=[passed, style], success_reward="passed")


def test_plain_config_is_accepted(tmp_path):
    args = trl_setup.config(tmp_path, kind=GRPOConfig)
    trainer = MaxRLTrainer(
        model=trl_setup.model(),
        reward_funcs=passed,
        args=args,
        train_dataset=trl_setup.dataset(),
        processing_class=trl_setup.tokenizer(),
    )
    assert trainer.args.estimator == "maxrl"
    assert isinstance(MaxRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), GRPOConfig)
