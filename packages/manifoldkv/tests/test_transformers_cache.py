"""ManifoldCache in real models: exact prefill, decoding as in an explicit reference, positions, padding, cropping."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldkv import KVConfig, ManifoldCache, score_keys, select
from manifoldkv.selection import select_per_window
from manifoldkv.windows import tumbling_bounds

transformers = pytest.importorskip("transformers")

from manifoldkv.integrations.transformers import CacheTrimError, UnsupportedModelError  # noqa: E402

DECODERS = [
    "llama",
    "llama3-rope",
    "qwen2",
    "qwen2-sliding",
    "qwen3",
    "phi3",
    "phi",
    "gemma2",
    "gemma3",
    "mistral",
    "cohere",
    "gpt_neox",
    "gpt2",
    "opt",
]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def config(**settings) -> KVConfig:
    return KVConfig(**{"metric": "l2", "n_sink": 2, "n_recent": 4} | settings)


class TestAgainstTheReference:
    """Decoding steps on what is stored equal dense attention with the evicted keys masked."""

    @pytest.mark.parametrize("name", DECODERS)
    def test_models(self, name, tiny, reference, forward_steps, prompt):
        model = tiny(name)
        ids, mask = prompt(2, 30, pads=[0, 5])
        settings = {"n_sink": 2, "n_recent": 4, "budget": 14, "interval": 5, "phase": "both"}
        explicit = reference(model, metric="l2", **settings)
        with explicit:
            first, later, tokens = forward_steps(model, ids, mask, explicit.cache(), steps=14)
        cache = ManifoldCache(model.config, KVConfig(metric="l2", **settings), padding_mask=mask)
        own_first, own_later, _ = forward_steps(model, ids, mask, cache, tokens, steps=14)
        valid = mask.bool()
        torch.testing.assert_close(own_first[valid], first[valid], **CLOSE)
        torch.testing.assert_close(own_later, later, **CLOSE)
        layers = len(cache.manifold_layers)
        assert [stats.evictions for stats in cache.stats()] == [3] * layers
        assert len(explicit.evictions) == 3 * layers
        dense = forward_steps(model, ids, mask, transformers.DynamicCache(config=model.config), tokens, steps=14)[1]
        assert float((dense - later).abs().max()) > 0.05  # the evictions matter to the logits

    @pytest.mark.parametrize("metric", ["l2", "cosine", "cosine_mean"])
    @pytest.mark.parametrize("phase", ["prefill", "chunked", "decode", "both"])
    @pytest.mark.parametrize("size", [{"budget": 12}, {"compression_ratio": 0.6}])
    def test_phases_and_metrics(self, metric, phase, size, tiny, reference, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(3, 30, pads=[0, 3, 20])
        chunk = 8 if phase == "chunked" else None
        explicit = reference(
            model, metric=metric, phase=phase, interval=4, n_sink=1, n_recent=3,
            budget=size.get("budget"), ratio=size.get("compression_ratio"),
        )  # fmt: skip
        with explicit:
            first, later, tokens = forward_steps(model, ids, mask, explicit.cache(), steps=12, chunk=chunk)
        cfg = KVConfig(metric=metric, phase=phase, interval=4, n_sink=1, n_recent=3, **size)
        cache = ManifoldCache(model.config, cfg, padding_mask=mask)
        own_first, own_later, _ = forward_steps(model, ids, mask, cache, tokens, steps=12, chunk=chunk)
        torch.testing.assert_close(own_first[mask.bool()], first[mask.bool()], **CLOSE)
        torch.testing.assert_close(own_later, later, **CLOSE)
        for layer in range(2):
            for row in range(3):
                for head in range(2):
                    own = stored_columns(cache.layers[layer], mask, row, head)
                    valid = torch.cat((mask[row], torch.ones(12))).bool()
                    assert own == (explicit.alive[layer][row, head] & valid).nonzero()[:, 0].tolist()


def stored_columns(layer, mask, row: int, head: int) -> list[int]:
    """Columns of the batch whose tokens a head stores, from the layer's record of logical positions."""
    pads = int((mask[row] == 0).sum())
    empty = 0 if layer.pads is None else int(layer.pads[row])
    return (layer.stored_positions()[row, head, empty:] + pads).tolist()


