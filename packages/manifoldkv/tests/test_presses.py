"""Presses on this environment's transformers, with kvpress importable and without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from manifoldkv import KVConfig, score_keys, select
from manifoldkv.integrations import kvpress as presses
from manifoldkv.integrations.kvpress import ManifoldKVPress, WindowedManifoldKVPress

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "phi", "mistral", "gemma3", "gpt_neox", "cohere", "qwen2-sliding"]


def dense(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.fixture(scope="module")
def local():
    """The press classes as they are where kvpress is not installed."""
    name = "manifoldkv_presses_without_kvpress"
    spec = importlib.util.spec_from_file_location(name, presses.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for hidden in ("kvpress", "kvpress.presses", "kvpress.presses.scorer_press"):
            patch.setitem(sys.modules, hidden, None)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    assert issubclass(module.ManifoldKVPress, module.LocalPress)
    yield module
    del sys.modules[name]


class TestLocalPress:
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("metric", ["l2", "cosine"])
    def test_keeps_what_the_scores_say(self, name, metric, local, tiny, prompt):
        model, (ids, _) = tiny(name), prompt(2, 30)
        whole = dense(model, ids)
        cache = transformers.DynamicCache(config=model.config)
        with local.ManifoldKVPress(0.6, metric=metric)(model), torch.no_grad():
            out = model(ids, past_key_values=cache).logits
        with torch.no_grad():
            torch.testing.assert_close(out, model(ids).logits)  # the prompt itself is exact
        cfg = KVConfig(metric=metric, compression_ratio=0.6, n_sink=0, n_recent=0)
        for own, full in zip(cache.layers, whole.layers, strict=True):
            if getattr(own, "is_sliding", False):
                assert torch.equal(own.keys, full.keys)
                continue
            kept = select(score_keys(full.keys, cfg), 12)[..., None]
            assert torch.equal(own.keys, full.keys.gather(2, kept.expand(-1, -1, -1, full.keys.shape[-1])))
            assert torch.equal(own.values, full.values.gather(2, kept.expand(-1, -1, -1, full.values.shape[-1])))

    def test_decoding_is_left_alone_and_the_hooks_go(self, local, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 30)
        cache = transformers.DynamicCache(config=model.config)
        with local.ManifoldKVPress(0.5)(model), torch.no_grad():
            model(ids, past_key_values=cache)
            for step in range(3):
                model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[30 + step]]))
        assert cache.layers[0].keys.shape[2] == 18
        with torch.no_grad():
            again = dense(model, ids)
        assert again.layers[0].keys.shape[2] == 30

    def test_a_chunk_after_the_first_is_not_a_prompt(self, local, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 30)
        cache = transformers.DynamicCache(config=model.config)
        with local.ManifoldKVPress(0.5)(model), torch.no_grad():
            model(ids[:, :20], past_key_values=cache)
            model(ids[:, 20:], past_key_values=cache, position_ids=torch.arange(20, 30)[None])
        assert cache.layers[0].keys.shape[2] == 10 + 10

    def test_without_a_cache_nothing_happens(self, local, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 30)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            with local.ManifoldKVPress(0.5)(model):
                assert torch.equal(model(ids, use_cache=False).logits, expected)

    def test_hooks_go_when_the_body_fails(self, local, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 30)
        with pytest.raises(KeyError, match="body"), local.ManifoldKVPress(0.5)(model):
            raise KeyError("body")
        assert dense(model, ids).layers[0].keys.shape[2] == 30

    def test_refused(self, local, tiny_bart):
        press = local.ManifoldKVPress(0.5)
        with pytest.raises(ValueError, match="Linear has no attention layers that a press knows"):
            press(torch.nn.Linear(2, 2)).__enter__()
        with pytest.raises(ValueError, match=r"encoder-decoder: use manifoldkv\.compress"):
            press(tiny_bart).__enter__()

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_a_padded_batch_is_refused(self, attention, local, tiny, prompt):
        """A press would score the padding, and the shorter cache would slide under the model's mask."""
        model = tiny("llama")
        usual = model.config._attn_implementation
        model.set_attn_implementation(attention)
        ids, mask = prompt(2, 30, pads=[0, 12])
        try:
            with local.ManifoldKVPress(0.5)(model), torch.no_grad():
                with pytest.raises(ValueError, match=r"can't serve a padded batch; use manifoldkv\.compress"):
                    model(ids, attention_mask=mask)
                model(ids, attention_mask=torch.ones_like(mask))
        finally:
            model.set_attn_implementation(usual)


