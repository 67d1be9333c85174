"""Rotary embeddings undone: by hand, and against the rotation of transformers' own models."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from manifoldkv.rope import Rotary

transformers = pytest.importorskip("transformers")


def test_worked_by_hand():
    # one pair, a quarter turn a token: position 1 turns (1, 0) into (0, 1), position 2 into (-1, 0)
    rotary = Rotary(torch.tensor([math.pi / 2]))
    keys = torch.tensor([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)])[None, None]
    plain = rotary.undo(keys, torch.arange(3))
    torch.testing.assert_close(plain, torch.tensor([(1.0, 0.0)] * 3)[None, None], atol=1e-6, rtol=0)


def test_pairs_are_halves_or_neighbours():
    keys = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    quarter = torch.tensor([math.pi / 2, 0.0])
    # halves pair (1, 3) and (2, 4), neighbours (1, 2) and (3, 4); a quarter turn back takes (x, y) to (y, -x)
    halves = Rotary(quarter).undo(keys, torch.tensor([1]))
    torch.testing.assert_close(halves, torch.tensor([[[[3.0, 2.0, -1.0, 4.0]]]]), atol=1e-6, rtol=0)
    neighbours = Rotary(quarter, interleaved=True).undo(keys, torch.tensor([1]))
    torch.testing.assert_close(neighbours, torch.tensor([[[[2.0, -1.0, 3.0, 4.0]]]]), atol=1e-6, rtol=0)


def test_only_the_rotary_dimensions_change_and_scaling_is_undone():
    keys = torch.ones(1, 1, 2, 5, dtype=torch.bfloat16)
    plain = Rotary(torch.tensor([0.0]), scaling=2.0).undo(keys, torch.arange(2))
    assert plain.dtype == torch.float32
    assert plain.tolist() == [[[[0.5, 0.5, 1.0, 1.0, 1.0]] * 2]]


def test_positions_of_each_head():
    rotary = Rotary(torch.tensor([math.pi / 2]))
    keys = torch.tensor([1.0, 0.0]).expand(1, 2, 2, 2)
    plain = rotary.undo(keys, torch.tensor([[[0, 1], [2, 3]]]))
    expected = torch.tensor([[[(1.0, 0.0), (0.0, -1.0)], [(-1.0, 0.0), (0.0, 1.0)]]])
    torch.testing.assert_close(plain, expected, atol=1e-6, rtol=0)


def test_more_rotary_dimensions_than_keys():
    with pytest.raises(ValueError, match=r"^the rotation covers 6 dimensions, but the keys have 4"):
        Rotary(torch.ones(3)).undo(torch.ones(1, 1, 1, 4), torch.arange(1))


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# config class, rotary class, its settings, (rotary dimensions, interleaved)
MODELS = {
    "llama": ("LlamaConfig", "LlamaRotaryEmbedding", {}, (16, False)),
    "llama3": ("LlamaConfig", "LlamaRotaryEmbedding", {"rope_parameters": LLAMA3}, (16, False)),
    "yarn": ("LlamaConfig", "LlamaRotaryEmbedding", {"rope_parameters": YARN}, (16, False)),
    "linear": (
        "LlamaConfig",
        "LlamaRotaryEmbedding",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        (16, False),
    ),
    "qwen3": ("Qwen3Config", "Qwen3RotaryEmbedding", {"head_dim": 32}, (32, False)),
    "phi3": ("Phi3Config", "Phi3RotaryEmbedding", {}, (16, False)),
    "phi": ("PhiConfig", "PhiRotaryEmbedding", {}, (8, False)),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXRotaryEmbedding", {"rotary_pct": 0.25}, (4, False)),
    "stablelm": ("StableLmConfig", "StableLmRotaryEmbedding", {}, (4, False)),
    "cohere": ("CohereConfig", "CohereRotaryEmbedding", {}, (16, True)),
    "glm": ("GlmConfig", "GlmRotaryEmbedding", {"head_dim": 16}, (8, True)),
    "gemma3": ("Gemma3TextConfig", "Gemma3RotaryEmbedding", {"head_dim": 16, "rope_parameters": GEMMA3}, (16, False)),
    "gemma4": ("Gemma4TextConfig", "Gemma4TextRotaryEmbedding", {"head_dim": 16, "global_head_dim": 32}, (32, False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_undoes_the_rotation_of_the_model(name):
    from manifoldkv.integrations.transformers.rotary import rotary_of

    config_class, embedding_class, settings, (dims, interleaved) = MODELS[name]
    if name.startswith("gemma"):
        settings = settings | {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config = getattr(transformers, config_class)(**SMALL | settings)
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    layer_type = {"layer_type": "full_attention"} if name.startswith("gemma") else {}

    rotary = rotary_of(config)
    assert (2 * rotary.inv_freq.numel(), rotary.interleaved) == (dims, interleaved)

    width = {"qwen3": 32, "gemma4": 32}.get(name, 16)
    plain = torch.randn(2, 2, 40, width, generator=torch.Generator().manual_seed(0))
    positions = torch.stack((torch.arange(40), torch.arange(100, 140)))
    cos, sin = getattr(module, embedding_class)(config)(plain, positions, **layer_type)
    if name == "gemma4":
        turned = module.apply_rotary_pos_emb(plain, cos, sin, unsqueeze_dim=1)
    elif name in ("phi", "gpt_neox", "stablelm"):  # their attention rotates a slice
        turned = module.apply_rotary_pos_emb(plain[..., :dims], plain[..., :dims], cos, sin)[1]
        turned = torch.cat((turned, plain[..., dims:]), dim=-1)
    else:
        turned = module.apply_rotary_pos_emb(plain, plain, cos, sin)[1]
    assert not torch.allclose(turned, plain, atol=0.1)
    torch.testing.assert_close(rotary.undo(turned, positions[:, None]), plain, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        ("GPT2Config", {}, "space='pre' needs rotary position embedding, which gpt2 doesn't have"),
        ("Cohere2Config", {}, "space='pre': cohere2 rotates the keys of some layers only"),
        ("SmolLM3Config", {}, "space='pre': smollm3 rotates the keys of some layers only"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "space='pre' can't undo rope_type='dynamic', whose frequencies depend on the length",
        ),
        ("NanoChatConfig", {}, "space='pre': nanochat pairs rotary dimensions in an unknown way"),
        ("GptOssConfig", {}, "space='pre': gpt_oss rotates its keys in a way of its own"),
        (
            "Qwen2Config",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "space='pre' can't undo the qwen2 rotation by time, height and width",
        ),
    ],
)
def test_models_whose_rotation_cannot_be_undone(config_class, settings, message):
    from manifoldkv.integrations.transformers.rotary import rotary_of

    with pytest.raises(ValueError, match=f"^{message}.*use space='post'$"):
        rotary_of(getattr(transformers, config_class)(**settings))