class TestAgainstTheReferenceMore:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
    def test_beam_search(self, phase, padded, tiny, reference, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 26, pads=[0, 7] if padded else None)
        mask = torch.ones_like(ids) if mask is None else mask
        settings = {"metric": "l2", "budget": 10, "interval": 4, "phase": phase, "n_sink": 1, "n_recent": 3}
        beams = {"num_beams": 3, "max_new_tokens": 14, "do_sample": False, "num_return_sequences": 3}
        beams |= {"output_scores": True, "return_dict_in_generate": True, "attention_mask": mask}
        explicit = reference(model, **settings)
        with explicit:
            expected = model.generate(ids, past_key_values=explicit.cache(), **beams)
        cache = ManifoldCache(model.config, KVConfig(**settings), padding_mask=mask.repeat_interleave(3, 0))
        got = model.generate(ids, past_key_values=cache, **beams)
        assert got.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, **CLOSE)
        reordered = expected.beam_indices[:, :-1] if expected.beam_indices is not None else None
        assert reordered is not None
        assert len({tuple(row) for row in reordered.tolist()}) > 1  # beams did cross
        assert all(stats.evictions >= 1 for stats in cache.stats())
        dense = model.generate(ids, **beams)
        assert dense.sequences.tolist() != expected.sequences.tolist()

    @pytest.mark.parametrize("phase", ["prefill", "both"])
    def test_budgets_per_head(self, phase, tiny, reference, forward_steps, prompt):
        from manifoldkv import compress

        model = tiny("llama")
        ids, mask = prompt(3, 30, pads=[0, 3, 20])
        settings = {"metric": "l2", "budget": 12, "interval": 4, "phase": phase, "n_sink": 1, "n_recent": 3}
        explicit = reference(model, adaptive=True, **settings)
        with explicit:
            first, later, tokens = forward_steps(model, ids, mask, explicit.cache(), steps=10)
        with compress(model, KVConfig(head_budget="adaptive", **settings)) as kv:
            cache = ManifoldCache(model.config, kv.cfg, per_head=True)
            own_first, own_later, _ = forward_steps(model, ids, mask, cache, tokens, steps=10)
        torch.testing.assert_close(own_first[mask.bool()], first[mask.bool()], **CLOSE)
        torch.testing.assert_close(own_later, later, **CLOSE)
        counts = [alive[0].sum(-1).tolist() for _, _, alive in explicit.evictions]
        assert any(len(set(heads)) > 1 for heads in counts)  # the heads did differ

    def test_the_prompts_own_outputs_are_those_of_a_dense_cache(self, tiny, forward_steps, prompt):
        for name in ("llama", "phi", "gemma3"):
            model = tiny(name)
            ids, mask = prompt(2, 40, pads=[0, 9])
            cache = ManifoldCache(model.config, config(compression_ratio=0.75), padding_mask=mask)
            dense = transformers.DynamicCache(config=model.config)
            own, expected = (forward_steps(model, ids, mask, c)[0] for c in (cache, dense))
            assert torch.equal(own, expected)
            assert {stats.stored_length for stats in cache.stats()} == {10}


