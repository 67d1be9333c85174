"""The same keys kept as kvpress's own presses keep, as sets, on random keys and in models."""

from __future__ import annotations

import kvpress
import pytest
import torch

from manifoldkv import score_keys, select
from manifoldkv.baselines import key_norm, keydiff, snapkv_scores, streaming_llm
from manifoldkv.integrations.kvpress import ManifoldKVPress, WindowedManifoldKVPress

RATIOS = [0.1, 0.25, 0.5, 0.9]
PAIRS = {
    "cosine": (keydiff, kvpress.KeyDiffPress),
    "knorm": (key_norm, kvpress.KnormPress),
    "streaming": (streaming_llm, kvpress.StreamingLLMPress),
}


class _Attention:
    """What the presses read of an attention layer."""

    head_dim = 32


def theirs(press, keys):
    """The tokens kvpress keeps, by marking each value with its index."""
    marks = torch.arange(float(keys.shape[2])).view(1, 1, -1, 1).expand(*keys.shape[:3], keys.shape[3])
    kept = press.compress(_Attention(), None, keys, marks.contiguous(), None, {})[1][..., 0]
    return [[set(head.long().tolist()) for head in row] for row in kept]


def ours(cfg, keys):
    kept = select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2]))
    return [[set(head.tolist()) for head in row] for row in kept]


def random_keys(length, seed):
    """Keys with a mean of their own, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(2, 3, 1, 32, generator=generator)
    return torch.randn(2, 3, length, 32, generator=generator) * torch.rand(32, generator=generator) + mean


@pytest.mark.parametrize("metric", PAIRS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_scorers(metric, ratio):
    own, press = PAIRS[metric]
    for seed, length in enumerate((17, 64, 100, 333)):
        if metric == "streaming" and int(length * (1 - ratio)) <= 4:
            continue  # fewer kept than sinks: kvpress's rule marks more tokens than it keeps
        keys = random_keys(length, seed)
        assert ours(own(ratio), keys) == theirs(press(compression_ratio=ratio), keys)


def test_key_norms_in_bfloat16():
    """Both score in float32: no ties by rounding decide."""
    keys = random_keys(200, 0).bfloat16()
    scores = score_keys(keys, key_norm(0.5))
    torch.testing.assert_close(scores, kvpress.KnormPress(0.5).score(None, None, keys, None, None, {}))


@pytest.mark.parametrize("ratio", RATIOS)
def test_sizes(ratio):
    press, peer = ManifoldKVPress(ratio), kvpress.KnormPress(ratio)
    keys = random_keys(200, 0)
    for length in range(1, 201):
        part = keys[:, :, :length]
        kept = press.compress(_Attention(), None, part, part, None, {})[0].shape[2]
        assert kept == max(int(length * (1 - ratio)), 1)
        assert kept == peer.compress(_Attention(), None, part, part, None, {})[0].shape[2]


@pytest.mark.parametrize("metric", ["cosine", "knorm"])
def test_presses_in_a_model(metric, tiny, ids, prefill):
    """Same tokens, ours in their original order."""
    model = tiny("llama")
    own = prefill(model, ids, ManifoldKVPress(0.6, metric=metric))
    peer = prefill(model, ids, PAIRS[metric][1](0.6))
    whole = prefill(model, ids)
    for mine, other, full in zip(own.layers, peer.layers, whole.layers, strict=True):
        for head in range(2):
            places = [_places(layer.keys[0, head], full.keys[0, head]) for layer in (mine, other)]
            assert places[0] == sorted(places[1])
            for layer, kept in zip((mine, other), places, strict=True):
                assert torch.equal(layer.values[0, head], full.values[0, head, kept])


def _places(rows, among):
    """Index in ``among`` of each of the rows."""
    return [int((among == row).all(-1).nonzero()[0, 0]) for row in rows]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_snapkv(family, tiny, ids):
    """Scores from the model's own rotated queries; kvpress computes them again from the hidden states."""
    from transformers import DynamicCache

    model, window = tiny(family), 16
    found = {}

    class Spy(kvpress.SnapKVPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
            found[module.layer_idx] = keys.clone(), scores
            return scores

    with torch.no_grad(), Spy(0.5, window_size=window)(model):
        model(ids, past_key_values=DynamicCache())
    queries = _queries(model, ids, window)
    for index, (keys, expected) in found.items():
        own = snapkv_scores(keys, queries[index])
        torch.testing.assert_close(own[..., :-window], expected[..., :-window], atol=1e-6, rtol=1e-4)
        for ratio in RATIOS[:3]:
            kept = int(120 * (1 - ratio))
            mine = select(own, kept)
            peers = expected.topk(kept, dim=-1).indices.sort(-1).values
            assert torch.equal(mine, peers)


def _queries(model, ids, window):
    """The last rotated queries of each layer, caught where the model hands them to its attention."""
    from transformers import DynamicCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual, caught = ALL_ATTENTION_FUNCTIONS["sdpa"], {}

    def attention(module, query, *args, **kwargs):
        caught[module.layer_idx] = query[:, :, -window:].clone()
        return usual(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        with torch.no_grad():
            model(ids, past_key_values=DynamicCache())
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = usual
    return caught


def test_windows_are_local(ids, tiny, prefill):
    model = tiny("llama")
    whole = prefill(model, ids)
    cache = prefill(model, ids, WindowedManifoldKVPress(0.5, window=30))
    for own, full in zip(cache.layers, whole.layers, strict=True):
        scores = torch.cat([(part - part.mean(2, keepdim=True)).norm(dim=-1) for part in full.keys.split(30, 2)], -1)
        expected = scores.topk(60, dim=-1).indices.sort(-1).values
        for head in range(2):
            assert _places(own.keys[0, head], full.keys[0, head]) == expected[0, head].tolist()
