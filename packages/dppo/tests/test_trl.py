"""Pruning inside the real TRL trainer."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

import dppo_trl as small
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from dppo import DynamicPruningConfig, DynamicPruningTrainer, PromptHistory
from dppo.audit import DynamicPruning, enumerate_weights
from dppo.integrations import trl as plugin
from dppo.integrations.trl_batches import assign, micro_batch
from dppo.integrations.trl_sampler import COLUMN, DrawnIndex, PruningSampler, dataset_keys
from dppo.losses import LOSS_TYPES
from dppo.pruning import PruneResult

T = torch.tensor


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_rate_zero_is_trl_bit_for_bit(tmp_path):
    plain = small.trainer(GRPOTrainer, small.config(GRPOConfig, tmp_path))
    plain.train()
    ours = small.trainer(
        DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, prompt_rate=0, completion_rate=0)
    )
    ours.train()
    assert torch.equal(parameters(plain), parameters(ours))
    assert losses(plain) == losses(ours)


def rows_of(trainer, blocks=1):
    """The first generation batch as the data loader gives it."""
    return next(iter(trainer.get_train_dataloader()))


def gradient_of(trainer, micro_batches, shift):
    """Summed gradient of the micro-batches, at parameters moved away from those that generated."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    values = list(trainer.model.parameters())
    with torch.no_grad():
        for p, d in zip(values, shift, strict=True):
            p += d
    total = torch.zeros(sum(p.numel() for p in values), dtype=torch.float64)
    for micro in micro_batches:
        grads = torch.autograd.grad(trainer._compute_loss(trainer.model, micro), values, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(values, grads, strict=True)]
        total += torch.cat([g.flatten() for g in flat]).double()
    with torch.no_grad():
        for p, d in zip(values, shift, strict=True):
            p -= d
    return total


def micro_batches_of(trainer):
    rows = rows_of(trainer)
    trainer.model.train()
    steps = trainer.args.steps_per_generation
    result = [trainer._prepare_inputs(rows)]
    for step in range(1, steps):
        trainer._step = step
        result.append(trainer._prepare_inputs(rows))
    trainer._step = 0
    return result


LOSS_OPTIONS = [(name, "token", 0.0) for name in LOSS_TYPES] + [
    ("grpo", "sequence", 0.0),
    ("dapo", "sequence", 0.1),
    ("dr_grpo", "token", 0.1),
]
# Seeds of the order of the prompts: two groups with three low rows each; one of them and one that is half right; one of
# them and a dead one.
BATCHES = {"two low": (3, 64), "low and even": (2, 8), "low and dead": (4, 8)}
WHICH = ["two low", *(["low and even", "low and dead"] * len(LOSS_OPTIONS))]
CASES = [(*options, which) for options, which in zip(LOSS_OPTIONS, WHICH, strict=False)]


@pytest.mark.parametrize(("loss_type", "level", "beta", "which"), CASES)
def test_expected_gradient_over_all_masks_is_trl_s_full_gradient(tmp_path, monkeypatch, loss_type, level, beta, which):
    """Two micro-batches of four rows, off-policy, every mask of the batch: E = the gradient of the plain trainer."""
    seed, masks = BATCHES[which]
    options = {
        "seed": seed,
        "loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "gradient_accumulation_steps": 1,
        "epsilon_high": 5.0 if loss_type == "cispo" else 0.2,
    }  # fmt: skip
    plain = small.trainer(GRPOTrainer, small.config(GRPOConfig, tmp_path, **options))
    shift = [0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)) for p in plain.model.parameters()]
    if loss_type == "bnpo":  # its full batch: the tokens of the generation batch, however it was split
        options = {**options, "per_device_train_batch_size": 8, "steps_per_generation": 1}
        plain = small.trainer(GRPOTrainer, small.config(GRPOConfig, tmp_path, **options))
        options["gradient_accumulation_steps"] = 1
    full = gradient_of(plain, micro_batches_of(plain), shift)
    ours = small.trainer(
        DynamicPruningTrainer,
        small.config(DynamicPruningConfig, tmp_path, prompt_rate=0.0, completion_rate=0.6, **options),
    )
    found = {}
    original = plugin.prune_completions

    def spy(advantages, *args, **kwargs):
        found["advantages"] = advantages
        return original(advantages, *args, **kwargs)

    monkeypatch.setattr(plugin, "prune_completions", spy)
    micro_batches_of(ours)
    batch = {"advantages": found["advantages"], "groups": small.GENERATIONS}
    probability, weights = enumerate_weights(DynamicPruning(ours.pruning).components(batch), 8)
    assert len(weights) == masks
    expected = torch.zeros_like(full)
    for p, weight in zip(probability, weights, strict=True):
        forced = PruneResult(
            weight > 0, weight.float(), torch.zeros(8), torch.zeros(8, dtype=torch.bool), torch.ones(8).long()
        )
        monkeypatch.setattr(plugin, "prune_completions", lambda *a, r=forced, **k: r)
        ours._buffered_inputs = None
        expected += p * gradient_of(ours, micro_batches_of(ours), shift)
    assert float(full.norm()) > 0
    assert float((expected - full).norm()) <= 2e-5 * float(full.norm())