class TestDense:
    """Where nothing has to go, a compressed cache is a DynamicCache."""

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    @pytest.mark.parametrize(
        "settings",
        [
            {"compression_ratio": 0.0},
            {"compression_ratio": 0.0, "phase": "both", "interval": 100},
            {"budget": 60, "phase": "both"},
            {"budget": 60, "phase": "chunked"},
            {"budget": 20},
        ],
    )
    def test_generates_the_same_tokens_on_the_same_keys(self, name, settings, tiny, prompt):
        model = tiny(name)
        ids, mask = prompt(2, 20, pads=[0, 6])
        cache = ManifoldCache(model.config, config(**settings), padding_mask=mask)
        dense = transformers.DynamicCache(config=model.config)
        own, expected = (
            model.generate(ids, attention_mask=mask, past_key_values=c, max_new_tokens=25, do_sample=False)
            for c in (cache, dense)
        )
        assert own.tolist() == expected.tolist()
        for mine, theirs in zip(cache.layers, dense.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
        assert [stats.evictions for stats in cache.stats()] == [0] * len(cache.manifold_layers)

    def test_ratio_zero_copies_nothing(self, tiny):
        cache = ManifoldCache(tiny("llama").config, config(compression_ratio=0))
        keys, values = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        full = cache.update(keys, values, 0)
        assert full[0] is cache.layers[0].keys
        assert full[1] is cache.layers[0].values
        assert torch.equal(full[0], keys)
        assert cache.layers[0].positions is None


class TestRowsOfABatch:
    """A left-padded row gets what it would get alone."""

    @pytest.mark.parametrize(
        ("metric", "window"),
        [(metric, None) for metric in ("l2", "cosine", "cosine_mean", "knorm", "decomposed", "random", "streaming")]
        + [(metric, 6) for metric in ("l2", "cosine", "cosine_mean", "decomposed")],
    )
    def test_prefill(self, metric, window, tiny, forward_steps, prompt):
        allocation = "global" if window is None else "per_window"
        cfg = config(metric=metric, budget=12, window=window, allocation=allocation)
        self.check(cfg, [0, 4, 24], 34, tiny, forward_steps, prompt, steps=6)

    def test_both_phases_where_every_row_fills_the_budget(self, tiny, forward_steps, prompt):
        self.check(config(budget=12, phase="both", interval=4), [0, 4, 11], 34, tiny, forward_steps, prompt, steps=14)

    def test_chunks_where_padding_is_whole_chunks(self, tiny, forward_steps, prompt):
        cfg = config(budget=12, phase="chunked")
        self.check(cfg, [0, 8, 24], 40, tiny, forward_steps, prompt, steps=5, chunk=8)

    def test_evictable_centroid(self, tiny, forward_steps, prompt):
        self.check(config(budget=12, centroid="evictable"), [0, 4, 24], 34, tiny, forward_steps, prompt, steps=4)

    def test_scores_before_rotation(self, tiny, forward_steps, prompt):
        self.check(config(budget=12, space="pre"), [0, 4, 24], 34, tiny, forward_steps, prompt, steps=4)

    @staticmethod
    def check(cfg, pads, length, tiny, forward_steps, prompt, steps, chunk=None):
        model = tiny("llama")
        ids, mask = prompt(len(pads), length, pads=pads)
        cache = ManifoldCache(model.config, cfg, padding_mask=mask)
        first, later, tokens = forward_steps(model, ids, mask, cache, steps=steps, chunk=chunk)
        for row, empty in enumerate(pads):
            alone = ManifoldCache(model.config, cfg)
            own = ids[row : row + 1, empty:]
            single_first, single_later, _ = forward_steps(
                model, own, None, alone, tokens[row : row + 1], steps=steps, chunk=chunk
            )
            torch.testing.assert_close(first[row : row + 1, empty:], single_first, **CLOSE)
            torch.testing.assert_close(later[row : row + 1], single_later, **CLOSE)
            for together, single in zip(cache.layers, alone.layers, strict=True):
                front = int(together.pads[row])
                kept = together.stored_positions()[row, :, front:]
                assert kept.tolist() == single.stored_positions()[0].tolist()


class TestLengths:
    def test_logical_and_stored(self, tiny, forward_steps, prompt):
        model = tiny("gemma3")
        ids, _ = prompt(1, 30)
        cache = ManifoldCache(model.config, config(budget=10, phase="both", interval=3))
        forward_steps(model, ids, None, cache)
        assert (cache.get_seq_length(), cache.get_seq_length(1)) == (30, 30)
        assert cache.get_mask_sizes(1, 1) == (11, 20)
        assert cache.get_mask_sizes(4, 1) == (14, 20)
        assert cache.get_mask_sizes(1, 0) == (8, 23)  # the sliding layer keeps its own rule
        assert cache.layers[1].get_max_length() == -1
        assert type(cache.layers[0]) is transformers.cache_utils.DynamicSlidingWindowLayer
        stats = cache.stats()
        assert [(s.layer, s.logical_length, s.stored_length, s.evictions, s.metric) for s in stats] == [
            (1, 30, 10, 1, "l2")
        ]
        per_token = 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 float32
        assert (stats[0].stored_bytes, stats[0].dense_bytes) == (10 * per_token, 30 * per_token)

    def test_positions_after_several_evictions(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 20, pads=[0, 5])
        cache = ManifoldCache(model.config, config(budget=9, phase="both", interval=2), padding_mask=mask)
        _, _, tokens = forward_steps(model, ids, mask, cache, steps=11)
        dense = transformers.DynamicCache(config=model.config)
        forward_steps(model, ids, mask, dense, tokens, steps=11)
        layer = cache.layers[0]  # its keys depend on token and position only, so the dense ones are the same
        assert layer.evictions == 6
        for row, pads in enumerate((0, 5)):
            for head in range(2):
                columns = layer.positions[row, head] + pads
                torch.testing.assert_close(layer.keys[row, head], dense.layers[0].keys[row, head, columns], **CLOSE)
                torch.testing.assert_close(layer.values[row, head], dense.layers[0].values[row, head, columns], **CLOSE)
                assert bool((columns.diff() > 0).all())

    @pytest.mark.parametrize("interval", [1, 3, 8])
    def test_decoding_stays_bounded_and_keeps_the_recent(self, interval, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 30)
        cfg = config(budget=12, phase="both", interval=interval, n_sink=2, n_recent=5)
        cache = ManifoldCache(model.config, cfg)
        forward_steps(model, ids, None, cache)
        for step in range(1, 25):
            forward_steps(model, ids[:, step : step + 1], torch.ones(1, 30 + step, dtype=torch.long), cache)
            for layer in cache.layers:
                assert 12 <= layer.stored < 12 + interval or layer.stored == 12
                assert layer.logical == 30 + step
                for head in range(2):
                    positions = layer.positions[0, head].tolist()
                    assert positions[:2] == [0, 1]
                    assert positions[-5:] == list(range(25 + step, 30 + step))

    def test_decode_phase_leaves_the_prompt_until_the_interval_is_over(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 14)
        cache = ManifoldCache(model.config, config(budget=12, phase="decode", interval=4))
        stored = []
        for step in range(6):
            new = ids if step == 0 else ids[:, :1]
            forward_steps(model, new, torch.ones(1, 14 + step, dtype=torch.long), cache)
            stored.append(cache.layers[0].stored)
        assert stored == [14, 15, 12, 13, 14, 15]

    def test_ratio_while_decoding_is_the_share_of_the_prompt(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 20)
        cache = ManifoldCache(model.config, config(compression_ratio=0.5, phase="both", interval=3))
        forward_steps(model, ids, None, cache, steps=8)
        assert [s.stored_length for s in cache.stats()] == [12, 12]  # 10, then 11 and 12 twice over
        assert [s.evictions for s in cache.stats()] == [3, 3]

    def test_chunks_are_bounded(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 50)
        cache = ManifoldCache(model.config, config(budget=12, phase="chunked"))
        for start in range(0, 50, 10):
            forward_steps(model, ids[:, start : start + 10], torch.ones(1, start + 10, dtype=torch.long), cache)
            assert cache.layers[0].stored == min(12, start + 10)
        assert cache.get_seq_length() == 50

    def test_query_heads_do_not_matter(self, tiny, prompt, forward_steps):
        kept = []
        for heads in (2, 4, 8):
            model = tiny("llama", num_attention_heads=heads, head_dim=8)
            base = tiny("llama", num_attention_heads=2, head_dim=8)
            first, reference_first = model.model.layers[0], base.model.layers[0]
            model.model.embed_tokens.load_state_dict(base.model.embed_tokens.state_dict())
            first.self_attn.k_proj.load_state_dict(reference_first.self_attn.k_proj.state_dict())
            first.input_layernorm.load_state_dict(reference_first.input_layernorm.state_dict())
            ids, _ = prompt(2, 30)
            cache = ManifoldCache(model.config, config(budget=11))
            forward_steps(model, ids, None, cache)
            assert cache.layers[0].positions.shape == (2, 2, 11)
            kept.append(cache.layers[0].positions.tolist())
        assert kept[0] == kept[1] == kept[2]


class TestBookkeeping:
    """Any schedule of steps on bare tensors, against lists of columns kept by hand: no model, no batch, no padding."""

    @settings(max_examples=150)
    @given(data=st.data())
    def test_any_schedule(self, data, tiny):
        draw = data.draw
        steps = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9), label="steps")
        length = sum(steps)
        pads = [0, draw(st.integers(0, length), label="pads")]
        window = draw(st.sampled_from([None, None, 4]), label="window")
        budget = draw(st.integers(1, 12), label="budget")
        size = draw(st.sampled_from([{"budget": budget}, {"compression_ratio": 0.5}]), label="size")
        cfg = KVConfig(
            metric=draw(st.sampled_from(["l2", "cosine", "streaming"] if window is None else ["l2", "cosine"])),
            phase=draw(st.sampled_from(["prefill", "chunked", "decode", "both"]), label="phase"),
            interval=draw(st.integers(1, 6), label="interval"),
            n_sink=draw(st.integers(0, 3), label="n_sink"),
            n_recent=draw(st.integers(0, 4), label="n_recent"),
            window=window,
            allocation="global" if window is None else draw(st.sampled_from(["global", "per_window"])),
            centroid=draw(st.sampled_from(["all", "evictable"])),
            space=draw(st.sampled_from(["post", "pre"])),
            **size,
        )
        mask = torch.arange(length)[None] >= torch.tensor(pads)[:, None]
        cache = ManifoldCache(tiny("llama").config, cfg, padding_mask=mask)
        layer = cache.layers[0]
        keys = torch.randn(2, 2, length, 8, generator=torch.Generator().manual_seed(length + budget))
        kept: dict = {(row, head): [] for row in range(2) for head in range(2)}
        slots, stop, share = 0, 0, 0
        for step in steps:
            first, start, stop = stop == 0, stop, stop + step
            full = cache.update(keys[:, :, start:stop], -keys[:, :, start:stop], 0)
            slots += step
            assert full[0].shape == full[1].shape == (2, 2, slots, 8)
            for (row, _), columns in kept.items():
                columns += range(max(start, pads[row]), stop)
            share = cfg.keep_count(stop) if first or cfg.phase == "chunked" else share
            n = self.target(cfg, first, step, slots, share if cfg.budget is None else cfg.budget)
            if n is not None and n < slots:
                slots = n
                for (row, head), columns in kept.items():
                    self.evict(columns, keys[row, head], pads[row], n, cfg, layer.rotary)
            assert layer.get_mask_sizes(1) == (slots + 1, stop - slots)
            assert layer.get_seq_length() == stop
            for (row, head), columns in kept.items():
                assert len(columns) == min(len(columns), slots)
                front = slots - len(columns)
                assert (layer.stored_positions()[row, head, front:] + pads[row]).tolist() == columns
                assert torch.equal(layer.keys[row, head, front:], keys[row, head, columns])
                assert torch.equal(layer.values[row, head, front:], -keys[row, head, columns])
                assert (0 if layer.pads is None else int(layer.pads[row])) == front

    @staticmethod
    def target(cfg, first, step, slots, budget):
        if cfg.phase == "chunked":
            return budget if first or step > 1 else None
        if first:
            return budget if cfg.phase in ("prefill", "both") else None
        return budget if cfg.phase in ("decode", "both") and slots >= budget + cfg.interval else None

    @staticmethod
    def evict(columns, keys, pads, n, cfg, rotary):
        if len(columns) <= n:
            return
        positions = torch.tensor(columns)[None, None] - pads
        scores = score_keys(keys[None, None, columns], cfg, n=n, positions=positions, rotary=rotary)
        if cfg.allocation == "per_window":
            chosen = select_per_window(scores, n, tumbling_bounds(len(columns), cfg.window))
        else:
            chosen = select(scores, n)
        columns[:] = [columns[i] for i in chosen[0, 0].tolist()]

    @pytest.mark.parametrize("phase", ["prefill", "both"])
    def test_a_copy_goes_its_own_way(self, phase, tiny, forward_steps, prompt):
        """One compressed prompt, several continuations."""
        model = tiny("llama")
        ids, mask = prompt(2, 26, pads=[0, 6])
        cache = ManifoldCache(model.config, config(budget=9, phase=phase, interval=2), padding_mask=mask)
        forward_steps(model, ids, mask, cache)
        longer = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), -1)
        results = []
        for _ in range(2):
            branch = copy.deepcopy(cache)
            results.append(forward_steps(model, ids[:, :1], longer, branch, steps=5)[1])
            assert branch.get_seq_length() == 32
        assert torch.equal(*results)
        assert cache.get_seq_length() == 26
        assert [stats.evictions for stats in cache.stats()] == [1, 1]

    def test_half_precision_is_scored_as_stored(self, tiny, forward_steps, prompt):
        model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
        ids, _ = prompt(1, 40)
        cache = ManifoldCache(model.config, config(budget=15))
        first, later, _ = forward_steps(model, ids, None, cache, steps=3)
        assert first.dtype == later.dtype == cache.layers[0].keys.dtype == torch.bfloat16
        expected = select(score_keys(dense_keys(model, ids, forward_steps), config(budget=15)), 15)
        assert torch.equal(cache.layers[0].positions[..., :15], expected)


