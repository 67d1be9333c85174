"""The trainable and the packed layer: same function, exact algebra, any shape and dtype."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robuq import packed as packed_module
from robuq.config import RobuQConfig
from robuq.kernels import cpu_decode, rotate
from robuq.linear import RobuQLinear
from robuq.lowrank import lowrank_factors
from robuq.packed import PackedLinear
from robuq.surgery import dequantize, freeze, quantize

SETTINGS = {
    "default": {},
    "no branch": {"rank": 0},
    "two bits": {"act_bits": 2},
    "eight bits": {"act_bits": 8},
    "ternary tokens": {"act_bits": "ternary"},
    "lloyd": {"quantizer": "gauss_lloyd", "act_bits": 2},
    "minmax": {"quantizer": "minmax", "act_bits": 3},
    "absmax": {"quantizer": "absmax"},
    "not quantised": {"act_bits": 16},
    "unbiased": {"gain": "unbiased", "weight_scale": "gauss", "act_bits": 2},
    "plain signs": {"signs": "none"},
    "no rotation": {"rotation": "none"},
    "block": {"fallback": "block"},
    "four-bit weights": {"ada": ("*",), "ada_weight_bits": 4},
    "tensor scale": {"granularity": "tensor", "weight_scale": "ls"},
}


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def make(n, out, seed=0, **settings):
    torch.manual_seed(seed)
    return quantize(nn.Linear(n, out), RobuQConfig(**settings))


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize(("n", "out"), [(64, 96), (100, 5), (7, 3), (1, 1), (1152, 33)])
def test_packed_layer_is_the_trainable_one(name, n, out):
    layer = make(n, out, **SETTINGS[name])
    x = torch.randn(3, 5, n)
    packed = freeze(copy.deepcopy(layer))
    assert isinstance(packed, PackedLinear)
    assert relative(packed(x), layer(x)) < 1e-5
    cached = freeze(copy.deepcopy(layer), cache="int8")
    assert relative(cached(x), packed(x)) < 1e-6


@pytest.mark.parametrize("n", [12, 100, 7, 576])
def test_rotation_changes_nothing_without_quantisation(n):
    linear = nn.Linear(n, 20)
    layer = RobuQLinear.from_linear(linear, RobuQConfig(act_bits=16, rank=0))
    with torch.no_grad():
        x = torch.randn(9, n)
        exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
        layer.quantised_weight = lambda: layer.weight_rot
        assert relative(layer(x), exact) < 1e-5


@pytest.mark.parametrize("name", ["not quantised", "four-bit weights"])
def test_dequantised_layer_is_the_same_linear_map(name):
    layer = make(100, 30, **{**SETTINGS[name], "act_bits": 16, "ada_bits": 16})
    x = torch.randn(4, 100)
    expected = layer(x).detach()
    for source in (copy.deepcopy(layer), freeze(copy.deepcopy(layer))):
        plain = dequantize(source)
        assert type(plain) is nn.Linear
        assert relative(plain(x), expected) < 1e-5


def test_integer_form_is_the_float_form():
    layer = make(64, 16, act_bits=2, rank=0)
    packed = freeze(copy.deepcopy(layer))
    x = torch.randn(6, 64)
    codes, d, _ = layer.quantizer.tokens(rotate(x, layer.recipe, layer.sign_vector()))
    t, alpha = packed.codes().double(), packed.alpha.double()
    integer = d.double()[:, None] * alpha * (codes.double() @ t.T + 0.5 * packed.rowsum.double())
    values = (codes.double() + 0.5) * d.double()[:, None]
    floating = values @ (alpha[:, None] * t).T
    assert relative(integer, floating) < 1e-12
    assert relative(packed(x).double() - packed.bias.double(), integer) < 1e-5
    assert torch.equal(packed.rowsum.long(), packed.codes().long().sum(1))


@given(
    m=st.integers(0, 40), n=st.integers(1, 150), out=st.integers(1, 70), bits=st.sampled_from([1, 2, 4, 8, "ternary"])
)
def test_any_size(m, n, out, bits):
    layer = make(n, out, act_bits=bits, rank=2)
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(m))
    packed = freeze(copy.deepcopy(layer))
    assert packed(x).shape == layer(x).shape == (m, out)
    assert torch.allclose(packed(x), layer(x), atol=2e-5 * max(1.0, float(layer(x).abs().max()) if m else 1.0))


def test_branch_starts_as_the_best_approximation_of_the_residual():
    layer = make(64, 48, rank=8)
    residual = (layer.weight_rot - layer.quantised_weight()).detach()
    u, s, vt = torch.linalg.svd(residual)
    best = u[:, :8] @ torch.diag(s[:8]) @ vt[:8]
    assert relative(layer.B @ layer.A, best) < 1e-3
    assert torch.allclose(layer.A.norm(dim=1), s[:8].sqrt(), rtol=1e-3)
    assert torch.allclose(layer.B.norm(dim=0), s[:8].sqrt(), rtol=1e-3)


@pytest.mark.parametrize(("out", "n"), [(5, 9), (9, 5), (1, 4), (3, 1)])
def test_a_rank_above_the_smaller_side_is_filled_up(out, n):
    residual = torch.randn(out, n, dtype=torch.float64)
    a, b = lowrank_factors(residual, 16)
    assert (a.shape, b.shape) == ((16, n), (out, 16))
    assert torch.allclose(b @ a, residual, atol=1e-7)


def test_large_layers_use_subspace_iteration(monkeypatch):
    import robuq.lowrank as lowrank

    g = torch.Generator().manual_seed(0)
    residual = torch.randn(60, 80, generator=g) + 3 * torch.randn(60, 2, generator=g) @ torch.randn(2, 80, generator=g)
    exact_a, exact_b = lowrank_factors(residual, 4)
    monkeypatch.setattr(lowrank, "_EXACT", 10)
    a, b = lowrank_factors(residual, 4)
    exact, found = (residual - exact_b @ exact_a).norm(), (residual - b @ a).norm()
    assert float(found / exact) < 1.0005


def test_gradients_of_branch_and_input_in_float64():
    layer = make(12, 5, act_bits=16, rank=3).double()
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t, a, b: torch.func.functional_call(layer, {"A": a, "B": b}, (t,)),
        (x, layer.A.detach().clone().requires_grad_(), layer.B.detach().clone().requires_grad_()),
    )


def test_float64_layer_packs_exactly():
    layer = make(12, 5, rank=3).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    assert relative(freeze(copy.deepcopy(layer))(x), layer(x)) < 1e-6


def test_gradient_of_the_weight_is_straight_through():
    layer = make(16, 8, rank=0)
    x = torch.randn(10, 16)
    grad = torch.randn(10, 8)
    layer(x).backward(grad)
    _, values = layer.quantizer.rotated(x, layer.recipe, layer.sign_vector(), keep_rotated=False)
    assert torch.allclose(layer.weight_rot.grad, grad.T @ values, atol=1e-5)


def test_empty_batches_keep_their_gradient():
    layer = make(12, 4)
    x = torch.zeros(0, 12, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 4)
    assert x.grad.shape == (0, 12)
    assert torch.equal(layer.weight_rot.grad, torch.zeros_like(layer.weight_rot))


@pytest.mark.parametrize("shape", [(12,), (2, 12), (2, 3, 12), (2, 1, 3, 12), (2, 1, 2, 3, 12)])
def test_one_to_five_axes_and_strides(shape):
    layer = make(12, 4)
    x = torch.randn(*shape[::-1]).permute(*range(len(shape))[::-1])
    for module in (layer, freeze(copy.deepcopy(layer))):
        y = module(x)
        assert y.shape == (*shape[:-1], 4)
        assert torch.allclose(y, module(x.contiguous()), atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_wrong_width_and_type_are_named():
    layer = make(12, 4)
    for module in (layer, freeze(copy.deepcopy(layer))):
        with pytest.raises(ValueError, match=r"the last axis must have length 12, got shape \(3, 11\)"):
            module(torch.ones(3, 11))
        with pytest.raises(TypeError, match="floating point tensors"):
            module(torch.ones(3, 12, dtype=torch.long))


def test_check_names_the_layer():
    model = quantize(nn.Sequential(nn.Linear(4, 4)), RobuQConfig(check=True))
    with pytest.raises(FloatingPointError, match=r"^0: 1 token"):
        model(torch.tensor([[1.0, 2.0, float("inf"), 0.0]]))


@pytest.mark.parametrize("value", [0.0, 1e4, -1e4])
def test_tokens_of_zeros_and_of_1e4(value):
    layer = make(64, 8, act_bits=2)
    packed = freeze(copy.deepcopy(layer))
    x = torch.full((2, 64), value)
    assert torch.isfinite(packed(x)).all()
    assert relative(packed(x), layer(x)) < 1e-5
    if value == 0:
        assert torch.equal(packed(x), packed.bias.expand(2, 8))


def test_a_bad_token_leaves_the_others_alone():
    layer = make(64, 8)
    for module in (layer, freeze(copy.deepcopy(layer))):
        x = torch.randn(3, 64)
        good = module(x).detach().clone()
        x[1, 3] = float("nan")
        y = module(x)
        assert torch.isnan(y[1]).all()
        assert torch.equal(y[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_and_casts(dtype):
    layer = make(64, 8)
    x = torch.randn(5, 64)
    packed = freeze(copy.deepcopy(layer)).to(dtype)
    assert packed.alpha.dtype == torch.float32
    assert packed.A.dtype == torch.bfloat16
    y = packed(x.to(dtype))
    assert y.dtype == dtype
    assert relative(y.float(), layer(x.to(dtype).float())) < 0.02
    trained = copy.deepcopy(layer).to(dtype)
    assert trained(x.to(dtype)).dtype == dtype


def test_autocast_keeps_statistics_in_float32():
    layer = make(64, 8, act_bits=4)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert relative(y.float(), layer(x)) < 0.03
    assert layer.weight_rot.grad.dtype == torch.float32


@pytest.mark.usefixtures("unchecked")
def test_bits_can_be_switched():
    layer = make(64, 8, rank=0)
    packed, x = freeze(copy.deepcopy(layer)), torch.randn(50, 64)
    exact = packed.weight @ x.T
    errors = []
    for bits in (1, 2, 3, 4, 8):
        packed.bits = bits
        errors.append(float((packed(x) - packed.bias - exact.T).square().mean()))
    assert errors == sorted(errors, reverse=True)
    with pytest.raises(ValueError, match=r"act_bits must be 1 to 8, 'ternary', or 16 \(not quantised\), got 9"):
        packed.bits = 9


def test_copies_pickles_and_state_dicts():
    layer = make(100, 8)
    x = torch.randn(3, 100)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301 - of this very process
        assert torch.equal(other(x), expected)
    fresh = make(100, 8, seed=9)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), expected)
    packed = freeze(copy.deepcopy(layer))
    again = freeze(make(100, 8, seed=3))
    again.load_state_dict(packed.state_dict())
    assert torch.equal(again(x), packed(x))
    assert torch.equal(pickle.loads(pickle.dumps(packed))(x), packed(x))  # noqa: S301


def test_packed_layer_has_no_float_copy():
    layer = make(1152, 1152, rank=0)
    packed = freeze(layer)
    packed(torch.randn(2, 1152))
    held = sum(t.numel() * t.element_size() for t in [*packed.parameters(), *packed.buffers()])
    assert held <= 0.2506 * 1152 * 1152 + 8 * 1152 + 4 * 1152 + 1152 // 8
    assert all(t.numel() <= 1152 for t in packed.buffers() if t.dtype.is_floating_point)


def test_few_tokens_go_through_one_kernel_to_the_same_result(monkeypatch):
    """Widths with and without Paley factors and padding; every kind of grid; with and without branch and bias."""
    torch.manual_seed(0)
    x_of = {n: torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 12, 64, 100, 576, 1152)}
    settings = [{}, {"rank": 0}, {"signs": "none", "act_bits": 2}, {"quantizer": "absmax"}, {"act_bits": "ternary"},
                {"gain": "unbiased", "act_bits": 1, "rank": 3}, {"rotation": "none"}]  # fmt: skip
    for n, x in x_of.items():
        for i, changed in enumerate(settings):
            layer = RobuQLinear(n, 70 - n % 5, i % 2 == 0, RobuQConfig(**changed), "some.layer")
            few = freeze(layer)
            monkeypatch.setattr(packed_module, "DECODE_TOKENS", 4)
            found = [few(x[:m]) for m in (1, 2, 4)]
            monkeypatch.setattr(packed_module, "DECODE_TOKENS", 0)
            expected = few(x)
            for y in found:
                assert relative(y, expected[: len(y)]) < 2e-6, (n, changed)


def test_the_kernel_for_few_tokens_sees_changes_of_the_buffers():
    packed, x = freeze(make(64, 8)), torch.randn(2, 64)
    before = packed(x)
    packed.bias += 1
    assert torch.allclose(packed(x), before + 1, atol=1e-6)
    packed.bias -= 1
    packed.alpha *= 2
    packed.B *= 2
    assert torch.allclose(packed(x) - packed.bias, 2 * (before - packed.bias), atol=1e-5)
    other = freeze(make(64, 8, seed=5))
    packed.load_state_dict(other.state_dict())
    assert torch.equal(packed(x), other(x))
    packed.qweight = torch.full_like(packed.qweight, 0x55)  # all weights code 1, which is 0
    packed.rowsum = torch.zeros_like(packed.rowsum)
    packed.A = torch.zeros_like(packed.A)
    assert torch.allclose(packed(x), packed.bias.expand(2, 8), atol=1e-6)


def test_the_kernel_for_few_tokens_on_threads(monkeypatch):
    torch.manual_seed(0)
    layer = RobuQLinear(32, 1024, True, RobuQConfig(rank=2))
    packed, x = freeze(layer), torch.randn(1, 32)
    alone = packed(x)
    monkeypatch.setattr(cpu_decode, "_WEIGHTS_A_THREAD", 1)
    torch.set_num_threads(2)  # the fixture puts it back
    assert torch.equal(packed(x), alone)