def test_weights_stay_outside_ratio_and_clip(tmp_path, monkeypatch):
    """Doubling a weight doubles the row's gradient; the clip statistics stay what they are."""
    args = small.config(DynamicPruningConfig, tmp_path, steps_per_generation=1, gradient_accumulation_steps=3)
    ours = small.trainer(DynamicPruningTrainer, args)
    (micro,) = micro_batches_of(ours)
    shift = [torch.zeros_like(p) for p in ours.model.parameters()]
    one = gradient_of(ours, [{**micro, "row_weight": torch.ones_like(micro["row_weight"])}], shift)
    four = gradient_of(ours, [{**micro, "row_weight": 4 * torch.ones_like(micro["row_weight"])}], shift)
    torch.testing.assert_close(four, 4 * one, rtol=1e-6, atol=1e-9)
    clipped = ours._metrics["train"]["clip_ratio/region_mean"]
    assert clipped[-1] == clipped[-2]


def test_training_with_pruning_logs_what_it_saved(tmp_path):
    trainer = small.trainer(
        DynamicPruningTrainer,
        small.config(DynamicPruningConfig, tmp_path, max_steps=14, per_device_train_batch_size=16),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "dppo/ess" in row]
    assert len(rows) == 14
    names = ("prompts_kept", "completions_kept", "tokens_generated", "tokens_updated", "tokens_skipped", "max_weight")
    assert all(f"dppo/{name}" in rows[0] for name in names)
    assert all(0 < row["dppo/completions_kept"] < 1 for row in rows)
    assert all(row["dppo/prompts_kept"] == 1 for row in rows[:6]), "the first pass knows nothing"
    assert min(row["dppo/prompts_kept"] for row in rows[7:]) < 1, "later ones skip prompts"
    assert all(row["dppo/speedup_tokens"] > 1 for row in rows)
    assert len(trainer.history) == 24
    assert torch.isfinite(parameters(trainer)).all()


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_packed_training_equals_padded_training(tmp_path, beta):
    results = []
    for pack in (False, True):
        args = small.config(
            DynamicPruningConfig, tmp_path, pack=pack, beta=beta, num_iterations=2, max_steps=4, learning_rate=1e-3
        )
        trainer = small.trainer(DynamicPruningTrainer, args)
        trainer.train()
        results.append((parameters(trainer), trainer))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=2e-5)
    assert results[1][1].state.log_history[0]["dppo/density"] == 1.0


def test_completions_without_tokens(tmp_path):
    """TRL wants a token in each, and masks all tokens of a truncated one: here of the first of each group, and in every
    third prompt of all. Such rows stay in the batch without counting as tokens, packed or not."""

    def rollouts(texts, trainer):
        found = small.rollouts(texts, trainer)
        for place, text in enumerate(texts):
            if place % small.GENERATIONS == 0 or int(text.split()[0][1:]) % 3 == 0:
                found["completion_ids"][place].pop()  # the end of sequence
        return found

    results, normalizers = [], []
    for pack in (False, True):
        args = small.config(
            DynamicPruningConfig, tmp_path, pack=pack, learning_rate=1e-3, loss_type="dapo",
            mask_truncated_completions=True,
        )  # fmt: skip
        trainer = small.trainer(DynamicPruningTrainer, args)
        trainer.rollout_func = rollouts
        gather = trainer._gather_batch

        def spy(batch, draws, gather=gather):
            shared = gather(batch, draws)
            normalizers.append((shared["token_normalizer"], int(shared["lengths"].sum()), shared["lengths"].tolist()))
            return shared

        trainer._gather_batch = spy
        trainer.train()
        assert all(np.isfinite(losses(trainer)))
        results.append(parameters(trainer))
    torch.testing.assert_close(*results, rtol=1e-3, atol=2e-5)
    assert normalizers[:3] == normalizers[3:]
    assert all(z == max(tokens, 1) for z, tokens, _ in normalizers)
    assert all(lengths[0] == lengths[4] == 0 for _, _, lengths in normalizers)