class TestMovingRows:
    def filled(self, tiny, forward_steps, prompt, **settings):
        model = tiny("llama")
        ids, mask = prompt(3, 20, pads=[0, 4, 15])
        cache = ManifoldCache(model.config, config(**{"budget": 9} | settings), padding_mask=mask)
        forward_steps(model, ids, mask, cache)
        return cache

    @staticmethod
    def rows(cache):
        layer = cache.layers[1]
        tensors = (layer.keys, layer.values, layer.positions, layer.pads, layer.padded, cache.padding_mask)
        return [[tensor[row].tolist() for tensor in tensors] for row in range(layer.keys.shape[0])]

    def test_reorder(self, tiny, forward_steps, prompt):
        cache = self.filled(tiny, forward_steps, prompt)
        before = self.rows(cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert self.rows(cache) == [before[2], before[0], before[0]]

    def test_repeat(self, tiny, forward_steps, prompt):
        cache = self.filled(tiny, forward_steps, prompt)
        before = self.rows(cache)
        cache.batch_repeat_interleave(2)
        assert self.rows(cache) == [before[0], before[0], before[1], before[1], before[2], before[2]]

    @pytest.mark.parametrize("indices", [torch.tensor([2, 1]), torch.tensor([False, True, True])])
    def test_select(self, indices, tiny, forward_steps, prompt):
        cache = self.filled(tiny, forward_steps, prompt)
        before = self.rows(cache)
        cache.batch_select_indices(indices)
        expected = [before[2], before[1]] if indices.dtype == torch.int64 else before[1:]
        assert self.rows(cache) == expected

    def test_an_empty_cache_moves_nothing(self, tiny):
        cache = ManifoldCache(tiny("llama").config, config(budget=9))
        cache.reorder_cache(torch.tensor([0]))
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0]))
        assert cache.get_seq_length() == 0
        assert cache.get_mask_sizes(5, 0) == (5, 0)

    def test_reset_makes_it_new(self, tiny, forward_steps, prompt):
        cache = self.filled(tiny, forward_steps, prompt)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.padding_mask is None
        model = tiny("llama")
        ids, _ = prompt(1, 25, seed=3)
        fresh = ManifoldCache(model.config, config(budget=9))
        again, expected = (forward_steps(model, ids, None, c, steps=3)[1] for c in (cache, fresh))
        assert torch.equal(again, expected)
        assert cache.stats() == fresh.stats()


