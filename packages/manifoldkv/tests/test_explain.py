"""explain(): the parts of a score add up, the text shows what went, wrong indices are named."""

from __future__ import annotations

import pytest
import torch

from manifoldkv import KVConfig, ManifoldCache, compress

transformers = pytest.importorskip("transformers")

from manifoldkv.integrations.transformers.explain import Explanation  # noqa: E402

SMALL = {"metric": "l2", "n_sink": 2, "n_recent": 4}


class Words:
    """A tokenizer whose token ``i`` reads ``<i>``."""

    @staticmethod
    def decode(ids):
        return "".join(f"<{int(i)}>" for i in ids)


def keys_of(model, ids, mask=None):
    """Keys of the prompt, layer by layer."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return [layer.keys for layer in cache.layers]


class TestParts:
    @pytest.mark.parametrize("pads", [None, [0, 9]])
    def test_radial_and_angular_add_up_to_the_squared_distance(self, pads, tiny, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 30, pads=pads)
        with torch.no_grad():
            with compress(model, **SMALL, budget=12, trace=True) as kv:
                model(ids, attention_mask=mask)
            with compress(model, metric="l2", compression_ratio=0.0) as whole:
                model(ids, attention_mask=mask)
        for row, front in enumerate(pads or [0, 0]):
            found = kv.explain(1, 1, Words, row=row)
            keys = whole.cache.layers[1].keys[row, 1, front:].double()
            centroid = keys.mean(0)
            distance = (keys - centroid).square().sum(-1)
            radial = (keys.norm(dim=-1) - centroid.norm()).square()
            total = torch.tensor(found.radial) + torch.tensor(found.angular)
            torch.testing.assert_close(total.double(), distance, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(torch.tensor(found.radial).double(), radial, atol=1e-5, rtol=1e-5)
            scores = torch.tensor(found.scores)
            free = scores.isfinite()
            assert (~free).sum() == 6  # 2 sinks and 4 recent tokens are protected
            torch.testing.assert_close(scores[free].double().square(), distance[free], atol=1e-5, rtol=1e-5)
            assert len(found.tokens) == 30 - front
            kept = kv.cache.layers[1].positions[row, 1].tolist()
            assert [place for place, stays in enumerate(found.kept) if stays] == kept


class TestText:
    def test_evicted_spans_stand_in_brackets(self):
        found = Explanation(
            0, 0, "l2", ("a ", "b ", "c ", "d ", "e"), (True, False, False, True, False), *[(0.0,) * 5] * 3
        )
        assert found.text() == "a [-b c -]d [-e-]"
        kept = Explanation(0, 0, "l2", ("a ", "b"), (True, True), *[(0.0,) * 2] * 3)
        assert kept.text() == "a b"
        gone = Explanation(0, 0, "l2", ("a ", "b"), (False, False), *[(0.0,) * 2] * 3)
        assert gone.text() == "[-a b-]"

    def test_the_whole_prompt_is_shown(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 30)
        with compress(model, **SMALL, budget=12, trace=True) as kv, torch.no_grad():
            model(ids)
        found = kv.explain(0, 1, Words)
        assert found.text().replace("[-", "").replace("-]", "") == Words.decode(ids[0])
        kept = kv.cache.layers[0].positions[0, 1].tolist()
        for place, stays in enumerate(found.kept):
            assert stays == (place in kept)
        printed = str(found)
        assert printed.startswith("layer 0, key-value head 1, metric l2: 12 of 30 tokens kept")
        assert len(printed.splitlines()) == 4 + 20

    def test_words_keep_the_spaces_between_them(self, tiny, tiny_folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
        text = "the sky is blue . the grass is green . the sun is yellow ."
        ids = tokenizer(text, return_tensors="pt").input_ids
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
        with compress(model, **SMALL, budget=8, trace=True) as kv, torch.no_grad():
            model(ids)
        assert kv.explain(0, 0, tokenizer).text().replace("[-", "").replace("-]", "") == text

    def test_rows_are_ordered_by_score(self):
        scores = (1.0, 3.0, 2.0, 3.0)
        found = Explanation(0, 0, "l2", tuple("abcd"), (False, True, False, True), scores, scores, scores)
        assert [row[0] for row in found.rows()] == [1, 3, 2, 0]
        assert [row[0] for row in found.rows(1)] == [1, 0]
        assert found.rows(1)[0] == (1, "b", True, 3.0, 3.0, 3.0)


class TestWhen:
    def test_while_decoding_the_generated_tokens_are_explained_too(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 12)
        with compress(model, **SMALL, budget=12, phase="decode", interval=5, trace=True) as kv:
            out = model.generate(ids, max_new_tokens=9, do_sample=False)
        found = kv.explain(0, 0, Words)
        assert len(found.tokens) == len(found.kept) == 17
        assert "".join(found.tokens) == Words.decode(out[0, :17])

    def test_the_second_prompt_replaces_the_first(self, tiny, prompt):
        model = tiny("llama")
        first, second = prompt(1, 30)[0], prompt(1, 25, seed=1)[0]
        with compress(model, **SMALL, budget=12, trace=True) as kv, torch.no_grad():
            model(first)
            model(second)
        assert "".join(kv.explain(0, 0, Words).tokens) == Words.decode(second[0])


class TestBadInput:
    @pytest.fixture
    def traced(self, tiny, prompt):
        model = tiny("qwen2-sliding")
        ids, mask = prompt(2, 30, pads=[0, 9])
        with compress(model, **SMALL, budget=12, trace=True) as kv, torch.no_grad():
            model(ids, attention_mask=mask)
        return kv

    def test_wrong_indices(self, traced):
        with pytest.raises(ValueError, match=r"layer=0 is not a compressed layer; those are 1"):
            traced.explain(0, 0, Words)
        with pytest.raises(ValueError, match=r"head=2 is not one of the 2 key-value heads \(0 \.\.\. 1\)"):
            traced.explain(1, 2, Words)
        with pytest.raises(ValueError, match=r"head=-1"):
            traced.explain(1, -1, Words)
        for row in (2, -1):
            with pytest.raises(ValueError, match=rf"row={row} is not one of the 2 rows"):
                traced.explain(1, 0, Words, row=row)

    def test_without_a_trace(self, tiny, prompt):
        model = tiny("llama")
        with compress(model, **SMALL, budget=12) as kv, torch.no_grad():
            model(prompt(1, 30)[0])
        with pytest.raises(RuntimeError, match="trace=True"):
            kv.explain(0, 0, Words)

    def test_when_nothing_was_evicted(self, tiny, prompt):
        model = tiny("llama")
        with compress(model, **SMALL, budget=12, trace=True) as kv, torch.no_grad():
            with pytest.raises(RuntimeError, match="nothing has been evicted"):
                kv.explain(0, 0, Words)
            model(prompt(1, 10)[0])
        with pytest.raises(RuntimeError, match="nothing has been evicted"):
            kv.explain(0, 0, Words)

    def test_embeddings_have_no_text(self, tiny, prompt):
        model = tiny("llama")
        embeddings = model.get_input_embeddings()(prompt(1, 30)[0])
        with compress(model, **SMALL, budget=12, trace=True) as kv, torch.no_grad():
            model(inputs_embeds=embeddings)
        with pytest.raises(RuntimeError, match="inputs_embeds"):
            kv.explain(0, 0, Words)


def test_a_cache_by_hand_traces_too(tiny, prompt):
    model = tiny("llama")
    cache = ManifoldCache(model.config, KVConfig(**SMALL, budget=12), trace=True)
    ids = prompt(1, 30)[0]
    with torch.no_grad():
        model(ids, past_key_values=cache)
    trace = cache.layers[0].trace
    keys = keys_of(model, ids)[0]
    torch.testing.assert_close(
        trace.radial + trace.angular, (keys - keys.mean(2, keepdim=True)).square().sum(-1), atol=1e-4, rtol=1e-4
    )
    assert trace.kept.sum(-1).tolist() == [[12, 12]]
