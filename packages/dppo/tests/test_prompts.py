"""Prompt history and prompt-level pruning."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo import PromptHistory, PruningConfig, prune_prompts
from dppo import keys as keys_module
from dppo.draws import MaskGenerator
from dppo.prompts import pull_block


def seen(scores: dict, **options) -> PromptHistory:
    history = PromptHistory(**options)
    history.update(list(scores), list(scores.values()), step=0)
    return history


def test_threshold_low_and_unseen():
    history = seen({"a": 0.1, "b": 0.9})
    assert history.threshold == pytest.approx(0.5)
    assert history.prob(["a", "b", "never seen"]).tolist() == [0.5, 0.0, 0.0]
    assert history.prob(["a"], rate=0.9).tolist() == [0.9]
    assert len(history) == 2


def test_equal_scores_are_not_low():
    assert not seen(dict.fromkeys(range(3), 0.1 + 0.2)).low([0, 1, 2]).any()


def test_last_value_or_moving_average():
    history = seen({1: 1.0})
    history.update([1], [0.5], step=1)
    assert history.scores([1]).tolist() == [0.5]
    average = seen({1: 1.0}, decay=0.75)
    average.update([1], [0.5], step=1)
    assert average.scores([1]).tolist() == [0.875]


def test_pruned_prompt_keeps_its_score_and_comes_back():
    """Expected revisit time is 1/(1−r) epochs."""
    history = seen({0: 0.1, 1: 0.9})
    waits, wait = [], 0
    for epoch in range(2000):
        wait += 1
        if prune_prompts([0], history, PruningConfig(prompt_rate=0.75), MaskGenerator(0, epoch)).keep[0]:
            waits.append(wait)
            wait = 0
    assert history.scores([0]).tolist() == [0.1]
    error = np.std(waits) / len(waits) ** 0.5
    assert abs(np.mean(waits) - 4) < 4 * error


def test_epoch_threshold_is_frozen_and_batch_threshold_is_live():
    for mode, expected in (("epoch", 0.5), ("batch", 2 / 3)):
        history = seen({0: 0.0, 1: 1.0}, threshold=mode)
        history.start_epoch()
        history.update([2], [1.0], step=1)
        assert history.threshold == pytest.approx(expected)
        history.start_epoch()
        assert history.threshold == pytest.approx(2 / 3)


def test_duplicates_of_one_update_are_averaged_in_any_order():
    a, b = PromptHistory(), PromptHistory()
    a.update([7, 8, 7], [1.0, 5.0, 0.0], step=0)
    b.update([7, 7, 8], [0.0, 1.0, 5.0], step=0)
    assert a.scores([7, 8]).tolist() == b.scores([7, 8]).tolist() == [0.5, 5.0]


def test_decisions_use_earlier_information_only():
    """The decision for a batch does not change with the rewards that batch will get."""
    history = seen({i: float(i) for i in range(8)})
    before = prune_prompts(list(range(8)), history, generator=MaskGenerator(0, 1))
    state = history.state_dict()
    history.update(list(range(8)), [9.0 - i for i in range(8)], step=1)
    replay = PromptHistory()
    replay.load_state_dict(state)
    again = prune_prompts(list(range(8)), replay, generator=MaskGenerator(0, 1))
    assert torch.equal(before.keep, again.keep)


def test_shuffling_and_processes_do_not_change_the_mask():
    texts = [f"What is {i} + {i}?" for i in range(40)]
    history = PromptHistory()
    history.update(texts, np.linspace(0, 1, 40), step=0)
    order = np.random.default_rng(0).permutation(40)
    for mode in ("bernoulli", "fixed", "systematic"):
        cfg = PruningConfig(mode=mode)
        whole = prune_prompts(texts, history, cfg, MaskGenerator(4, 2))
        shuffled = prune_prompts([texts[i] for i in order], history, cfg, MaskGenerator(4, 2))
        assert torch.equal(whole.keep[order], shuffled.keep), mode
    halves = [prune_prompts(part, history, generator=MaskGenerator(4, 2)).keep for part in (texts[:20], texts[20:])]
    assert torch.equal(torch.cat(halves), prune_prompts(texts, history, generator=MaskGenerator(4, 2)).keep)


def test_merge_of_processes_equals_one_process():
    one, left, right = PromptHistory(), PromptHistory(), PromptHistory()
    one.update(["a", "b"], [1.0, 2.0], step=0)
    left.update(["a"], [1.0], step=0)
    right.update(["b"], [2.0], step=0)
    one.update(["a", "c"], [3.0, 4.0], step=1)
    right.update(["a", "c"], [3.0, 4.0], step=1)
    left.merge(right)
    for history in (left,):
        assert history.scores(["a", "b", "c"]).tolist() == one.scores(["a", "b", "c"]).tolist() == [3.0, 2.0, 4.0]


def test_state_survives_and_foreign_histories_warn():
    history = seen({"a": 0.1, "b": 0.9, "c": 0.3})
    history.start_epoch()
    other = PromptHistory()
    other.load_state_dict(history.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.prob(["a", "b", "c"]).tolist() == history.prob(["a", "b", "c"]).tolist()
    other.load_state_dict(history.state_dict())
    with pytest.warns(UserWarning, match="another data set"):
        other.prob(["x", "y", "a"])
    with pytest.warns(UserWarning, match="67% of the prompts of the history"):
        other.check_dataset(["a", "x", "y"])


def test_hash_collisions_of_texts_keep_separate_histories(monkeypatch):
    def colliding(text: str) -> tuple[int, int]:
        return 42, sum(text.encode())

    monkeypatch.setattr("dppo.prompts.hash_and_check", colliding)
    history = PromptHistory()
    history.update(["a", "b"], [0.1, 0.9], step=0)
    history.update(["b"], [0.8], step=1)
    assert history.scores(["a", "b", "c"]).tolist()[:2] == [0.1, 0.8]
    assert np.isnan(history.scores(["c"]))[0]
    assert history.collisions == 1
    copy = PromptHistory()
    copy.load_state_dict(history.state_dict())
    assert copy.scores(["b", "a"]).tolist() == [0.8, 0.1]
    copy.update([42, 43], [0.3, 0.4], step=1)  # ids that look like the texts' hashes, and like their neighbours
    assert copy.scores(["a", "b", 42, 43]).tolist() == [0.1, 0.8, 0.3, 0.4]
    assert copy.prob(["a", "b", 42, 43]).tolist() == [0.5, 0, 0.5, 0]


def test_colliding_texts_met_in_another_order_merge_rightly(monkeypatch):
    monkeypatch.setattr("dppo.prompts.hash_and_check", lambda text: (42, sum(text.encode())))
    left, right = PromptHistory(), PromptHistory()
    left.update(["b"], [0.5], step=0)
    right.update(["a", "b", "c"], [0.1, 0.2, 0.3], step=1)
    left.merge(right)
    assert left.scores(["a", "b", "c"]).tolist() == [0.1, 0.2, 0.3]
    assert len(left) == 3


def test_ids_that_64_bits_do_not_hold():
    history = seen({2**64 - 1: 0.1, -(2**70): 0.9, "\ud800": 0.1})
    assert history.prob([2**64 - 1, -(2**70), "\ud800", 5]).tolist() == [0.5, 0.0, 0.5, 0.0]
    assert len(prune_prompts([2**64 - 1, 2**63], history, generator=0).keep) == 2


def test_colliding_ids_draw_independently(monkeypatch):
    """Two prompts with one id are two draws; each stays with its own probability."""
    monkeypatch.setattr(keys_module, "hash_and_check", lambda text: (42, 0))
    history = seen({1: 0.1, 2: 0.9})
    history.update([42], [0.0], step=0)
    keeps = torch.cat(
        [
            prune_prompts(torch.tensor([42] * 40), history, generator=MaskGenerator(0, s)).keep.reshape(20, 2)
            for s in range(100)
        ]
    ).double()
    assert ((keeps.mean(0) - 0.5).abs() < 4 * 0.5 / 2000**0.5).all()
    assert abs(np.corrcoef(keeps.T.numpy())[0, 1]) < 4 / 2000**0.5


def test_dense_histories_and_bad_input():
    dense = PromptHistory(4)
    dense.update(torch.tensor([3, 0]), torch.tensor([1.0, 0.0]), step=0)
    assert dense.prob(np.array([0, 1, 2, 3])).tolist() == [0.5, 0, 0, 0]
    with pytest.raises(ValueError, match=r"prompt id 4 is outside 0\.\.3"):
        dense.prob([4])
    with pytest.raises(ValueError, match=r"prompt 1 of the batch is nan"):
        dense.update([0, 1], [0.0, float("nan")], step=1)
    with pytest.raises(ValueError, match="one each is needed"):
        dense.update([0, 1], [0.0], step=1)
    with pytest.raises(ValueError, match="key spaces"):
        dense.merge(PromptHistory())
    for options in ({"decay": 1.0}, {"rate": 1.0}, {"threshold": "x"}, {"n": 0}):
        with pytest.raises(ValueError):
            PromptHistory(**options)


@pytest.mark.parametrize("mode", ["bernoulli", "fixed", "systematic"])
def test_prompt_weights_average_to_one(mode):
    """100 steps of 20 copies of 9 prompts; the standard error is that between steps."""
    history = seen({i: float(i) for i in range(9)})
    cfg = PruningConfig(mode=mode, prompt_rate=0.6)
    weights = torch.stack(
        [prune_prompts(list(range(9)) * 20, history, cfg, MaskGenerator(0, s)).weight for s in range(100)]
    ).double()
    if mode == "fixed":
        assert set((weights > 0).sum(1).tolist()) == {180 - int(0.6 * 80)}
    means = weights.reshape(100, 20, 9).mean(1)
    assert ((means.mean(0) - 1).abs() <= 4 * means.std(0) / 10 + 1e-6).all()


def test_deterministic_prompts_warn_and_lose_the_lowest():
    history = seen({i: float(i) for i in range(9)})
    with pytest.warns(UserWarning, match="biased"):
        result = prune_prompts(list(range(9)), history, PruningConfig(mode="deterministic"), 0)
    assert result.keep.tolist() == [False, False] + [True] * 7
    assert result.weight.tolist() == [0, 0, 2, 2, 1, 1, 1, 1, 1]


def test_annealed_prompts_are_all_kept():
    history = seen({0: 0.0, 1: 1.0})
    cfg = PruningConfig(prompt_rate=0.95, anneal=0.5)
    assert all(prune_prompts([0, 1], history, cfg, s, progress=0.5).keep.all() for s in range(30))


def test_pulling_until_enough_are_kept_would_be_biased():
    """Why `pull_block` fixes the stretch beforehand: stop-when-full and divide by n gives 2 ln 2 where 1 is right."""
    rng = np.random.default_rng(0)
    pulled = rng.geometric(0.5, size=100_000)
    naive = 2 / pulled
    assert naive.mean() == pytest.approx(2 * np.log(2), abs=4 * naive.std() / 100_000**0.5)


def test_block_is_unbiased_for_the_mean_over_pulled_prompts():
    rng = np.random.default_rng(1)
    low = rng.random(40) < 0.6
    values = rng.normal(size=40)
    estimates = []
    for step in range(2000):
        uniform = MaskGenerator(0, step).uniform(torch.arange(40)).numpy()
        block = pull_block(low, uniform, 3, 10, 0.7)
        estimates.append((block.weight * values[block.kept]).sum() / block.pulled)
        assert len(block.kept) == 10
    target = values[3 : 3 + block.pulled].mean()
    assert abs(np.mean(estimates) - target) < 4 * np.std(estimates) / 2000**0.5


@settings(max_examples=100, deadline=None)
@given(
    low=st.lists(st.booleans(), min_size=1, max_size=60),
    target=st.integers(1, 20),
    rate=st.floats(0, 0.95),
    seed=st.integers(0, 10**6),
)
def test_blocks_cover_the_order_without_loss(low, target, rate, seed):
    low = np.array(low)
    uniform = np.random.default_rng(seed).random(len(low))
    start, kept = 0, []
    while (block := pull_block(low, uniform, start, target, rate)) is not None:
        assert len(block.kept) == target
        assert (np.diff(block.kept) > 0).all(), "in order"
        inside = (block.kept >= start) & (block.kept < start + block.pulled)
        assert inside.all()
        n_low = low[start : start + block.pulled].sum()
        assert block.pulled - target == int(np.floor(rate * n_low + 1e-9))
        assert not set(np.flatnonzero(~low[start : start + block.pulled]) + start) - set(block.kept), "only low ones go"
        start += block.pulled
        kept.extend(block.kept)
    assert len(set(kept)) == len(kept)