class TestCrop:
    def test_within_the_recent_window(self, tiny, reference, forward_steps, prompt):
        """Back to before the last three tokens: what follows is dense attention over what is left of the selection."""
        model = tiny("llama")
        ids, mask = prompt(2, 24, pads=[0, 18])
        settings = {"metric": "l2", "budget": 10, "n_sink": 2, "n_recent": 4}
        other = ids[:, 2:8]
        explicit = reference(model, **settings)
        with explicit:
            dense = explicit.cache()
            forward_steps(model, ids, mask, dense)
            dense.crop(-3)
            explicit.alive = {layer: alive[..., :-3] for layer, alive in explicit.alive.items()}
            longer = torch.cat((mask[:, :21], torch.ones_like(other)), -1)
            expected = forward_steps(model, other, longer, dense)[0]
        cache = ManifoldCache(model.config, KVConfig(**settings), padding_mask=mask)
        forward_steps(model, ids, mask, cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 21
        assert cache.get_mask_sizes(1, 0) == (8, 14)
        assert cache.layers[0].pads.tolist() == [0, 4]
        torch.testing.assert_close(forward_steps(model, other, longer, cache)[0], expected, **CLOSE)

    def test_before_any_eviction_it_is_exact(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 24, pads=[0, 6])
        cache = ManifoldCache(model.config, config(budget=40), padding_mask=mask)
        forward_steps(model, ids, mask, cache)
        cache.crop(-10)
        short = ManifoldCache(model.config, config(budget=40), padding_mask=mask)
        forward_steps(model, ids[:, :14], mask[:, :14], short)
        assert cache.get_seq_length() == 14
        torch.testing.assert_close(cache.layers[1].keys, short.layers[1].keys, **CLOSE)
        assert torch.equal(cache.layers[1].stored_positions(), short.layers[1].stored_positions())

    def test_into_the_padding(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 24, pads=[0, 14])
        cfg = config(budget=12)
        cache = ManifoldCache(model.config, config(budget=40), padding_mask=mask)
        forward_steps(model, ids, mask, cache)
        cache.crop(-14)
        layer = cache.layers[0]
        assert layer.pads.tolist() == [0, 10]
        assert layer.padded.tolist() == [0, 10]
        assert layer.valid_mask().sum(-1).tolist() == [10, 0]
        assert cfg.budget == 12

    @pytest.mark.parametrize("remove", [-5, -9, -23])
    def test_beyond_what_is_whole(self, remove, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 24)
        cache = ManifoldCache(model.config, config(budget=8, n_recent=3, metric="knorm"))
        forward_steps(model, ids, None, cache)
        with pytest.raises(
            CacheTrimError, match=r"^layer \d: removing \d+ tokens reaches evicted ones; at most the last \d are"
        ):
            cache.crop(remove)

    def test_the_message_says_how_many_are_whole(self, tiny):
        cache = ManifoldCache(tiny("llama").config, config(budget=4, n_sink=0, n_recent=2, metric="streaming"))
        cache.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), 0)
        assert cache.layers[0].positions.tolist() == [[[5, 6, 7, 8]] * 2]
        with pytest.raises(CacheTrimError, match="at most the last 4 are still whole"):
            cache.layers[0].crop(-5)
        cache.layers[0].crop(-4)
        assert cache.layers[0].stored == 0
        assert cache.layers[0].get_seq_length() == 5

    def test_a_refused_crop_changes_no_layer(self, tiny):
        """Layers evict different tokens; one that can't go back must not leave the others cropped."""
        cache = ManifoldCache(tiny("llama").config, config(budget=4, n_sink=0, n_recent=1))
        near = torch.zeros(1, 2, 9, 8)
        near[:, :, -4:] = 5 * torch.randn(
            1, 2, 4, 8, generator=torch.Generator().manual_seed(0)
        )  # layer 0 keeps the last four
        far = torch.zeros(1, 2, 9, 8)
        far[:, :, :4] = 5 * torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))  # layer 1 does not
        cache.update(near, near, 0)
        cache.update(far, far, 1)
        assert cache.layers[0].positions[0, 0].tolist() == [5, 6, 7, 8]
        assert cache.layers[1].positions[0, 0, -2:].tolist() != [7, 8]
        with pytest.raises(CacheTrimError, match=r"^layer 1"):
            cache.crop(-2)
        assert [layer.logical for layer in cache.layers] == [9, 9]
        assert [layer.stored for layer in cache.layers] == [4, 4]

    def test_zero_and_the_older_form(self, tiny):
        cache = ManifoldCache(tiny("llama").config, config(budget=20))
        for layer in (0, 1):
            cache.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), layer)
        cache.crop(0)
        assert cache.get_seq_length() == 9
        cache.crop(30)  # longer than it is: nothing to do
        assert cache.get_seq_length() == 9
        cache.crop(7)
        assert cache.get_seq_length() == 7
        with pytest.raises(CacheTrimError, match=r"^layer 0: can't remove 8 of 7 tokens"):
            cache.crop(-8)