def test_old_log_probabilities_are_computed_for_kept_rows_only(tmp_path, monkeypatch):
    args = small.config(DynamicPruningConfig, tmp_path, steps_per_generation=2, per_device_train_batch_size=4, beta=0.1,
                        gradient_accumulation_steps=1)  # fmt: skip
    trainer = small.trainer(DynamicPruningTrainer, args)
    seen = []
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def spy(self, model, input_ids, *rest, **more):
        seen.append((len(input_ids), torch.is_grad_enabled()))
        return original(self, model, input_ids, *rest, **more)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", spy)
    kept = sum(int((m["row_weight"] > 0).sum()) for m in micro_batches_of(trainer))
    assert kept < 8
    scored = [n for n, grad in seen if not grad]
    assert sum(scored) == 2 * kept, "old and reference, kept rows only"
    plain_old = original(trainer, trainer.model, *_inputs(trainer._buffered_inputs[0]))[0]
    torch.testing.assert_close(
        trainer._buffered_inputs[0]["old_per_token_logps"], plain_old.detach(), rtol=1e-4, atol=1e-5
    )


def _inputs(micro):
    ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], 1)
    mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], 1)
    return ids, mask, micro["completion_ids"].shape[1]


def test_each_inner_iteration_has_its_own_mask(tmp_path):
    for resample in (True, False):
        args = small.config(DynamicPruningConfig, tmp_path, num_iterations=6, resample_each_epoch=resample,
                            per_device_train_batch_size=16)  # fmt: skip
        trainer = small.trainer(DynamicPruningTrainer, args)
        trainer.model.train()
        trainer._prepare_inputs(rows_of(trainer))
        weights = [m["row_weight"].tolist() for m in trainer._buffered_inputs]
        assert len(weights) == 6
        assert (len({tuple(w) for w in weights}) > 1) == resample


def test_all_rows_pruned_is_a_zero_step_not_a_crash(tmp_path):
    def equal(completions, **_):
        return [1.0] * len(completions)

    trainer = small.trainer(
        DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, max_steps=2), reward_funcs=equal
    )
    before = parameters(trainer).clone()
    trainer.train()
    assert torch.equal(before, parameters(trainer))
    assert trainer.state.global_step == 2
    assert losses(trainer) == [0.0, 0.0]
    assert trainer.state.log_history[0]["dppo/completions_kept"] == 0


def masks_of(trainer, log):
    original = trainer._masks

    def spy(shared, rows):
        masks = original(shared, rows)
        log.append(
            (shared["keys"].tolist(), shared["pulled"], masks[0].weight.tolist(), shared["draw_weight"].tolist())
        )
        return masks

    trainer._masks = spy
    return trainer


def test_resumed_run_gives_the_same_masks_and_parameters(tmp_path):
    options = {
        "max_steps": 12,
        "per_device_train_batch_size": 16,
        "save_strategy": "steps",
        "save_steps": 5,
        "num_iterations": 1,
        "history_threshold": "batch",
    }
    whole, log = [], []
    first = small.trainer(DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, **options), n=20)
    masks_of(first, whole)
    first.train()
    assert len(whole) == 12
    assert any(pulled > 4 for _, pulled, _, _ in whole)
    for step in (5, 10):
        log.clear()
        args = small.config(DynamicPruningConfig, tmp_path / "again", **options)
        again = small.trainer(DynamicPruningTrainer, args, n=20)
        masks_of(again, log).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert log == whole[step:], f"resumed at {step}"
        assert torch.equal(parameters(again), parameters(first))


