"""``with compress(model, ...)``: generation on a compressed cache, the model left as it was, wrong use refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from manifoldkv import KVConfig, ManifoldCache, compress

transformers = pytest.importorskip("transformers")

from manifoldkv.integrations.transformers import UnsupportedModelError  # noqa: E402

SETTINGS = {"metric": "l2", "budget": 10, "n_sink": 1, "n_recent": 3}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def state(model) -> tuple:
    """All that compress touches."""
    return (
        len(model._forward_pre_hooks),
        len(model._forward_hooks),
        model.__dict__.get("generate"),
        model.config._attn_implementation,
        model.generation_config.cache_implementation,
        {name for name in vars(model) if "manifoldkv" in name},
    )


class TestGenerate:
    @pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
    def test_equals_the_reference_and_a_cache_passed_by_hand(self, phase, tiny, reference, prompt):
        model = tiny("llama")
        ids, mask = prompt(3, 26, pads=[0, 5, 20])
        settings = SETTINGS | {"phase": phase, "interval": 4}
        explicit = reference(model, **settings)
        with explicit:
            expected = model.generate(ids, attention_mask=mask, past_key_values=explicit.cache(), **GREEDY)
        with compress(model, **settings) as kv:
            got = model.generate(ids, attention_mask=mask, **GREEDY)
        assert got.tolist() == expected.tolist()
        cache = ManifoldCache(model.config, KVConfig(**settings), padding_mask=mask)
        by_hand = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert by_hand.tolist() == expected.tolist()
        assert kv.stats() == cache.stats()
        assert kv.stats()[0].logical_length == 26 + 11  # the last token is never fed back
        assert got.tolist() != model.generate(ids, attention_mask=mask, **GREEDY).tolist()

    def test_beam_search_on_a_padded_batch(self, tiny, reference, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 26, pads=[0, 7])
        settings = SETTINGS | {"phase": "both", "interval": 4}
        beams = GREEDY | {"num_beams": 3, "attention_mask": mask}
        explicit = reference(model, **settings)
        with explicit:
            expected = model.generate(ids, past_key_values=explicit.cache(), **beams)
        with compress(model, **settings):
            got = model.generate(ids, **beams)
        assert got.tolist() == expected.tolist()

    @pytest.mark.parametrize("chunk", [1, 7, 13, 40])
    @pytest.mark.parametrize("size", [{"budget": 10}, {"budget": None, "compression_ratio": 0.6}])
    def test_chunked_prefill(self, chunk, size, tiny, reference, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 27, pads=[0, 9])
        settings = SETTINGS | {"phase": "chunked"} | size
        explicit = reference(
            model,
            metric="l2",
            phase="chunked",
            n_sink=1,
            n_recent=3,
            budget=size["budget"],
            ratio=size.get("compression_ratio"),
        )
        with explicit:
            _, _, tokens = forward_steps(model, ids, mask, explicit.cache(), steps=12, chunk=chunk)
        with compress(model, **settings) as kv:
            got = model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY)
        assert got[:, 27:].tolist() == tokens.tolist()
        assert kv.stats()[0].logical_length == 27 + 11

    def test_sampling_several_sequences(self, tiny, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 26, pads=[0, 7])
        with compress(model, **SETTINGS) as kv:
            torch.manual_seed(0)
            many = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=6,
                return_dict_in_generate=True,
            )
        assert many.sequences.shape == (6, 32)
        assert isinstance(many.past_key_values, ManifoldCache)
        assert many.past_key_values.layers[0].keys.shape[0] == 6
        assert kv.cache is many.past_key_values

    def test_from_embeddings(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        with compress(model, **SETTINGS):
            by_ids = model.generate(ids, **GREEDY)[:, 26:]
            by_embeddings = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
        assert by_embeddings.tolist() == by_ids.tolist()

    def test_each_prompt_gets_a_cache_of_its_own(self, tiny, prompt):
        model = tiny("llama")
        first, _ = prompt(1, 26)
        second, mask = prompt(2, 20, pads=[0, 8], seed=1)
        with compress(model, **SETTINGS) as kv:
            model.generate(first, **GREEDY)
            one = kv.cache
            both = model.generate(second, attention_mask=mask, **GREEDY)
            assert kv.cache is not one
        with compress(model, **SETTINGS):
            assert model.generate(second, attention_mask=mask, **GREEDY).tolist() == both.tolist()

    def test_a_conversation_goes_on_from_its_compressed_cache(self, tiny, reference, prompt):
        model = tiny("llama")
        first, _ = prompt(1, 26)
        more, _ = prompt(1, 5, seed=7)
        explicit = reference(model, **SETTINGS)
        with explicit:
            dense = explicit.cache()
            turn = model.generate(first, past_key_values=dense, **GREEDY)
            expected = model.generate(torch.cat((turn, more), -1), past_key_values=dense, **GREEDY)
        with compress(model, **SETTINGS) as kv:
            turn = model.generate(first, **GREEDY)
            got = model.generate(torch.cat((turn, more), -1), past_key_values=kv.cache, **GREEDY)
        assert got.tolist() == expected.tolist()
        assert kv.stats()[0].evictions == 1

    @pytest.mark.parametrize("name", ["qwen3", "phi", "gemma3", "qwen2-sliding"])
    def test_other_models(self, name, tiny, reference, prompt):
        model = tiny(name)
        ids, mask = prompt(2, 26, pads=[0, 5])
        settings = SETTINGS | {"phase": "both", "interval": 4}
        explicit = reference(model, **settings)
        with explicit:
            expected = model.generate(ids, attention_mask=mask, past_key_values=explicit.cache(), **GREEDY)
        with compress(model, **settings) as kv:
            got = model.generate(ids, attention_mask=mask, **GREEDY)
        assert got.tolist() == expected.tolist()
        assert len(kv.stats()) == sum(explicit.full)

    def test_budgets_per_head(self, tiny, reference, prompt):
        model = tiny("llama")
        ids, mask = prompt(3, 26, pads=[0, 5, 20])
        settings = SETTINGS | {"phase": "both", "interval": 4}
        explicit = reference(model, adaptive=True, **settings)
        beams = GREEDY | {"num_beams": 2, "attention_mask": mask}
        with explicit:
            expected = model.generate(ids, past_key_values=explicit.cache(), **beams)
        with compress(model, head_budget="adaptive", **settings):
            assert model.config._attn_implementation == "manifoldkv_per_head"
            got = model.generate(ids, **beams)
        assert got.tolist() == expected.tolist()
        assert model.config._attn_implementation == "sdpa"

    def test_a_cache_implementation_of_the_checkpoint_gives_way(self, tiny, prompt):
        """Gemma checkpoints ask for a hybrid static cache in their generation settings."""
        model = tiny("gemma3")
        ids, _ = prompt(1, 26)
        with compress(model, **SETTINGS):
            expected = model.generate(ids, **GREEDY)
        model.generation_config.cache_implementation = "hybrid"
        try:
            with compress(model, **SETTINGS) as kv:
                got = model.generate(ids, **GREEDY)
                by_hand = ManifoldCache(model.config, KVConfig(**SETTINGS))
                again = model.generate(ids, past_key_values=by_hand, **GREEDY)
            assert model.generation_config.cache_implementation == "hybrid"
        finally:
            model.generation_config.cache_implementation = None
        assert got.tolist() == again.tolist() == expected.tolist()
        assert kv.stats()[0].evictions == 1


class TestForward:
    def test_bare_calls(self, tiny, forward_steps, prompt):
        model = tiny("llama")
        ids, mask = prompt(2, 26, pads=[0, 7])
        cache = ManifoldCache(model.config, KVConfig(**SETTINGS), padding_mask=mask)
        first, later, tokens = forward_steps(model, ids, mask, cache, steps=3)
        with compress(model, **SETTINGS), torch.no_grad():
            out = model(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))  # positional arguments
            assert isinstance(out.past_key_values, ManifoldCache)
            torch.testing.assert_close(out.logits, first)
            steps = forward_steps(
                model, tokens[:, :1], torch.cat((mask, torch.ones(2, 1).long()), -1), out.past_key_values
            )
        torch.testing.assert_close(steps[0][:, -1], later[:, 0])

    def test_the_mask_is_that_of_the_call_even_if_all_ones(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 20)
        with compress(model, **SETTINGS) as kv, torch.no_grad():
            model(ids, attention_mask=torch.ones_like(ids))
            with_mask = kv.cache
            model(ids)
            without = kv.cache
        assert with_mask.layers[0].pads is None
        assert torch.equal(with_mask.layers[1].keys, without.layers[1].keys)

    def test_without_a_cache_nothing_is_compressed(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 20)
        with torch.no_grad():
            expected = model(ids, use_cache=False)
            with compress(model, **SETTINGS) as kv:
                got = model(ids, use_cache=False)
                with pytest.raises(RuntimeError, match=r"^nothing has run inside compress\(\) yet"):
                    kv.stats()
        assert torch.equal(got.logits, expected.logits)
        assert got.past_key_values is None


class TestRestoring:
    def test_after_leaving(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        before, tokens = state(model), model.generate(ids, **GREEDY).tolist()
        with compress(model, **SETTINGS):
            assert state(model) != before
            model.generate(ids, **GREEDY)
        assert state(model) == before
        assert model.generate(ids, **GREEDY).tolist() == tokens
        assert type(model(ids).past_key_values) is transformers.DynamicCache

    @pytest.mark.parametrize("settings", [{}, {"head_budget": "adaptive"}])
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_after_an_exception(self, error, settings, tiny):
        model = tiny("llama")
        before = state(model)
        with pytest.raises(error), compress(model, **SETTINGS, **settings):
            raise error
        assert state(model) == before

    def test_after_a_refused_call(self, tiny, prompt):
        model = tiny("llama")
        before = state(model)
        ids, _ = prompt(1, 26)
        with pytest.raises(ValueError, match="assisted"), compress(model, **SETTINGS):
            model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY)
        assert state(model) == before

    def test_after_a_failure_on_the_way_in(self, tiny, monkeypatch):
        model = tiny("llama")
        before = state(model)

        def fail(name):
            raise OSError("no attention")

        monkeypatch.setattr(model, "set_attn_implementation", fail, raising=True)
        with pytest.raises(OSError, match="no attention"), compress(model, head_budget="adaptive", **SETTINGS):
            pass
        assert state(model) == before

    def test_a_generate_of_the_users_own_stays(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        original = model.generate

        def own(*args, **kwargs):
            return original(*args, **kwargs | {"max_new_tokens": 2})

        model.generate = own
        try:
            with compress(model, **SETTINGS) as kv:
                assert model.generate(ids, **GREEDY).shape == (1, 28)
                assert kv.stats()[0].stored_length == 11
            assert model.generate is own
        finally:
            del model.generate

    def test_one_object_serves_again(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        kv = compress(model, **SETTINGS)
        results = []
        for _ in range(2):
            with kv:
                results.append(model.generate(ids, **GREEDY).tolist())
        assert results[0] == results[1]

    def test_nested(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        with compress(model, **SETTINGS) as kv:
            with (
                pytest.raises(RuntimeError, match=r"^this model is already inside compress\(\)"),
                compress(model, budget=5),
            ):
                pass
            model.generate(ids, **GREEDY)  # the outer one still works
            assert kv.stats()[0].stored_length == 21
        assert state(model)[5] == set()


class TestAutomaticMetric:
    def test_one_choice_for_all_prompts_inside(self, tiny, prompt):
        model = tiny("llama")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with compress(model, compression_ratio=0.5) as kv:
                assert kv.diagnosis is None
                model.generate(prompt(1, 300)[0], **GREEDY)
                first = kv.diagnosis
                model.generate(prompt(1, 280, seed=4)[0], **GREEDY)
        assert first is kv.diagnosis
        assert first.tokens == 300
        assert {stats.metric for stats in kv.stats()} == {first.metric}

    def test_a_short_prompt_is_served(self, tiny, prompt):
        model = tiny("llama")
        with pytest.warns(UserWarning, match="'l2' is used for it"), compress(model, compression_ratio=0.5) as kv:
            out = model.generate(prompt(1, 6)[0], **GREEDY)
        assert out.shape == (1, 18)
        assert kv.stats()[0].metric == "l2"


class TestEncoderDecoder:
    @pytest.mark.parametrize("beams", [1, 3])
    def test_only_self_attention_is_compressed(self, beams, tiny_bart, reference, prompt):
        source, mask = prompt(2, 12)[0], torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
        start, _ = prompt(2, 20, seed=2)
        settings = SETTINGS | {"phase": "both", "interval": 4}
        arguments = GREEDY | {"attention_mask": mask, "num_beams": beams, "decoder_input_ids": start}
        explicit = reference(tiny_bart, **settings)
        with explicit:
            dense = transformers.EncoderDecoderCache(
                explicit.cache(), transformers.DynamicCache(config=tiny_bart.config)
            )
            expected = tiny_bart.generate(source, past_key_values=dense, **arguments)
        before = state(tiny_bart)
        with compress(tiny_bart, **settings) as kv:
            got = tiny_bart.generate(source, return_dict_in_generate=True, **arguments)
        assert got.sequences.tolist() == expected.tolist()
        cache = got.past_key_values
        assert isinstance(cache, transformers.EncoderDecoderCache)
        assert cache.self_attention_cache is kv.cache
        assert type(cache.cross_attention_cache) is transformers.DynamicCache
        assert [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers] == [12, 12]
        assert [stats.evictions for stats in kv.stats()] == [3, 3]
        assert state(tiny_bart) == before

    def test_bare_calls(self, tiny_bart, prompt):
        source, target = prompt(1, 12)[0], prompt(1, 25, seed=2)[0]
        with torch.no_grad():
            expected = tiny_bart(source, decoder_input_ids=target).logits
            with compress(tiny_bart, **SETTINGS) as kv:
                got = tiny_bart(source, decoder_input_ids=target).logits
        assert torch.equal(got, expected)
        assert [stats.stored_length for stats in kv.stats()] == [10, 10]

    def test_budgets_per_head_are_refused(self, tiny_bart):
        with pytest.raises(ValueError, match=r"^head_budget='adaptive' isn't defined for encoder-decoder models"):
            compress(tiny_bart, head_budget="adaptive", **SETTINGS)


class TestPeft:
    def test_a_wrapped_model(self, prompt):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=61, initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )  # fmt: skip
        base = transformers.LlamaForCausalLM(config).eval()
        ids, _ = prompt(1, 26)
        with compress(base, **SETTINGS):
            expected = base.generate(ids, **GREEDY)
        before = state(base)
        wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
        with compress(wrapped, **SETTINGS) as kv:
            with pytest.raises(RuntimeError, match="already inside compress"), compress(base, budget=5):
                pass
            got = wrapped.generate(input_ids=ids, **GREEDY)
            assert kv.stats()[0].stored_length == 21
        assert got.tolist() == expected.tolist()  # a new adapter changes nothing
        assert state(base) == before


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_settings(self, tiny):
        model = tiny("llama")
        with pytest.raises(TypeError, match=r"^unknown setting ratio; known are allocation, budget, "):
            compress(model, ratio=0.5)
        with pytest.raises(ValueError, match=r"^give either cfg or single settings, not both \(got cfg and budget\)"):
            compress(model, KVConfig(budget=4), budget=4)
        with pytest.raises(ValueError, match=r"^compression_ratio=1.2 must be in \[0, 1\)"):
            compress(model, compression_ratio=1.2)
        with pytest.raises(ValueError, match=r"^nothing to compress to: give compression_ratio"):
            compress(model)
        with pytest.raises(ValueError, match=r"^budget=4096 is larger than the model's context of 512 tokens"):
            compress(model, budget=4096)
        with pytest.raises(TypeError, match=r"^cfg must be a KVConfig, not float"):
            compress(model, 0.5)

    def test_not_a_model(self):
        with pytest.raises(TypeError, match=r"^compress\(\) takes a transformers model, not Linear"):
            compress(torch.nn.Linear(2, 2), budget=4)

    def test_models_that_cannot_be_served(self, tiny):
        with pytest.raises(UnsupportedModelError, match=r"^mistral has no full-attention layer"):
            compress(tiny("mistral-sliding"), budget=4)
        config = transformers.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=61)
        with pytest.raises(UnsupportedModelError, match=r"^OpenAIGPTLMHeadModel takes no past_key_values"):
            compress(transformers.OpenAIGPTLMHeadModel(config), budget=4)

    def test_empty_prompts(self, tiny):
        model = tiny("llama")
        empty = torch.zeros(1, 0, dtype=torch.long)
        with compress(model, **SETTINGS):
            for call in (lambda: model.generate(empty, **GREEDY), lambda: model.generate(input_ids=empty, **GREEDY)):
                with pytest.raises(
                    ValueError, match=r"^the prompt is empty \(shape \(1, 0\)\); give at least one token"
                ):
                    call()
            with pytest.raises(ValueError, match=r"^the prompt is empty \(shape \(1, 0\)\)"):
                model(empty)
            with pytest.raises(ValueError, match=r"^the prompt is empty \(shape \(1, 0, 32\)\)"):
                model.generate(inputs_embeds=torch.zeros(1, 0, 32), **GREEDY)

    def test_padding_on_the_right(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(2, 12)
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        with (
            compress(model, **SETTINGS),
            pytest.raises(ValueError, match=r"^attention_mask has 0 after 1 \(right padding"),
        ):
            model.generate(ids, attention_mask=mask, **GREEDY)

    def test_masks_of_another_form(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 12)
        square = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        with compress(model, **SETTINGS):
            with pytest.raises(
                ValueError, match=r"^attention_mask has shape \(1, 1, 12, 12\); compression needs the 2-D mask"
            ):
                model(ids, attention_mask=square)
            with pytest.raises(ValueError, match=r"^attention_mask has type dict; compression needs the 2-D mask"):
                model(ids, attention_mask={"full_attention": square})

    def test_caches_that_cannot_be_replaced(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 12)
        filled = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=filled)
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        with compress(model, **SETTINGS):
            with pytest.raises(ValueError, match=r"^past_key_values already holds 12 tokens uncompressed"):
                model(ids, past_key_values=filled)
            with pytest.raises(ValueError, match=r"^StaticCache can't be compressed; pass no past_key_values"):
                model(ids, past_key_values=static)
            for implementation in ("static", "quantized", "offloaded"):
                with pytest.raises(ValueError, match=rf"^cache_implementation='{implementation}' can't be combined"):
                    model.generate(ids, cache_implementation=implementation, **GREEDY)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"prompt_lookup_num_tokens": 3},
            {"assistant_early_exit": 1},
            {"use_mtp": True},
            {"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)},
            {"generation_config": transformers.GenerationConfig(assistant_early_exit=1)},
        ],
        ids=str,
    )
    def test_assisted_generation(self, arguments, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 12)
        calls = []
        handle = model.register_forward_hook(lambda *_: calls.append(1))
        with compress(model, **SETTINGS), pytest.raises(ValueError, match=r"^assisted generation rolls the cache back"):
            model.generate(ids, **arguments)
        handle.remove()
        assert calls == []  # before anything was computed

    def test_an_assistant_model(self, tiny, prompt):
        model = tiny("llama")
        with compress(model, **SETTINGS), pytest.raises(ValueError, match=r"^assisted generation rolls the cache back"):
            model.generate(prompt(1, 12)[0], assistant_model=tiny("qwen2"), **GREEDY)

    def test_a_split_prompt_without_budget_while_decoding(self, tiny, prompt):
        model = tiny("llama")
        settings = SETTINGS | {"budget": None, "compression_ratio": 0.5, "phase": "decode"}
        with (
            compress(model, **settings),
            pytest.raises(ValueError, match=r"but phase='decode' takes its share of the whole"),
        ):
            model.generate(prompt(1, 26)[0], prefill_chunk_size=8, **GREEDY)
        with compress(model, **settings) as kv:  # one chunk is no split
            model.generate(prompt(1, 26)[0], prefill_chunk_size=26, **GREEDY)
        assert kv.stats()[0].logical_length == 37

    def test_a_split_prompt_needs_the_chunked_phase(self, tiny, prompt):
        model = tiny("llama")
        ids, _ = prompt(1, 26)
        for phase in ("prefill", "both"):
            with compress(model, **SETTINGS, phase=phase):
                message = rf"^prefill_chunk_size=8 splits the prompt, but phase='{phase}' evicts once after all of it"
                with pytest.raises(ValueError, match=message):
                    model.generate(ids, prefill_chunk_size=8, **GREEDY)

    def test_keys_of_nan(self, tiny, prompt):
        model = tiny("llama", max_position_embeddings=256)  # a model of its own, to be broken
        weight = model.model.layers[1].self_attn.k_proj.weight
        saved = weight.detach().clone()
        with torch.no_grad():
            weight[8:] = torch.nan
        try:
            with (
                compress(model, **SETTINGS),
                pytest.raises(FloatingPointError, match=r"^layer 1, key-value head 1: every key is"),
            ):
                model.generate(prompt(1, 26)[0], **GREEDY)
        finally:
            with torch.no_grad():
                weight.copy_(saved)