class TestFaultyKeys:
    def test_a_head_of_nan_names_layer_and_head(self, tiny, prompt, forward_steps):
        cache = ManifoldCache(tiny("llama").config, config(budget=4))
        keys = torch.randn(1, 2, 9, 8)
        cache.update(keys, keys, 0)
        keys[:, 1] = torch.nan
        with pytest.raises(FloatingPointError, match=r"^layer 1, key-value head 1: every key is NaN"):
            cache.update(keys, keys, 1)

    def test_faulty_keys_go_before_padding_does(self, tiny):
        """Padding left over stays the first slots, whatever the keys hold: the model's mask relies on it."""
        mask = torch.arange(10)[None] >= 4
        cache = ManifoldCache(tiny("llama").config, config(budget=6, n_sink=0, n_recent=0), padding_mask=mask)
        keys = torch.randn(1, 2, 10, 8)
        keys[:, 0, 7] = torch.nan
        cache.update(keys, keys, 0)
        layer = cache.layers[0]
        assert layer.pads.tolist() == [0]
        assert layer.positions.tolist() == [[[0, 1, 2, 3, 4, 5]] * 2]


class TestOtherSources:
    def test_from_dense_equals_a_compressed_prefill(self, tiny, forward_steps, prompt):
        for name in ("llama", "gemma3"):
            model = tiny(name)
            ids, mask = prompt(2, 30, pads=[0, 6])
            dense = transformers.DynamicCache(config=model.config)
            forward_steps(model, ids, mask, dense)
            cfg = config(budget=11, phase="both", interval=3)
            after = ManifoldCache.from_dense(dense, model.config, cfg, mask)
            during = ManifoldCache(model.config, cfg, mask)
            forward_steps(model, ids, mask, during)
            assert after.stats() == during.stats()
            assert dense.get_seq_length() == 30
            token = ids[:, 5:6]
            longer = torch.cat((mask, torch.ones_like(token)), -1)
            results = [forward_steps(model, token, longer, c, steps=4)[1] for c in (after, during)]
            assert torch.equal(*results)

    def test_stacked_rows_decode_like_single_ones(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(2, 30)
        cfg = config(budget=11)
        single = []
        for row in range(2):
            single.append(ManifoldCache(model.config, cfg))
            forward_steps(model, ids[row : row + 1], None, single[row])
        stacked = ManifoldCache.stack(single)
        token, mask = ids[:, 3:4], torch.ones(2, 31, dtype=torch.long)
        together = forward_steps(model, token, mask, stacked, steps=3)[1]
        for row in range(2):
            alone = forward_steps(model, token[row : row + 1], mask[:1], single[row], steps=3)[1]
            torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)


