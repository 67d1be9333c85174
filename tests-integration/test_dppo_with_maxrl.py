"""dppo's mixin in front of maxrl's trainer: MaxRL advantages, pruned without bias, in one real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("maxrl")
pytest.importorskip("dppo")

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "dppo" / "tests"))


import dppo_trl as small

from dppo.audit import DynamicPruning, enumerate_weights
from dppo.integrations import trl as dppo_plugin
from dppo.integrations.trl import DynamicPruningConfig, DynamicPruningMixin
from dppo.pruning import PruneResult
from maxrl import maxrl_advantages
from maxrl.integrations.trl import MaxRLConfig, MaxRLTrainer


class Config(DynamicPruningConfig, MaxRLConfig):
    """Both sets of options."""


class Trainer(DynamicPruningMixin, MaxRLTrainer):
    """Both trainers."""


def test_neither_package_imports_the_other():
    for name, other in (("dppo", "maxrl"), ("maxrl", "dppo")):
        source = Path(sys.modules[name].__file__).parent
        for path in source.rglob("*.py"):
            text = path.read_text("utf-8")
            assert f"import {other}" not in text, path
            assert f"from {other}" not in text, path


def test_training_prunes_maxrl_advantages(tmp_path):
    trainer = small.trainer(Trainer, small.config(Config, tmp_path, max_steps=8, per_device_train_batch_size=16))
    seen = []
    original = trainer._gather_batch

    def spy(batch, draws):
        shared = original(batch, draws)
        seen.append(shared["advantages"])
        return shared

    trainer._gather_batch = spy
    trainer.train()
    log = [row for row in trainer.state.log_history if "dppo/ess" in row]
    assert len(log) == 8
    assert any(name.startswith("maxrl/") for name in log[0])
    for row, advantages in zip(log, seen, strict=True):
        rewards = (advantages > 0).float()  # MaxRL is positive exactly for the successes of a live group
        expected = maxrl_advantages(rewards, group_size=small.GENERATIONS)
        torch.testing.assert_close(advantages.float(), expected, rtol=1e-5, atol=1e-6)
        assert row["dppo/completions_kept"] <= float((advantages != 0).float().mean()) + 1e-6, "dead groups are free"
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_lone_successes_are_never_pruned():
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    advantages = maxrl_advantages(rewards, group_size=8)
    for seed in range(50):
        result = dppo_plugin.prune_completions(
            advantages, 8, dppo_plugin.PruningConfig(completion_rate=0.95), generator=seed
        )
        assert result.keep[0]
        assert result.weight[0] == 1


def gradient(trainer, micro_batches):
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    values = list(trainer.model.parameters())
    total = torch.zeros(sum(p.numel() for p in values), dtype=torch.float64)
    for micro in micro_batches:
        grads = torch.autograd.grad(trainer._compute_loss(trainer.model, micro), values, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(values, grads, strict=True)]
        total += torch.cat([g.flatten() for g in flat]).double()
    return total


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_expected_gradient_is_maxrl_s(tmp_path, monkeypatch, loss_type):
    """All masks of one batch: their mean gradient is that of the MaxRL trainer alone."""
    options = {"loss_type": loss_type, "gradient_accumulation_steps": 1}
    plain = small.trainer(MaxRLTrainer, small.config(MaxRLConfig, tmp_path, **options))
    rows = next(iter(plain.get_train_dataloader()))
    plain.model.train()
    full = gradient(plain, [plain._prepare_inputs(rows)])
    ours = small.trainer(Trainer, small.config(Config, tmp_path, prompt_rate=0.0, completion_rate=0.6, **options))
    found = {}
    original = dppo_plugin.prune_completions

    def spy(advantages, *args, **kwargs):
        found["advantages"] = advantages
        return original(advantages, *args, **kwargs)

    def prepared():
        ours._buffered_inputs = None
        ours.model.train()
        return ours._prepare_inputs([dict(row) for row in next(iter(ours.get_train_dataloader()))])

    monkeypatch.setattr(dppo_plugin, "prune_completions", spy)
    prepared()
    batch = {"advantages": found["advantages"], "groups": small.GENERATIONS}
    probability, weights = enumerate_weights(DynamicPruning(ours.pruning).components(batch), len(found["advantages"]))
    assert len(weights) > 1
    expected = torch.zeros_like(full)
    for p, weight in zip(probability, weights, strict=True):
        none = torch.zeros(len(weight))
        forced = PruneResult(weight > 0, weight.float(), none, none.bool(), none.long() + 1)
        monkeypatch.setattr(dppo_plugin, "prune_completions", lambda *a, r=forced, **k: r)
        expected += p * gradient(ours, [prepared()])
    assert float(full.norm()) > 0
    assert float((expected - full).norm()) <= 2e-5 * float(full.norm())
