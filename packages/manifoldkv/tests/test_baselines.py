"""The rules that others use: SnapKV's scores from their definition, and the settings of the rest."""

from __future__ import annotations

import math

import pytest
import torch

from manifoldkv import score_keys, select
from manifoldkv.baselines import key_norm, keydiff, random_selection, snapkv_scores, streaming_llm


def snapkv_by_hand(keys, queries, kernel):
    """The definition, one number at a time."""
    batch, kv_heads, length, dim = keys.shape
    heads, window = queries.shape[1], queries.shape[2]
    group, early = heads // kv_heads, length - window
    scores = torch.full((batch, kv_heads, length), math.inf)
    for b in range(batch):
        for h in range(kv_heads):
            pooled = torch.zeros(group, early)
            for g in range(group):
                attention = torch.zeros(early)
                for i in range(window):
                    seen = early + i + 1  # causal: query i sees its own key and all before
                    logits = [float(queries[b, h * group + g, i] @ keys[b, h, j]) / math.sqrt(dim) for j in range(seen)]
                    total = sum(math.exp(x) for x in logits)
                    for j in range(early):
                        attention[j] += math.exp(logits[j]) / total / window
                for j in range(early):
                    near = range(j - kernel // 2, j + kernel // 2 + 1)
                    pooled[g, j] = sum(float(attention[k]) for k in near if 0 <= k < early) / kernel
            scores[b, h, :early] = pooled.mean(0)
    return scores


class TestSnapKV:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "length", "window", "kernel"),
        [(4, 2, 19, 6, 5), (3, 3, 12, 1, 3), (6, 1, 9, 8, 5), (2, 2, 7, 3, 1)],
    )
    def test_equals_the_definition(self, heads, kv_heads, length, window, kernel):
        generator = torch.Generator().manual_seed(length)
        keys = torch.randn(2, kv_heads, length, 8, generator=generator)
        queries = torch.randn(2, heads, window, 8, generator=generator)
        expected = snapkv_by_hand(keys, queries, kernel)
        torch.testing.assert_close(snapkv_scores(keys, queries, kernel), expected, atol=1e-6, rtol=1e-5)

    def test_the_window_always_stays_and_then_the_most_attended(self):
        keys, queries = torch.zeros(1, 1, 20, 4), torch.zeros(1, 1, 3, 4)
        keys[0, 0, 8, 0] = queries[0, 0, :, 0] = 8.0  # all of the window looks at token 8
        kept = select(snapkv_scores(keys, queries, kernel=5), 8)
        assert kept.tolist() == [[[6, 7, 8, 9, 10, 17, 18, 19]]]  # the pool spreads token 8 over its neighbours

    def test_scaling_replaces_the_root_of_the_width(self):
        generator = torch.Generator().manual_seed(0)
        keys, queries = torch.randn(1, 1, 12, 16, generator=generator), torch.randn(1, 1, 4, 16, generator=generator)
        torch.testing.assert_close(snapkv_scores(keys, queries, scaling=0.5), snapkv_scores(keys, 2 * queries))

    def test_low_precision_is_scored_in_float32(self):
        generator = torch.Generator().manual_seed(0)
        keys, queries = torch.randn(1, 2, 12, 16, generator=generator), torch.randn(1, 4, 4, 16, generator=generator)
        keys, queries = keys.bfloat16(), queries.bfloat16()
        torch.testing.assert_close(snapkv_scores(keys, queries), snapkv_scores(keys.float(), queries.float()))

    def test_refuses_what_has_no_meaning(self):
        with pytest.raises(ValueError, match="window of 5 queries must be shorter than the 5 tokens"):
            snapkv_scores(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 4))
        with pytest.raises(ValueError, match="5 query heads can't be shared by 2 key-value heads"):
            snapkv_scores(torch.zeros(1, 2, 9, 4), torch.zeros(1, 5, 3, 4))


class TestSettings:
    """Each rule keeps what its paper says, on keys where that can be told."""

    @staticmethod
    def kept(keys, cfg):
        return select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2]))[0, 0].tolist()

    def test_keydiff_drops_what_points_the_common_way(self):
        keys = torch.tensor([[3.0, 0], [0, 1], [1, 1], [2, 2], [-1, 0.5]])[None, None]
        assert self.kept(keys, keydiff(0.4)) == [0, 1, 4]

    def test_key_norm_drops_the_long_ones(self):
        keys = torch.tensor([[3.0, 0], [0, 1], [1, 1], [2, 2], [-1, 0.5]])[None, None]
        assert self.kept(keys, key_norm(0.4)) == [1, 2, 4]

    def test_streaming_keeps_sinks_and_the_most_recent(self):
        keys = torch.randn(1, 1, 20, 4, generator=torch.Generator().manual_seed(0))
        assert self.kept(keys, streaming_llm(0.5)) == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
        assert self.kept(keys, streaming_llm(0.75, n_sink=1)) == [0, 16, 17, 18, 19]

    def test_random_is_seeded_and_uniform(self):
        keys = torch.zeros(1, 1, 40, 4)
        assert self.kept(keys, random_selection(0.5, 3)) == self.kept(keys, random_selection(0.5, 3))
        assert self.kept(keys, random_selection(0.5, 3)) != self.kept(keys, random_selection(0.5, 4))
        counts = torch.zeros(40)
        for seed in range(400):
            counts[self.kept(keys, random_selection(0.5, seed))] += 1
        # each token stays with probability 1/2: 5 standard deviations of a binomial of 400 are 50
        assert counts.min() > 150
        assert counts.max() < 250
