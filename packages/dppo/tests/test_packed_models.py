"""Packed forwards of real transformers models equal separate forwards, gradients included; refusals."""

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

# ruff: noqa: E402 what follows needs transformers
from dppo.integrations.transformers import (
    NAME,
    UnsupportedModelError,
    check_packable,
    packed_attention_of,
    packed_logps,
    separate_logps,
)
from dppo.packed import pack_sequences
from icml26_shared.models import tiny_llama, tiny_qwen2

T = torch.tensor


def sequences(vocabulary, *, groups=3, size=4, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    prompts, completions = [], []
    for _ in range(groups):
        prompt = T(rng.integers(0, vocabulary, rng.integers(1, 12)))
        for _ in range(size):
            prompts.append(prompt)
            completions.append(T(rng.integers(0, vocabulary, rng.integers(0, longest))))
    completions[1] = completions[1][:0]
    return prompts, completions


def gradients(model, logps):
    weights = [torch.linspace(-1, 1, len(x)) for x in logps]
    loss = sum((w * x).sum() for w, x in zip(weights, logps, strict=True))
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("capacity", [None, 64])
def test_packed_equals_separate(make, share, capacity):
    torch.manual_seed(0)
    model = make(num_hidden_layers=2).float().eval()
    prompts, completions = sequences(model.config.vocab_size)
    expected = separate_logps(model, prompts, completions)
    packing, rows = pack_sequences(prompts, completions, capacity=capacity, share_prompts=share)
    assert (len(rows) > 1) == (capacity is not None)
    with packed_attention_of(model):
        logps, entropies = packed_logps(model, rows, entropy=True)
    assert model.config._attn_implementation != NAME
    ours = [logps[i] for i in range(len(prompts))]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert all(len(entropies[i]) == len(completions[i]) for i in range(len(prompts)))
    for a, b in zip(gradients(model, ours), gradients(model, expected), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    tokens = sum(len(c) for c in completions)
    if share and capacity is None:
        assert packing.tokens == tokens + sum(len(prompts[i]) for i in (0, 4, 8))
    if not share:
        assert packing.tokens == tokens + sum(map(len, prompts))


def test_entropy_and_temperature():
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=1).float().eval()
    prompts, completions = sequences(model.config.vocab_size, groups=1, size=2)
    _, rows = pack_sequences(prompts, completions)
    with packed_attention_of(model):
        logps, entropies = packed_logps(model, rows, temperature=0.7, entropy=True)
    expected = separate_logps(model, prompts, completions, temperature=0.7)
    torch.testing.assert_close(logps[0], expected[0], rtol=1e-5, atol=1e-5)
    logits = model(torch.cat([prompts[0], completions[0]])[None]).logits[0, len(prompts[0]) - 1 : -1] / 0.7
    entropy = torch.distributions.Categorical(logits=logits.float()).entropy()
    torch.testing.assert_close(entropies[0], entropy, rtol=1e-4, atol=1e-5)


def test_layout_is_read_off_restarting_positions():
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2).float().eval()
    a, b = T([3, 4, 5, 6]), T([7, 8])
    with packed_attention_of(model):
        packed = model(torch.cat([a, b])[None], position_ids=T([[0, 1, 2, 3, 0, 1]]), use_cache=False).logits
    torch.testing.assert_close(packed[:, :4], model(a[None]).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 4:], model(b[None]).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_smollm2():
    from icml26_shared import models
    from icml26_shared.errors import UserError

    try:
        model, tokenizer = models.load("smollm2", dtype=torch.float32, progress=False)
    except (UserError, ImportError) as error:
        pytest.skip(str(error))
    texts = ["What is 2 + 3?", "Name a colour."]
    answers = [" It is 5.", " 5", " Blue, like the sea.", " Red"]
    prompts = [T(tokenizer(texts[i // 2])["input_ids"]) for i in range(4)]
    completions = [T(tokenizer(a)["input_ids"]) for a in answers]
    with torch.no_grad():
        expected = separate_logps(model, prompts, completions)
        _, rows = pack_sequences(prompts, completions)
        with packed_attention_of(model):
            logps, _ = packed_logps(model, rows)
    for i in range(4):
        torch.testing.assert_close(logps[i], expected[i], rtol=1e-4, atol=1e-4)


def from_config(config):
    return transformers.AutoModelForCausalLM.from_config(config)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.MambaConfig(**SMALL, state_size=4), "recurrent state"),
        (
            lambda: transformers.Lfm2Config(**SMALL, **ATTENTION, layer_types=["conv", "full_attention"]),
            "recurrent state|ShortConv|conv",
        ),
        (lambda: transformers.Gemma2Config(**SMALL, **ATTENTION, head_dim=8), "sliding_attention"),
        (lambda: transformers.MistralConfig(**SMALL, **ATTENTION, sliding_window=4), "sliding window of 4"),
    ],
)
def test_models_that_cannot_be_packed_are_refused(config, reason):
    model = from_config(config())
    with pytest.raises(UnsupportedModelError, match=reason):
        check_packable(model)
    with pytest.raises(UnsupportedModelError, match="padding"), packed_attention_of(model):
        pass


def test_misuse_of_the_attention_function():
    model = tiny_llama(num_hidden_layers=1).float().eval()
    with packed_attention_of(model):
        with pytest.raises(ValueError, match="one at a time"):
            model(torch.zeros(2, 3, dtype=torch.long), use_cache=False)
        cache = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="without a cache"):
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)


def test_bad_sequences():
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        pack_sequences([T([], dtype=torch.long)], [T([1])])
    with pytest.raises(ValueError, match="1 prompts and 0 completions"):
        pack_sequences([T([1])], [])
    packing, rows = pack_sequences([T([1, 2])], [T([], dtype=torch.long)])
    assert rows[0].predict.tolist() == []
    assert packing.tokens == 2
