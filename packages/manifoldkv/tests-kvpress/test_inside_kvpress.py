"""Presses under kvpress's wrappers and in its pipeline."""

from __future__ import annotations

import json

import kvpress
import pytest
import torch
from transformers import DynamicCache

from icml26_shared.bench import Measured
from manifoldkv import KVConfig, score_keys, select
from manifoldkv.integrations.kvpress import ManifoldKVPress, WindowedManifoldKVPress


def test_is_a_scorer_press():
    assert issubclass(ManifoldKVPress, kvpress.ScorerPress)
    assert issubclass(WindowedManifoldKVPress, kvpress.ScorerPress)
    with pytest.raises(ValueError, match=r"compression_ratio=1\.0 must be in \[0, 1\)"):
        ManifoldKVPress(1.0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "mistral"])
def test_alone(family, tiny, ids, prefill):
    model = tiny(family)
    whole, cache = prefill(model, ids), prefill(model, ids, ManifoldKVPress(0.5))
    for own, full in zip(cache.layers, whole.layers, strict=True):
        kept = select((full.keys - full.keys.mean(2, keepdim=True)).norm(dim=-1), 60)[..., None]
        assert torch.equal(own.keys, full.keys.gather(2, kept.expand(-1, -1, -1, 16)))
        assert torch.equal(own.values, full.values.gather(2, kept.expand(-1, -1, -1, 16)))


def test_adakv(tiny, ids, prefill):
    """AdaKV masks the worst keys of all heads together by our scores; each head keeps its own best fifth."""
    model = tiny("llama")
    whole = prefill(model, ids)
    prefill(model, ids, kvpress.AdaKVPress(ManifoldKVPress(0.6)))
    for layer, full in zip(model.model.layers, whole.layers, strict=True):
        _, heads, places = layer.self_attn.masked_key_indices
        masked = torch.zeros(2, 120, dtype=torch.bool)
        masked[heads, places] = True
        assert int(masked.sum()) == 2 * (120 - 48)
        scores = score_keys(full.keys, KVConfig(metric="l2", n_sink=0, n_recent=0))[0]
        safe = torch.zeros(2, 120, dtype=torch.bool).scatter_(-1, scores.topk(9, dim=-1).indices, True)  # int(48 * 0.2)
        assert not (masked & safe).any()
        assert scores[~masked & ~safe].min() >= scores[masked].max()
        layer.self_attn.masked_key_indices = None


def test_block(tiny, ids, prefill):
    """Block by block: what is kept so far competes with the next block, by our scores over both."""
    model = tiny("llama")
    whole = prefill(model, ids)
    cache = prefill(model, ids, kvpress.BlockPress(ManifoldKVPress(0.75), block_size=25))
    for own, full in zip(cache.layers, whole.layers, strict=True):
        for head in range(2):
            keys = full.keys[0, head]
            kept = list(range(30))
            for start in range(30, 120, 25):
                kept += range(start, min(start + 25, 120))
                part = keys[kept]
                order = (part - part.mean(0)).norm(dim=-1).topk(30).indices.tolist()
                kept = [kept[place] for place in order]
            found = {int((keys == row).all(-1).nonzero()[0, 0]) for row in own.keys[0, head]}
            assert found == set(kept)


def test_decoding(tiny, ids):
    """DecodingPress sets the ratio so that exactly its target stays."""
    model, cache = tiny("llama"), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        press = kvpress.DecodingPress(ManifoldKVPress(), compression_interval=4, target_size=50)
        sizes = []
        with press(model):
            for step in range(12):
                position = torch.tensor([120 + step])
                model(
                    ids[:, step : step + 1], past_key_values=cache, position_ids=position[None], cache_position=position
                )
                sizes.append(cache.layers[0].keys.shape[2])
    assert sizes == [121, 122, 123, 50, 51, 52, 53, 50, 51, 52, 53, 50]


def test_decoding_keeps_the_best(tiny, ids):
    model = tiny("llama")
    caches = []
    for press in (None, kvpress.DecodingPress(ManifoldKVPress(), compression_interval=1, target_size=50)):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
            step = {"position_ids": torch.tensor([[120]]), "cache_position": torch.tensor([120])}
            if press is None:
                model(ids[:, :1], past_key_values=cache, **step)
            else:
                with press(model):
                    model(ids[:, :1], past_key_values=cache, **step)
        caches.append(cache)
    for full, own in zip(caches[0].layers, caches[1].layers, strict=True):
        kept = select((full.keys - full.keys.mean(2, keepdim=True)).norm(dim=-1), 50)[..., None]
        assert torch.equal(own.keys, full.keys.gather(2, kept.expand(-1, -1, -1, 16)))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(76))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_pipeline(metric, tiny, tokenizer, ids):
    """The pipeline's answer is that of a plain decoding on the keys we would keep."""
    model = tiny("llama")
    words = " ".join(f"w{int(i) % 76}" for i in ids[0])
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    press = ManifoldKVPress(0.7, metric=metric)
    answers = pipe(" " + words, questions=["w5 w6", "w7"], press=press, max_new_tokens=6)["answers"]
    context = tokenizer("<s> " + words, return_tensors="pt", add_special_tokens=False).input_ids
    expected = [_answer(model, tokenizer, context, question, metric) for question in ("w5 w6", "w7")]
    assert answers == expected
    dense = pipe(" " + words, questions=["w5 w6", "w7"], max_new_tokens=6)["answers"]
    assert answers != dense


def _answer(model, tokenizer, context, question, metric):
    cache, length = DynamicCache(), context.shape[1]
    cfg = KVConfig(metric=metric, compression_ratio=0.7, n_sink=0, n_recent=0)
    step = tokenizer(question + "\n", return_tensors="pt", add_special_tokens=False).input_ids
    said = []
    with torch.no_grad():
        model(context, past_key_values=cache)
        for layer in cache.layers:
            kept = select(score_keys(layer.keys, cfg), cfg.keep_count(length))[..., None].expand(-1, -1, -1, 16)
            layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)
        position = torch.arange(length, length + step.shape[1])[None]
        for _ in range(6):
            step = model(step, past_key_values=cache, position_ids=position).logits[:, -1].argmax(-1, keepdim=True)
            position = position[:, -1:] + 1
            said.append(int(step))
            if said[-1] == 2:
                break
    return tokenizer.decode(said, skip_special_tokens=True)


def test_the_row_of_the_bench_that_runs_here(capsys):
    """One line of JSON that `manifoldkv bench` reads, from two pairs on a short prompt."""
    from manifoldkv import bench_kvpress

    bench_kvpress.main("l2", "KeyDiffPress", tokens="64", pairs="2")
    (line,) = capsys.readouterr().out.splitlines()
    found = Measured.from_json(json.loads(line))
    assert found.comparison is not None
    assert len(found.comparison.ratios) == 2
    assert found.comparison.ratio > 0