class TestBothBases:
    """The same with kvpress's base, where it is installed."""

    @pytest.fixture(params=["local", "installed"])
    def press(self, request, local):
        return local if request.param == "local" else presses

    @pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.9])
    def test_sizes(self, ratio, press):
        own = press.ManifoldKVPress(ratio)
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, 200, 8, generator=generator)
        for length in range(1, 201):
            part = keys[:, :, :length]
            kept, values = own.compress(None, None, part, part + 1, None, {})
            assert kept.shape[2] == max(int(length * (1 - ratio)), 1)
            assert torch.equal(values, kept + 1)

    def test_ratio_zero_gives_the_same_tensors(self, press):
        keys, values = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        own = press.ManifoldKVPress(0.0).compress(None, None, keys, values, None, {})
        assert own[0] is keys
        assert own[1] is values

    def test_in_original_order_and_protected(self, press):
        keys = torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(0))
        values = torch.arange(40.0).view(1, 1, 40, 1).expand(1, 1, 40, 8)
        own = press.ManifoldKVPress(0.5, n_sink=2, n_recent=3)
        kept = own.compress(None, None, keys, values, None, {})[1][0, 0, :, 0].tolist()
        assert kept == sorted(kept)
        assert {0, 1, 37, 38, 39} <= set(kept)

    def test_windows(self, press):
        keys = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
        keys += torch.arange(4).repeat_interleave(10)[None, None, :, None] * 30
        scores = press.WindowedManifoldKVPress(0.5, window=10).score(None, None, keys, None, None, {})
        expected = score_keys(keys, KVConfig(metric="l2", window=10, n_sink=0, n_recent=0))
        assert torch.equal(scores, expected)
        overall = press.ManifoldKVPress(0.5).score(None, None, keys, None, None, {})
        assert not torch.equal(scores, overall)
        assert press.WindowedManifoldKVPress(0.5).window == 4096

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"compression_ratio": 1.0}, "compression_ratio=1.0 must be in"),
            ({"compression_ratio": -0.1}, "compression_ratio=-0.1"),
            ({"metric": "l3"}, "metric='l3'"),
            ({"n_sink": -1}, "n_sink=-1"),
        ],
    )
    def test_bad_input(self, settings, said, press):
        with pytest.raises(ValueError, match=said):
            press.ManifoldKVPress(**settings)
        with pytest.raises(ValueError, match="window=1"):
            press.WindowedManifoldKVPress(0.5, window=1)

    def test_in_a_model(self, press, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 30)
        cache = transformers.DynamicCache(config=model.config)
        with press.ManifoldKVPress(0.5)(model), torch.no_grad():
            model(ids, past_key_values=cache)
        assert [layer.keys.shape[2] for layer in cache.layers] == [15, 15]


def test_known_to_kvpress_where_it_is_importable():
    kvpress = pytest.importorskip("kvpress")
    assert issubclass(ManifoldKVPress, kvpress.ScorerPress)
    assert issubclass(WindowedManifoldKVPress, kvpress.ScorerPress)
    assert kvpress.AdaKVPress(ManifoldKVPress(0.5)).compression_ratio == 0.5


BLOCKED = """
import sys, warnings
warnings.simplefilter('error', UserWarning)
sys.modules['kvpress'] = None
import manifoldkv
press = manifoldkv.ManifoldKVPress(0.5)
loaded = [name for name in sys.modules if name.partition('.')[0] in ('kvpress', 'transformers') and sys.modules[name]]
print(manifoldkv.integrations.kvpress.LocalPress in type(press).__mro__, *loaded)
"""


def test_a_blocked_kvpress_leaves_the_local_base():
    """In a process of its own, where importing kvpress fails as where it is not installed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]  # and nothing of a host library was loaded for it


def test_a_broken_kvpress_is_said_and_leaves_the_local_base(monkeypatch):
    pytest.importorskip("kvpress")
    monkeypatch.setitem(sys.modules, "kvpress.presses.scorer_press", None)
    with pytest.warns(UserWarning, match="kvpress is installed but can't be imported"):
        assert presses._base() is presses.LocalPress
