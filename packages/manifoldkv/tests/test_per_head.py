"""Budgets per head: floors and totals, attention equal to the explicit reference, the model restored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import KVConfig, ManifoldCache, compress
from manifoldkv.selection import select_adaptive

transformers = pytest.importorskip("transformers")

from manifoldkv.integrations.transformers import CacheTrimError  # noqa: E402

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SETTINGS = {"metric": "l2", "n_sink": 2, "n_recent": 4, "head_budget": "adaptive"}


class TestSelection:
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 40), st.integers(0, 99))
    def test_floors_and_totals(self, batch, heads, length, seed):
        scores = torch.randn(batch, heads, length, generator=torch.Generator().manual_seed(seed)).exp()
        for n in {1, length // 3 + 1, length - 1}:
            kept = select_adaptive(scores, n)
            assert kept.sum((1, 2)).tolist() == [heads * n] * batch
            assert int(kept.sum(-1).min()) >= math.ceil(n / 5)

    def test_the_floor_is_exact_in_floating_point(self):
        scores = torch.zeros(1, 2, 100)
        scores[0, 0] = torch.arange(100.0)
        scores[0, 1] = torch.linspace(-1e-3, 0, 100)
        for n, least in ((5, 1), (6, 2), (35, 7), (36, 8)):
            own = torch.cat((scores[:, :1] ** 6, scores[:, 1:]), 1)
            assert int(select_adaptive(own, n).sum(-1).min()) >= least

    def test_by_hand(self):
        # head 0: z = -1.22, 0, 1.22 thrice over; head 1: two far outliers
        scores = torch.tensor([[[0.0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 9]]])
        kept = select_adaptive(scores, 2)  # 4 in all; each at least its best 1; z of the 9 is 2.24
        assert kept.tolist() == [[[False, True, True, False, False, True], [False] * 5 + [True]]]

    def test_protected_first_padding_last(self):
        scores = torch.tensor([[[-math.inf, 5.0, 1.0, math.inf], [-math.inf, 9.0, 8.0, math.inf]]])
        kept = select_adaptive(scores, 2)
        assert kept[0, :, 3].all()
        assert not kept[0, :, 0].any()
        assert kept.sum() == 4


def both(model, reference, forward_steps, ids, mask, *, steps=14, chunk=None, **settings):
    """Logits of the explicit reference and of the package on the same tokens, and both records of what was kept."""
    shared = {"n_sink": 2, "n_recent": 4, **settings}
    explicit = reference(model, metric="l2", adaptive=True, **shared)
    with explicit:
        first, later, tokens = forward_steps(model, ids, mask, explicit.cache(), steps=steps, chunk=chunk)
    names = {"ratio": "compression_ratio"}
    cfg = KVConfig(metric="l2", head_budget="adaptive", **{names.get(k, k): v for k, v in shared.items()})
    with compress(model, cfg) as kv:
        cache = ManifoldCache(model.config, cfg, per_head=True)
        own_first, own_later, _ = forward_steps(model, ids, mask, cache, tokens, steps=steps, chunk=chunk)
    valid = torch.ones_like(ids).bool() if mask is None else mask.bool()
    torch.testing.assert_close(own_first[valid], first[valid], **CLOSE)
    torch.testing.assert_close(own_later, later, **CLOSE)
    return explicit, cache, kv


class TestAgainstTheReference:
    @pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "phi3", "gemma3", "gpt_neox"])
    def test_models(self, name, tiny, reference, forward_steps, prompt):
        ids, mask = prompt(2, 30, pads=[0, 5])
        explicit, cache, _ = both(tiny(name), reference, forward_steps, ids, mask, budget=14, interval=5, phase="both")
        layers = len(cache.manifold_layers)
        assert [s.evictions for s in cache.stats()] == [3] * layers
        assert len(explicit.evictions) == 3 * layers

    @pytest.mark.parametrize("phase", ["prefill", "chunked", "decode", "both"])
    @pytest.mark.parametrize("size", [{"budget": 14}, {"ratio": 0.6}])
    def test_phases(self, phase, size, tiny, reference, forward_steps, prompt):
        ids, _ = prompt(2, 32)
        chunk = 8 if phase == "chunked" else None
        both(tiny("llama"), reference, forward_steps, ids, None, phase=phase, interval=3, chunk=chunk, **size)

    def test_heads_differ_and_their_total_is_the_budget(self, tiny, reference, forward_steps, prompt):
        ids, _ = prompt(2, 40)
        explicit, cache, _ = both(
            tiny("llama"), reference, forward_steps, ids, None, steps=1, budget=12, phase="prefill"
        )
        for index, layer in enumerate(cache.layers):
            counts = layer.head_mask().sum(-1) - 1  # the token decoded since
            assert counts.sum(-1).tolist() == [24, 24]
            assert int(counts.min()) >= 3
            kept = next(alive for own, _, alive in explicit.evictions if own == index)
            for row in range(2):
                for head in range(2):
                    mine = layer.positions[row, head][layer.head_mask()[row, head]][:-1].tolist()
                    assert mine == kept[row, head].nonzero()[:, 0].tolist()
        assert any(len(set(layer.head_mask().sum(-1).flatten().tolist())) > 1 for layer in cache.layers)

    def test_left_padding_longer_than_a_chunk(self, tiny, reference, forward_steps, prompt):
        ids, mask = prompt(2, 32, pads=[0, 11])
        both(tiny("llama"), reference, forward_steps, ids, mask, phase="chunked", budget=14, chunk=8, steps=4)


class TestGenerate:
    def test_a_budget_beyond_the_length_is_dense(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(2, 30)
        dense = model.generate(ids, max_new_tokens=20, do_sample=False)
        with compress(model, **SETTINGS, budget=100):
            assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), dense)

    def test_rows_of_a_padded_batch_equal_single_rows(self, tiny, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 34, pads=[0, 12])
        with compress(model, **SETTINGS, budget=11, phase="both", interval=4):
            together = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
            alone = model.generate(ids[1:, 12:], max_new_tokens=16, do_sample=False)
        assert torch.equal(together[1, 12:], alone[0])

    def test_beam_search_moves_the_budgets_along(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(2, 30)
        options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
        with compress(model, **SETTINGS, budget=11, phase="both", interval=4):
            together = model.generate(ids, **options)
            single = [model.generate(ids[row : row + 1], **options) for row in range(2)]
        for row in range(2):
            assert torch.equal(together[row, : single[row].shape[1]], single[row][0])

    def test_cropping_stops_at_evicted_tokens(self, tiny, prompt):
        model = tiny("llama")
        with compress(model, **SETTINGS, budget=12) as kv, torch.no_grad():
            model(prompt(1, 30)[0])
            kv.cache.crop(-3)
            assert kv.cache.get_seq_length() == 27
            with pytest.raises(CacheTrimError, match="reaches evicted ones"):
                kv.cache.crop(-20)


class TestRestoring:
    def test_attention_comes_back(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 30)
        before = model.config._attn_implementation
        expected = model(ids).logits
        with compress(model, **SETTINGS, budget=12):
            assert model.config._attn_implementation != before
        assert model.config._attn_implementation == before

        def fail():
            with compress(model, **SETTINGS, budget=12):
                model(ids)
                raise KeyError("body")

        with pytest.raises(KeyError, match="body"):
            fail()
        assert model.config._attn_implementation == before
        assert torch.equal(model(ids).logits, expected)

    def test_other_models_are_not_touched(self, tiny, prompt):
        one, other = tiny("llama"), tiny("qwen3")
        ids, _ = prompt(1, 30)
        expected = other(ids).logits
        with compress(one, **SETTINGS, budget=12):
            one(ids)
            assert torch.equal(other(ids).logits, expected)


class TestRefused:
    def test_eager_attention(self, tiny):
        import copy

        model = copy.deepcopy(tiny("llama"))
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="attn_implementation='sdpa', not 'eager'"):
            compress(model, **SETTINGS, budget=12)

    def test_soft_capping(self, tiny):
        import copy

        model = copy.deepcopy(tiny("gemma2"))
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="soft-capping; use head_budget='uniform'"):
            compress(model, **SETTINGS, budget=12)

    def test_encoder_decoder(self, tiny_bart):
        with pytest.raises(ValueError, match="isn't defined for encoder-decoder models"):
            compress(tiny_bart, **SETTINGS, budget=12)

    def test_a_cache_by_hand(self, tiny):
        with pytest.raises(ValueError, match=r"which compress\(model, \.\.\.\) installs"):
            ManifoldCache(tiny("llama").config, KVConfig(**SETTINGS, budget=12))

    def test_stacking(self, tiny, prompt):
        model = tiny("llama")
        with compress(model, **SETTINGS, budget=12) as kv, torch.no_grad():
            model(prompt(1, 30)[0])
        with pytest.raises(ValueError, match="uniform budgets can be stacked"):
            ManifoldCache.stack([kv.cache, kv.cache])