class TestAutomaticMetric:
    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    @pytest.mark.filterwarnings("ignore:the metric is chosen from")
    def test_deferred_to_the_end_of_the_step_it_equals_choosing_first(self, phase, tiny, forward_steps, prompt):
        from manifoldkv.geometry import diagnose_keys

        model = tiny("llama")
        ids, mask = prompt(2, 40, pads=[0, 6])
        settings = {"budget": 11, "phase": phase, "interval": 3}
        auto = ManifoldCache(model.config, config(metric="auto", **settings), padding_mask=mask)
        first, later, tokens = forward_steps(model, ids, mask, auto, steps=4)
        dense = transformers.DynamicCache(config=model.config)
        steps = 1 if phase == "decode" else 0
        forward_steps(model, ids, mask, dense, tokens, steps=steps)
        longer = torch.cat((mask, torch.ones(2, steps, dtype=torch.long)), -1)
        metric = diagnose_keys([layer.keys for layer in dense.layers], longer).metric
        assert [stats.metric for stats in auto.stats()] == [metric] * 2
        assert auto.choice.diagnosis.metric == metric
        chosen = ManifoldCache(model.config, config(metric=metric, **settings), padding_mask=mask)
        own_first, own_later, _ = forward_steps(model, ids, mask, chosen, tokens, steps=4)
        assert torch.equal(first, own_first)
        assert torch.equal(later, own_later)

    @pytest.mark.filterwarnings("ignore:the metric is chosen from")
    def test_per_layer(self, tiny, forward_steps, prompt):
        from manifoldkv.geometry import diagnose_keys

        model = tiny("llama")
        ids, _ = prompt(1, 60)
        auto = ManifoldCache(model.config, config(metric="auto", budget=11, per_layer=True))
        forward_steps(model, ids, None, auto)
        dense = transformers.DynamicCache(config=model.config)
        forward_steps(model, ids, None, dense)
        assert [s.metric for s in auto.stats()] == [diagnose_keys([layer.keys]).metric for layer in dense.layers]

    def test_a_prompt_too_short_to_diagnose_takes_the_metric_of_the_paper(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 9)
        for per_layer in (False, True):
            auto = ManifoldCache(model.config, config(metric="auto", budget=5, per_layer=per_layer))
            with pytest.warns(
                UserWarning, match=r"^metric='auto' can't be chosen from so short a prompt .*'l2' is used"
            ):
                forward_steps(model, ids, None, auto)
            assert [s.metric for s in auto.stats()] == ["l2", "l2"]

    def test_a_short_prompt_does_not_settle_it_for_the_next(self, tiny, forward_steps, prompt):
        from manifoldkv.integrations.transformers import MetricChoice

        model = tiny("llama")
        cfg = config(metric="auto", budget=20)
        choice = MetricChoice(cfg)
        with pytest.warns(UserWarning, match="chosen from 40 tokens"):
            forward_steps(model, prompt(1, 40)[0], None, ManifoldCache(model.config, cfg, choice=choice))
        assert choice.settled is None
        forward_steps(model, prompt(1, 300)[0], None, ManifoldCache(model.config, cfg, choice=choice))
        assert choice.settled == choice.diagnosis.metric
        settled = choice.diagnosis
        forward_steps(model, prompt(1, 300, seed=5)[0], None, ManifoldCache(model.config, cfg, choice=choice))
        assert choice.diagnosis is settled


class TestPreRotation:
    @pytest.mark.parametrize("name", ["llama", "llama3-rope", "phi", "cohere", "qwen3", "gpt_neox"])
    def test_selects_by_the_keys_before_rotation(self, name, tiny, forward_steps, prompt):
        """Layer 0 against the output of its own key projection (and norm)."""
        model = tiny(name)
        ids, _ = prompt(1, 40)
        seen = {}
        attention = (model.model if hasattr(model, "model") else model.gpt_neox).layers[0]
        attention = getattr(attention, "self_attn", None) or attention.attention
        source = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None) or attention.query_key_value
        hook = source.register_forward_hook(lambda module, args, out: seen.update(out=out))
        cache = ManifoldCache(model.config, config(budget=15, space="pre"))
        forward_steps(model, ids, None, cache)
        hook.remove()
        out = seen["out"]
        if name == "gpt_neox":
            plain = out.view(1, 40, 4, 3, 8)[..., 1, :].transpose(1, 2)
        else:
            plain = out.view(1, 40, -1, 8).transpose(1, 2)
        expected = select(score_keys(plain, config(budget=15)), 15)
        assert cache.layers[0].positions.tolist() == expected.tolist()
        after = score_keys(dense_keys(model, ids, forward_steps), config(budget=15))
        assert not torch.allclose(after, score_keys(plain, config(budget=15)), atol=1e-2)

    def test_models_without_a_rotation(self, tiny):
        with pytest.raises(ValueError, match=r"^space='pre' needs rotary position embedding, which gpt2 doesn't have"):
            ManifoldCache(tiny("gpt2").config, config(budget=8, space="pre"))