def test_resuming_between_two_updates_on_the_same_rollouts(tmp_path, monkeypatch):
    """Two updates a generation, a checkpoint after the first: the second uses the rollouts that were kept."""
    save, complete = TrainerState.save_to_json, []

    def spy(self, path):
        names = {file.name for file in Path(path).parent.iterdir()}
        complete.append({plugin.STATE_FILE, plugin.ROLLOUTS_FILE.format(0)} <= names)
        save(self, path)

    monkeypatch.setattr(TrainerState, "save_to_json", spy)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_iterations": 2}
    whole, rest = [], []
    first = masks_of(
        small.trainer(DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, **options)), whole
    )
    first.train()
    assert len(whole) == 3
    assert complete == [True, True], "the trainer's state, which says that a checkpoint is whole, comes last"
    args = small.config(DynamicPruningConfig, tmp_path / "again", **options)
    again = masks_of(small.trainer(DynamicPruningTrainer, args), rest)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert rest == whole[2:]
    assert torch.equal(parameters(again), parameters(first))


def test_epochs_count_passes_and_end_early(tmp_path):
    args = small.config(DynamicPruningConfig, tmp_path, max_steps=-1, num_train_epochs=2)
    trainer = small.trainer(DynamicPruningTrainer, args)
    trainer.train()
    full = 2 * 24 // 2
    assert trainer.pruning_sampler.passes == 2
    assert trainer.state.global_step < full


def test_mixin_in_front_of_another_trainer(tmp_path):
    class Doubled(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = 2 * output["advantages"]
            return output

    class Both(plugin.DynamicPruningMixin, Doubled):
        pass

    trainer = small.trainer(Both, small.config(DynamicPruningConfig, tmp_path))
    seen = []
    original = trainer._gather_batch
    trainer._gather_batch = lambda batch, draws: seen.append(batch["advantages"]) or original(batch, draws)
    trainer.train()
    plain = small.trainer(GRPOTrainer, small.config(GRPOConfig, tmp_path))
    plain.model.train()
    reference = plain._generate_and_score_completions(rows_of(plain))["advantages"]
    torch.testing.assert_close(seen[0], 2 * reference)


def test_refusals(tmp_path):
    def make(**options):
        return small.trainer(DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, **options))

    for name in ("sapo", "vespo", "luspo"):
        with pytest.raises(ValueError, match=f"loss_type='{name}' is not supported"):
            make(loss_type=name)
    with pytest.raises(ValueError, match="entropy bonus"):
        make(entropy_coef=0.1)
    with pytest.raises(ValueError, match="top_entropy_quantile"):
        make(top_entropy_quantile=0.5)
    with pytest.raises(ValueError, match="support condition"):
        make(prompt_rate=1.0)
    with pytest.raises(TypeError, match="use DynamicPruningConfig"):
        small.trainer(DynamicPruningTrainer, small.config(GRPOConfig, tmp_path))
    with pytest.warns(UserWarning, match="free_zeros is switched off"):
        assert not make(beta=0.1).pruning.free_zeros
    stream = small.prompts(24).to_iterable_dataset()
    with pytest.raises(ValueError, match="needs a map-style data set"):
        DynamicPruningTrainer(
            model=small.model(), reward_funcs=small.reward, train_dataset=stream, processing_class=small.tokenizer(),
            args=small.config(DynamicPruningConfig, tmp_path, accelerator_config={"dispatch_batches": False}),
            rollout_func=small.rollouts,
        )  # fmt: skip


