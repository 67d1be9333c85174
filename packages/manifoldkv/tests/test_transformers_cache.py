"""ManifoldCache in real models: exact prefill, decoding equal to an explicit reference, positions, padding, cropping."""

from __future__ import annotations

import pytest
import torch

from manifoldkv import KVConfig, ManifoldCache

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
