"""RobustQuantizer on tokens: golden codes, equivariance, gradients, bad values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robuq.hadamard import rotation
from robuq.quantizer import TokenQuantizer, robust_quantize

Y = torch.tensor([3.0, -1.0, 0.5, -0.1])


def test_golden_token():
    codes, d = robust_quantize(Y, 2)
    assert codes.tolist() == [1, -1, 0, -1]
    assert float(d) == pytest.approx(1.59465367, abs=1e-6)
    assert float(d) / 0.99568667 == pytest.approx(1.60156174, abs=1e-6)
    values = TokenQuantizer(2).values(Y[None])[0]
    assert values.tolist() == pytest.approx([2.39198051, -0.79732684, 0.79732684, -0.79732684], abs=1e-6)
    assert robust_quantize(Y, 1)[0].tolist() == [0, -1, 0, -1]
    assert TokenQuantizer(1).values(Y[None])[0].tolist() == pytest.approx(
        [1.27786138, -1.27786138, 1.27786138, -1.27786138], abs=1e-6
    )
    assert robust_quantize(Y, 4)[0].tolist() == [5, -2, 0, -1]


def test_ternary_codes_are_mid_tread():
    codes, d = robust_quantize(torch.tensor([[3.0, -1.0, 0.5, -0.1]]), "ternary")
    assert codes.tolist() == [[1, -1, 0, 0]]
    assert float(d[0]) == pytest.approx(1.22400638 * 1.60156174, abs=1e-5)


@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, "ternary"]),
    power=st.integers(-20, 20),
    kind=st.sampled_from(["gauss_uniform", "gauss_lloyd", "minmax"]),
)
def test_scale_equivariance(seed, bits, power, kind):
    x = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed))
    q, c = TokenQuantizer(bits, kind), 2.0**power  # a power of two, so that rounding is the same
    assert torch.allclose(q.values(c * x), c * q.values(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, "ternary"])
def test_zero_tokens_give_zero_and_finite_gradients(bits):
    x = torch.zeros(2, 12, requires_grad=True)
    rotated, values = TokenQuantizer(bits).rotated(x, rotation(12), None, keep_rotated=True)
    assert torch.equal(values, torch.zeros(2, 12))
    (rotated.sum() + values.sum()).backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e30])
def test_statistics_neither_overflow_nor_vanish(size):
    x = torch.tensor([[1.0, -2.0, 0.5, 0.25]])
    codes, d = robust_quantize(x * size, 4)
    assert torch.equal(codes, robust_quantize(x, 4)[0])
    assert float(d[0]) == pytest.approx(size * float(robust_quantize(x, 4)[1][0]), rel=1e-5)


def test_float16_squares_do_not_overflow():
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    assert math.isfinite(float(robust_quantize(x, 2)[1][0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["gauss_uniform", "gauss_lloyd", "minmax", "absmax"])
def test_a_bad_value_poisons_its_own_token_only(bad, kind):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    good = TokenQuantizer(4, kind).values(x)
    x[2, 5] = bad
    values = TokenQuantizer(4, kind).values(x)
    assert torch.isnan(values[2]).all()
    keep = [0, 1, 3]
    assert torch.equal(values[keep], good[keep])
    _, fused = TokenQuantizer(4).rotated(x, rotation(12), None, keep_rotated=False)
    assert torch.isnan(fused[2]).all()
    assert torch.isfinite(fused[keep]).all()


def test_check_raises_on_bad_values():
    with pytest.raises(FloatingPointError, match=r"robust_quantize: 1 token\(s\) have values that are not finite"):
        robust_quantize(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), 4, check=True)


@pytest.mark.parametrize("bits", [0, 9, 16, True, "two", 1.5])
@pytest.mark.usefixtures("unchecked")
def test_bits_are_checked(bits):
    with pytest.raises(ValueError, match="bits must be one of 1 to 8 or 'ternary'"):
        robust_quantize(Y, bits)


def test_straight_through_gradient_is_the_mask():
    y = torch.tensor([[3.0, -1.0, 0.5, -0.1]], requires_grad=True)
    TokenQuantizer(1).straight_through(y).sum().backward()
    assert y.grad.tolist() == [[0.0, 1.0, 1.0, 1.0]]  # d = 2.5557 and one level a side: the range ends at |y| = d
    identity = torch.tensor([[3.0, -1.0, 0.5, -0.1]], requires_grad=True)
    TokenQuantizer(1, ste="identity").rotated(identity, rotation(4), None, keep_rotated=False)[1].sum().backward()
    assert identity.grad[0].tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", ["gauss_uniform", "gauss_lloyd"])
def test_fused_gradient_equals_mask_then_inverse_rotation(kind):
    x = (3 * torch.randn(9, 12, generator=torch.Generator().manual_seed(1))).requires_grad_()
    q = TokenQuantizer(2, kind)
    rotated, values = q.rotated(x, rotation(12), None, keep_rotated=True)
    weight = torch.randn(9, 12, generator=torch.Generator().manual_seed(2))
    (values * weight).sum().backward()
    y = rotated.detach()
    s = y.square().mean(1, keepdim=True).sqrt()
    masked = torch.where(y.abs() <= 2 * 0.99568667 * s, weight, 0.0)
    assert torch.allclose(x.grad, masked @ rotation(12).dense(torch.float32).T, atol=1e-5)


def test_unbiased_gain_makes_the_slope_one():
    x = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    for bits, nmse in ((2, 0.11884605), (4, 0.01154288)):
        assert TokenQuantizer(bits, unbiased=True).gain == pytest.approx(1 / (1 - nmse), rel=1e-6)
        slope = (TokenQuantizer(bits, unbiased=True).values(x) * x).sum() / (x * x).sum()
        assert float(slope) == pytest.approx(1.0, abs=0.003)


def test_minmax_reaches_both_ends_and_keeps_constant_tokens():
    q = TokenQuantizer(2, "minmax")
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0], [-2.0, -2.0, -2.0, -2.0]])
    assert torch.allclose(q.values(x), x, atol=1e-6)


def test_absmax_is_bitnets():
    q = TokenQuantizer(4, "absmax")
    x = torch.tensor([[7.0, -3.4, 0.4, -7.0]])
    assert q.tokens(x)[0].tolist() == [[7, -3, 0, -7]]
    with pytest.raises(ValueError, match="absmax quantiser needs at least 2 bits"):
        TokenQuantizer(1, "absmax")