def make_sampler(n=20, batch=3, rate=0.6, shuffle=True, **more):
    keys = dataset_keys([f"p{i}" for i in range(n)])
    return PruningSampler(
        range(n),
        2,
        batch,
        2,
        shuffle,
        5,
        keys=keys,
        history=more.pop("history", PromptHistory()),
        rate=lambda: rate,
        **more,
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_sampler_without_history_yields_trl_s_order(shuffle):
    ours, theirs = make_sampler(shuffle=shuffle), RepeatSampler(range(20), 2, 3, 2, shuffle, 5)
    for _ in range(3):
        assert [int(i) for i in ours] == list(theirs)
    assert len(ours) == len(theirs)


def test_sampler_skips_low_prompts_with_the_right_weight():
    history = PromptHistory()
    sampler = make_sampler(history=history, max_passes=2)
    history.update(sampler.keys, [0.0] * 10 + [1.0] * 10, 0, lengths=[5.0] * 20)
    indices = list(sampler)
    assert all(isinstance(i, DrawnIndex) for i in indices)
    draws = {int(i): i.draw for i in indices}
    assert all(d.weight == 1 for i, d in draws.items() if i >= 10)
    assert any(d.weight > 1 for i, d in draws.items() if i < 10)
    assert all(d.low == (i < 10) for i, d in draws.items())
    assert len(list(sampler)) + len(indices) < 2 * len(sampler)
    assert list(sampler) == []
    copy = pickle.loads(pickle.dumps(indices[0]))  # noqa: S301 our own object, as loader workers pass it
    assert copy == indices[0]
    assert copy.draw == indices[0].draw


def test_sampler_resumes_in_the_middle():
    def fresh():
        history = PromptHistory()
        sampler = make_sampler(history=history)
        history.update(sampler.keys, [i / 20 for i in range(20)], 0)
        return sampler

    whole = fresh()
    stream = [(int(i), i.draw) for _ in range(3) for i in whole]
    part = fresh()
    list(part)
    iterator = iter(part)
    for _ in range(30):
        next(iterator)
    state = part.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state, replay=True)
    assert [(int(i), i.draw) for _ in range(2) for i in resumed] == stream[len(whole) :]


def test_sampler_of_another_data_set_starts_afresh():
    sampler, other = make_sampler(), make_sampler(n=12)
    list(sampler)
    with pytest.warns(UserWarning, match="this one has 12"):
        other.load_state_dict(sampler.state_dict(), replay=True)
    assert len(list(other)) == len(other)
    with pytest.raises(ValueError, match="fewer than one batch of 30"):
        next(iter(make_sampler(batch=30)._next_block() for _ in range(1)))


def test_colliding_texts_get_different_keys(monkeypatch):
    monkeypatch.setattr("dppo.integrations.trl_sampler.hash_and_check", lambda text: (9, sum(text.encode())))
    assert dataset_keys(["a", "b", "a", "c"]).tolist() == [9, 10, 9, 11]


def test_dealing_balances_tokens_and_keeps_empty_micro_batches():
    lengths = T([8, 1, 1, 1, 5, 1])
    batch = {
        "prompt_ids": torch.ones(6, 2).long(), "prompt_mask": torch.ones(6, 2).long(),
        "completion_ids": torch.arange(48).reshape(6, 8),
        "completion_mask": (torch.arange(8) < lengths[:, None]).long(),
        "advantages": torch.arange(6.0), "num_items_in_batch": T(17.0),
    }  # fmt: skip
    keep = T([True, True, False, True, True, False])
    weight = T([1.0, 2, 0, 2, 1, 0])
    bins = assign(batch, keep, 3)
    assert bins == [[0], [4], [1, 3]]
    micro = [micro_batch(batch, rows, weight, 2) for rows in bins]
    assert [int(m["completion_mask"].sum()) for m in micro] == [8, 5, 2]
    assert [m["row_weight"].tolist() for m in micro] == [[1, 0], [1, 0], [2, 2]]
    assert [m["completion_ids"].shape for m in micro] == [(2, 8), (2, 5), (2, 1)]
    assert [int(m["prompt_mask"].sum()) for m in micro] == [3, 3, 4]
    assert assign(batch, torch.zeros(6, dtype=torch.bool), 3) == [[], [], []]
    empty = micro_batch(batch, [], weight, 1)
    assert empty["row_weight"].tolist() == [0]
    assert empty["completion_ids"].shape == (1, 1)
    assert int(empty["completion_mask"].sum()) == 0
    assert empty["num_items_in_batch"] == 17
    assert int(batch["prompt_mask"].sum()) == 12, "the batch itself is left alone"


def test_column_does_not_reach_reward_functions(tmp_path):
    names = []

    def spy(completions, **others):
        names.append(set(others))
        return small.reward(completions)

    trainer = small.trainer(
        DynamicPruningTrainer, small.config(DynamicPruningConfig, tmp_path, max_steps=1), reward_funcs=spy
    )
    trainer.train()
    assert COLUMN not in names[0]
