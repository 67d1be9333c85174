"""Conversion inside transformers: real models, generation with beams, saving and loading."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from icml26_shared import models
from icml26_shared.errors import UserError
from tucker_attention import TuckerAttention, UnsupportedAttention, attention_spectra, convert_model
from tucker_attention.integrations.hosts import HostAttention
from tucker_attention.integrations.transformers import from_pretrained, tucker_attention_forward

TEXTS = ["A cat sat on the mat.", "Attention weights of a trained model.", "One", "It rained all day in the old town."]


def logits(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, **options).logits


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))


def gpt2(**options):
    return models.tiny("gpt2", n_positions=64, n_embd=32, n_layer=2, n_head=4, hidden_size=32, **options)


def test_minilm_at_full_energy_gives_the_same_embeddings():
    encoder = models.load_encoder("minilm")
    before = encoder.embed(TEXTS)
    encoder.model = convert_model(encoder.model, energy=1.0)
    layer = encoder.model.encoder.layer[0].attention.self.tucker
    assert (layer.config.ranks, layer.config.post_ranks) == ((12, 384, 384), (12, 384, 384))
    assert max(p.numel() for p in encoder.model.encoder.parameters()) < 12 * 384 * 384
    assert (encoder.embed(TEXTS) - before).abs().max() <= 1e-5


@pytest.mark.parametrize("options", [{}, {"energy": 1.0}])
def test_gpt2_is_kept(ids, options):
    model = gpt2()
    before = logits(model, ids)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    convert_model(model, **options)
    assert (logits(model, ids) - before).abs().max() <= 1e-4
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), greedy)


def test_llama_is_kept_with_head_rope(ids):
    model = models.tiny_llama()
    before = logits(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        convert_model(model)
    assert (logits(model, ids) - before).abs().max() <= 1e-4
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=True)
        step = model(input_ids=ids[:, :1], past_key_values=full.past_key_values).logits
        whole = model(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    assert (step - whole).abs().max() <= 1e-4


@pytest.mark.parametrize("rope", ["latent", "head"])
def test_cache_padding_and_beams_inside_generate(ids, rope):
    model = models.tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_model(model, ranks=(4, 24, 16), rope=rope)
    alone = model.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 9:]
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids], 1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.int64), torch.ones_like(ids)], 1)
    together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(together[0, 12:], alone)
    settings = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    beams = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, use_cache=False, **settings), beams)
    with pytest.raises(ValueError, match="static cache does not fit latents"):
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static")


def test_the_hosts_cache_holds_latents(ids):
    model = gpt2()
    convert_model(model, ranks=(3, 12, 6))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == cache.layers[1].values.shape == (2, 1, 9, 6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_saved_and_loaded(tmp_path, ids, family):
    model = gpt2() if family == "gpt2" else models.tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_model(model, ranks=(3, 12, 6))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert sum(isinstance(m, TuckerAttention) for m in again.modules()) == 2
    assert torch.equal(logits(again, ids), expected)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(UserError, match="is damaged"):
        from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no config.json"):
        from_pretrained(tmp_path / "nowhere")


def test_budget_and_calibration(ids):
    model = gpt2()
    whole = sum(p.numel() for name, p in model.named_parameters() if ".attn." in name)
    convert_model(model, budget=whole // 2, calibration=[{"input_ids": ids}])
    held = sum(p.numel() for name, p in model.named_parameters() if ".attn." in name and not name.endswith("bias"))
    assert 0.3 * whole < held <= whole // 2
    with pytest.raises(ValueError, match="never reached"):
        convert_model(gpt2(), ranks=(2, 4, 4), calibration=[])


def test_only_chosen_layers(ids):
    model = convert_model(gpt2(), layers=r"h\.1\.")
    assert [name for name, m in model.named_modules() if isinstance(m, HostAttention)] == ["transformer.h.1.attn"]
    with pytest.raises(ValueError, match=r"matches none of the attention layers: transformer.h.0.attn"):
        convert_model(gpt2(), layers="nothing")


@pytest.mark.parametrize(
    ("family", "options", "feature"),
    [
        ("qwen3", {"head_dim": 16}, "qk-norm"),
        ("mistral", {"sliding_window": 4}, "a sliding window of 4 tokens"),
        ("gemma2", {"head_dim": 16}, "soft-capping|sliding window"),
    ],
)
def test_what_cannot_be_carried_is_named_and_nothing_is_changed(family, options, feature):
    model = models.tiny(family, **options)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(UnsupportedAttention, match=feature):
        convert_model(model)
    assert [name for name, _ in model.named_parameters()] == names


def test_spectra_of_a_model():
    report = attention_spectra(gpt2())
    assert [layer.name for layer in report.layers] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert report.layers[0].ranks("W", 1.0) == (4, 32, 32)
    rows = report.rows((0.9,))
    assert rows[0][:2] == ["transformer.h.0.attn", "W"]


def test_attention_weights_cannot_be_had(ids):
    model = convert_model(gpt2())
    with pytest.raises(ValueError, match="forms no attention weights"):
        model.transformer.h[0].attn(torch.randn(1, 3, 32), output_attentions=True)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_registered_implementation_in_a_host_with_one_key_head(ids, family):
    model = models.tiny(family, num_key_value_heads=1, sliding_window=None).eval()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": padded}
    found = {}
    for name in ("eager", "tucker"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        masked = logits(model, ids, attention_mask=padded)
        found[name] = logits(model, ids), masked[1], masked[0, 3:], model.generate(ids, **settings)
    for expected, got in zip(found["eager"], found["tucker"], strict=True):
        assert torch.allclose(got.float(), expected.float(), atol=1e-5)


def test_the_registered_implementation_takes_widths_that_differ_and_one_key_head_alone(ids):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *shape, generator=g) for shape in ((3, 4, 6), (1, 7, 6), (1, 7, 9)))
    host = torch.nn.Module()
    host.is_causal = True
    found, _ = tucker_attention_forward(host, q, k, v, None)
    scores = (q @ k.transpose(2, 3) / 6**0.5).masked_fill(~torch.ones(4, 7, dtype=torch.bool).tril(3), float("-inf"))
    assert torch.allclose(found, (scores.softmax(-1) @ v).transpose(1, 2), atol=1e-6)
    model = models.tiny_llama()
    model.set_attn_implementation("tucker")
    with pytest.raises(ValueError, match="'tucker' takes one key head, got 2"):
        logits(model, ids)
