"""Attention modules of torch and timm, read and replaced; features that are refused."""

import functools

import pytest
import torch
from torch import nn

from tucker_attention import TuckerAttention, UnsupportedAttention, convert_model
from tucker_attention.readers import kind_of, read_module, refuse_features


@pytest.mark.parametrize("bias", [False, True])
def test_torch_attention_is_kept(bias):
    module = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True).eval()
    if bias:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    x = torch.randn(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layer = TuckerAttention.from_module(module)
    assert (layer(x) - module(x, x, x)[0]).abs().max() <= 1e-5
    found = layer(x, key_padding_mask=padding)
    assert (found - module(x, x, x, key_padding_mask=padding)[0]).abs().max() <= 1e-5
    wrapped = convert_model(nn.ModuleDict({"attn": module}))["attn"]
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert (wrapped(x, x, x, attn_mask=later)[0] - module(x, x, x, attn_mask=later)[0]).abs().max() <= 1e-5


def test_torchs_encoder_layers_are_kept():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 12)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        before, masked = model(x), model(x, mask=later)
        convert_model(model)
        assert (model(x) - before).abs().max() <= 1e-5
        assert (model(x, mask=later) - masked).abs().max() <= 1e-5


def test_timm_is_kept():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3, img_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    assert (convert_model(model, energy=1.0)(x) - before).abs().max() <= 1e-4


def test_timm_from_scratch():
    timm = pytest.importorskip("timm")
    from tucker_attention.integrations.timm import TuckerAttnLayer, use_tucker

    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3, img_size=32)
    use_tucker(model, (2, 24, 16))
    x = torch.randn(2, 3, 32, 32)
    model(x).sum().backward()
    held = [p for name, p in model.named_parameters() if ".attn." in name]
    assert all(p.grad is not None for p in held)
    assert sum(p.numel() for p in held) < 2 * 4 * 192 * 192 / 8
    layer = functools.partial(TuckerAttnLayer, ranks=(2, 8, 8))(dim=24, num_heads=3, qkv_bias=True)
    assert layer(torch.randn(1, 4, 24)).shape == (1, 4, 24)
    with pytest.raises(ValueError, match="Tucker attention has no qk_norm"):
        TuckerAttnLayer(24, 3, ranks=(2, 8, 8), qk_norm=True)


class Plain(nn.Module):
    """An attention module with the projections that a reader knows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.num_heads, self.head_dim = 2, 4


class PlainAttention(Plain):
    pass


@pytest.mark.parametrize(
    ("attribute", "value", "feature"),
    [
        ("q_norm", nn.LayerNorm(4), r"qk-norm \(q_norm\)"),
        ("sliding_window", 128, "a sliding window of 128 tokens"),
        ("sinks", nn.Parameter(torch.zeros(2)), "attention sinks"),
        ("attn_logit_softcapping", 50.0, "soft-capping of the logits"),
        ("alibi_slopes", torch.ones(2), "ALiBi"),
        ("is_cross_attention", True, "cross-attention"),
        ("gate", nn.Linear(8, 8), "an output gate"),
    ],
)
def test_features_are_refused_by_name(attribute, value, feature):
    module = PlainAttention()
    refuse_features(module)
    setattr(module, attribute, value)
    with pytest.raises(UnsupportedAttention, match=f"PlainAttention has {feature}.*which a Tucker form cannot carry"):
        read_module(module)


def test_what_is_no_attention_is_refused():
    assert kind_of(Plain()) is None  # does not call itself attention
    with pytest.raises(UnsupportedAttention, match="Linear is no attention module that is known here"):
        read_module(nn.Linear(3, 3))
    with pytest.raises(UnsupportedAttention, match="added keys"):
        read_module(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(UnsupportedAttention, match="has no attention module of a known kind"):
        convert_model(nn.Sequential(nn.Linear(3, 3)))
    quantised = PlainAttention()
    quantised.k_proj = nn.Identity()
    with pytest.raises(UnsupportedAttention, match="quantised or no weights"):
        read_module(quantised)


def test_a_shared_layer_is_converted_once_and_stays_shared():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"first": attention})
    convert_model(model)
    assert sum(isinstance(m, TuckerAttention) for m in model.modules()) == 1


def test_cores_alone_are_trained_and_saved(tmp_path):
    from icml26_shared.errors import UserError
    from tucker_attention.integrations.adapters import freeze_factors, load_cores, save_cores

    model = convert_model(nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, batch_first=True)}), ranks=(2, 4, 4))
    names = freeze_factors(model)
    assert {name.rpartition(".")[2] for name in names} == {"C", "Ct", "U1", "V1"}
    path = save_cores(model, tmp_path / "cores.safetensors")
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in names:
                p.zero_()
    load_cores(model, path)
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    other = convert_model(nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, batch_first=True)}), ranks=(3, 4, 4))
    with pytest.raises(UserError, match="does not belong to this model"):
        load_cores(other, path)
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="is damaged"):
        load_cores(model, path)
    with pytest.raises(ValueError, match="has no Tucker layer"):
        freeze_factors(nn.Linear(2, 2))
