"""Health report, counts from shapes, gain by calibration, baselines, and torch.compile."""

import copy

import pytest
import torch
from torch import nn

from robuq.accounting import dit_xl2, dit_xl2_other_parameters, equivalents, layer_bytes, operations, packed_size
from robuq.baselines import BASELINES, add_adaln_norms, baseline
from robuq.calibration import choose_gain
from robuq.config import RobuQConfig
from robuq.eval.tiny_dit import TinyDiT, dit_factory
from robuq.inspection import inspect_layers
from robuq.linear import RobuQLinear
from robuq.surgery import freeze, quantize


def test_plain_hadamard_on_tokens_with_a_mean_is_flagged():
    torch.manual_seed(0)
    x = nn.functional.gelu(torch.randn(64, 1024))
    plain = quantize(nn.Sequential(nn.Linear(1024, 8)), RobuQConfig(signs="none", rank=0, act_bits=4))
    signed = quantize(nn.Sequential(nn.Linear(1024, 8)), RobuQConfig(rank=0, act_bits=4))
    (bad,), (good,) = inspect_layers(plain, [x]), inspect_layers(signed, [x])
    assert bad.kurtosis_after > 10
    assert "use signs='random'" in bad.remark
    assert good.remark == ""
    assert 2.8 < good.kurtosis_after < 3.2
    # the specification's figures for this very case
    assert bad.nmse == pytest.approx(0.136, abs=0.015)
    assert good.nmse == pytest.approx(0.0114, abs=0.001)
    assert good.expected == pytest.approx(0.01154288, abs=1e-7)
    assert good.dc_share == pytest.approx(bad.dc_share)
    two = quantize(nn.Sequential(nn.Linear(1024, 8)), RobuQConfig(rank=0, act_bits=2))
    assert inspect_layers(two, [x])[0].nmse == pytest.approx(0.118, abs=0.003)


def test_sizes_are_those_of_packed_layers():
    for config in (RobuQConfig(), RobuQConfig(rank=0), RobuQConfig(ada=("*",), ada_weight_bits=4, signs="none")):
        layer = RobuQLinear(100, 7, True, config)
        packed = freeze(copy.deepcopy(layer))
        held = sum(t.numel() * t.element_size() for t in packed.buffers())
        assert layer_bytes(layer) == layer_bytes(packed) == held


def test_counts_of_dit_xl2():
    weights = sum(count * (n * out + out) for (n, out, _), count in dit_xl2().values())
    assert weights + dit_xl2_other_parameters() == pytest.approx(675e6, rel=0.002)
    assert sum(operations().values()) == pytest.approx(118.6, rel=0.005)  # published GFLOPs of DiT-XL/2
    assert equivalents(2)["weights x activations"] == pytest.approx(6.92, rel=0.05)
    assert equivalents(2)["attention"] == pytest.approx(1.01, rel=0.05)


def test_packed_size_is_measured(tmp_path):
    layers = {"a": ((64, 64, True), 3), "b": ((64, 32, False), 1)}
    found = packed_size(layers, 0, tmp_path)
    others = dit_xl2_other_parameters()
    assert found["float32"] == 4 * (3 * (64 * 64 + 64) + 64 * 32 + others)
    bare = found["packed"] - 2 * others
    assert 3 * 64 * 64 / 4 + 64 * 32 / 4 < bare < 3 * 64 * 64 / 4 + 64 * 32 / 4 + 4 * 3000
    assert not any(tmp_path.iterdir())


def test_gain_is_chosen_by_the_output():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(128, 64)
    reference = plain(x).detach()
    model = quantize(plain, RobuQConfig.ptq(act_bits=2, rank=4))
    unbiased, errors = choose_gain(model, [x], lambda m, b: m(b), [reference])
    assert unbiased == (errors["unbiased"] < errors["mse"])
    with torch.no_grad():
        assert float((model(x) - reference).square().mean()) == pytest.approx(min(errors.values()), rel=1e-5)
    assert all(layer.unbiased == unbiased for layer in (model[0], model[2]))
    with pytest.raises(ValueError, match="give one for each"):
        choose_gain(model, [x], lambda m, b: m(b), [])


def test_gauss_weights_are_better_than_absmean_without_training():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(256, 64)
    exact = plain(x).detach()
    error = {}
    for scale, gain in (("absmean", "mse"), ("gauss", "mse"), ("gauss", "unbiased")):
        config = RobuQConfig(act_bits=16, rank=0, weight_scale=scale, weight_gain=gain)
        error[scale, gain] = float((quantize(copy.deepcopy(plain), config)(x) - exact).square().mean())
    assert error["gauss", "mse"] < error["absmean", "mse"]


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_run_on_a_dit(name):
    torch.manual_seed(0)
    model = quantize(TinyDiT(depth=1), baseline(name, 3, rank=4))
    if name == "terdit":
        add_adaln_norms(model, torch.randn(8, 64))
        assert type(model.blocks[0].adaLN_modulation).__name__ == "NormedModulation"
    layer = model.blocks[0].attn.qkv
    assert layer.bits == (16 if name == "terdit" else 3)
    assert (layer.A is None) == (name in ("bitnet", "minmax", "terdit"))
    assert (layer.recipe.power > 0) == (name in ("robuq", "minmax+branch+hadamard"))
    out = model(torch.randn(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert out.shape == (2, 1, 8, 8)
    assert torch.isfinite(out).all()


def test_unknown_baselines_are_named():
    with pytest.raises(ValueError, match="baseline must be one of 'bitnet'"):
        baseline("gptq")


def test_dits_are_recognised_by_their_tensors():
    model = TinyDiT(size=16, patch=2, dim=48, depth=2, heads=3, channels=4, out_channels=8, frequencies=32)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = dit_factory(shapes)()
    assert {n: tuple(t.shape) for n, t in found.state_dict().items()} == shapes
    assert found.blocks[0].attn.heads == 3
    with pytest.raises(ValueError, match="this is no checkpoint of a DiT"):
        dit_factory({"x": (1,)})


def test_under_torch_compile():
    torch.manual_seed(0)
    layer = quantize(nn.Linear(12, 8), RobuQConfig(rank=2))
    x = torch.randn(5, 12)
    compiled = torch.compile(layer, backend="eager")
    assert torch.allclose(compiled(x), layer(x), atol=1e-6)
    packed = freeze(copy.deepcopy(layer))
    assert torch.allclose(torch.compile(packed, backend="eager")(x), packed(x), atol=1e-6)
    compiled(x).sum().backward()
    assert layer.weight_rot.grad is not None


def test_parameter_names_for_distributed_training():
    layer = quantize(nn.Linear(12, 8), RobuQConfig(rank=2))
    assert [name for name, _ in layer.named_parameters()] == ["weight_rot", "A", "B", "bias"]
    assert [name for name, _ in layer.named_buffers()] == ["signs"]
    assert not list(freeze(copy.deepcopy(layer)).parameters())