def dense_keys(model, ids, forward_steps):
    cache = transformers.DynamicCache(config=model.config)
    forward_steps(model, ids, None, cache)
    return cache.layers[0].keys


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_nothing_to_compress_to(self, tiny):
        with pytest.raises(ValueError, match=r"^nothing to compress to: give compression_ratio"):
            ManifoldCache(tiny("llama").config, config())

    def test_budget_beyond_the_context(self, tiny):
        with pytest.raises(ValueError, match=r"^budget=513 is larger than the model's context of 512 tokens"):
            ManifoldCache(tiny("llama").config, config(budget=513))
        assert ManifoldCache(tiny("llama").config, config(budget=512)).get_seq_length() == 0

    def test_not_a_config(self, tiny):
        with pytest.raises(TypeError, match=r"^cfg must be a KVConfig, not dict"):
            ManifoldCache(tiny("llama").config, {"budget": 4})

    def test_adaptive_needs_compress(self, tiny):
        with pytest.raises(ValueError, match=r"^head_budget='adaptive' needs a mask per head, which compress"):
            ManifoldCache(tiny("llama").config, config(budget=4, head_budget="adaptive"))

    @pytest.mark.parametrize(
        "mask", [[[1, 1, 1, 0]], [[1, 1, 0, 1]], [[0, 1, 0, 1]], [[1, 1, 1, 1], [1, 0, 0, 0]]], ids=str
    )
    def test_right_padding_and_holes(self, mask, tiny):
        with pytest.raises(
            ValueError, match=r"^attention_mask has 0 after 1 \(right padding or a hole\).*padding_side='left'"
        ):
            ManifoldCache(tiny("llama").config, config(budget=4), padding_mask=torch.tensor(mask))

    @pytest.mark.parametrize(
        ("mask", "got"),
        [
            (torch.ones(1, 1, 4, 4), r"shape \(1, 1, 4, 4\)"),
            (torch.ones(4), r"shape \(4,\)"),
            ({"full_attention": torch.ones(1, 4)}, "type dict"),
        ],
    )
    def test_masks_of_another_form(self, mask, got, tiny):
        cache = ManifoldCache(tiny("llama").config, config(budget=4))
        with pytest.raises(ValueError, match=rf"^attention_mask has {got}; compression needs the 2-D mask"):
            cache.set_padding_mask(mask)

    def test_rows_heads_and_values_must_agree(self, tiny):
        def keys(*shape):
            return torch.randn(*shape, 8)

        cache = ManifoldCache(tiny("llama").config, config(budget=4))
        with pytest.raises(ValueError, match=r"^layer 0: keys \(1, 2, 9, 8\) and values \(1, 2, 8, 8\) differ"):
            cache.update(keys(1, 2, 9), keys(1, 2, 8), 0)
        cache.update(keys(1, 2, 9), keys(1, 2, 9), 0)
        with pytest.raises(
            ValueError, match=r"^layer 0: the cache holds 1 rows and 2 key-value heads, but the step brings 2 and 2"
        ):
            cache.update(keys(2, 2, 1), keys(2, 2, 1), 0)
        with pytest.raises(
            ValueError, match=r"^layer 0: the cache holds 1 rows and 2 key-value heads, but the step brings 1 and 4"
        ):
            cache.update(keys(1, 4, 1), keys(1, 4, 1), 0)
        padded = ManifoldCache(tiny("llama").config, config(budget=4), padding_mask=torch.tensor([[0, 1], [1, 1]]))
        with pytest.raises(ValueError, match=r"^the padding mask has 2 rows, but the step has 1"):
            padded.update(keys(1, 2, 2), keys(1, 2, 2), 0)

    def test_a_batch_of_nothing_but_padding_in_one_row(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 20, pads=[0, 20])
        cache = ManifoldCache(model.config, config(budget=8), padding_mask=mask)
        first, later, _ = forward_steps(model, ids, mask, cache, steps=3)
        assert bool(torch.isfinite(later).all())
        alone = ManifoldCache(model.config, config(budget=8))
        expected = forward_steps(model, ids[:1], None, alone, steps=3)[1]
        torch.testing.assert_close(later[:1], expected, **CLOSE)
        assert first.shape == (2, 20, 61)

    @pytest.mark.parametrize(
        ("config_class", "settings", "error", "message"),
        [
            ("MambaConfig", {}, UnsupportedModelError, "mamba has no full-attention layer"),
            ("Mamba2Config", {}, UnsupportedModelError, "mamba2 has no full-attention layer"),
            (
                "MistralConfig",
                {},
                UnsupportedModelError,
                r"mistral has no full-attention layer \(its layers are sliding_attention\)",
            ),
            (
                "DeepseekV3Config",
                {},
                NotImplementedError,
                r"deepseek_v3, layer 0: latent \(MLA\) caches aren't supported",
            ),
            (
                "DeepseekV2Config",
                {},
                NotImplementedError,
                r"deepseek_v2, layer 0: latent \(MLA\) caches aren't supported",
            ),
            ("BloomConfig", {}, UnsupportedModelError, "bloom: attention depends on the slot of a key"),
            ("MptConfig", {}, UnsupportedModelError, "mpt: attention depends on the slot of a key"),
            ("FalconConfig", {"alibi": True}, UnsupportedModelError, "falcon: attention depends on the slot of a key"),
            ("T5Config", {}, UnsupportedModelError, "t5: attention depends on the slot of a key"),
            ("GPTNeoConfig", {}, UnsupportedModelError, "gpt_neo: attention depends on the slot of a key"),
            ("FalconH1Config", {}, UnsupportedModelError, "falcon_h1, layer 0: cache type 'hybrid'"),
            ("RwkvConfig", {}, UnsupportedModelError, "rwkv doesn't keep its state in a transformers Cache"),
            ("MllamaTextConfig", {}, UnsupportedModelError, "mllama_text_model: cross-attention shares the cache"),
        ],
    )
    def test_models_that_cannot_be_served_are_named(self, config_class, settings, error, message):
        with pytest.raises(error, match=f"^{message}"):
            ManifoldCache(getattr(transformers, config_class)(**settings), config(budget=4))
