"""Ternary weights: golden row, rules, errors, packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robuq.kernels.packed import has_invalid, pack_ternary, unpack_ternary
from robuq.packed import pack_nibbles, unpack_nibbles
from robuq.ternary import TernaryWeight, ternarize


def test_golden_row():
    codes, alpha = ternarize(torch.tensor([[0.9, -0.1, 0.35, -1.4]]))
    assert float(alpha[0]) == pytest.approx(0.6875)
    assert codes.tolist() == [[1, 0, 1, -1]]
    assert pack_ternary(codes).tolist() == [[0x26]]


# NMSE and slope of Gaussian rows, exact integrals of the specification
@pytest.mark.parametrize(
    ("scale", "unbiased", "nmse"),
    [("absmean", False, 0.2634), ("gauss", False, 0.1902), ("ls", False, 0.2130), ("gauss", True, 0.2348)],
)
def test_error_on_gaussian_rows(scale, unbiased, nmse):
    w = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    codes, alpha = ternarize(w, scale, unbiased=unbiased)
    error = (codes * alpha[:, None] - w).square().mean() / w.square().mean()
    assert float(error) == pytest.approx(nmse, abs=0.002)  # unbiased: 0.19017 / (1 - 0.19017)


def test_absmean_shrinks_and_unbiased_gauss_does_not():
    w = torch.randn(100, 4096, generator=torch.Generator().manual_seed(0))
    for scale, unbiased, slope in (("absmean", False, 0.588), ("gauss", False, 0.80983), ("gauss", True, 1.0)):
        codes, alpha = ternarize(w, scale, unbiased=unbiased)
        found = float((codes * alpha[:, None] * w).sum() / (w * w).sum())
        assert found == pytest.approx(slope, abs=0.005)


@pytest.mark.parametrize("scale", ["absmean", "gauss", "ls"])
def test_rows_of_zeros_stay_zero(scale):
    w = torch.randn(3, 8)
    w[1] = 0
    codes, alpha = ternarize(w, scale)
    assert codes[1].tolist() == [0] * 8
    assert float(alpha[1]) == 0.0
    assert torch.isfinite(alpha).all()


def test_one_scale_for_the_tensor():
    w = torch.tensor([[1.0, -1.0], [0.25, 0.25]])
    codes, alpha = ternarize(w, granularity="tensor")
    assert alpha.tolist() == [0.625, 0.625]
    assert codes.tolist() == [[1, -1], [0, 0]]
    for scale in ("gauss", "ls"):
        alpha = ternarize(w, scale, granularity="tensor")[1]
        assert float(alpha[0]) == float(alpha[1])


def test_gradient_is_straight_through():
    w = torch.randn(3, 5, requires_grad=True)
    grad = torch.randn(3, 5)
    TernaryWeight.apply(w, "absmean", "channel", False).backward(grad)
    assert torch.equal(w.grad, grad)


@pytest.mark.usefixtures("unchecked")
def test_bad_rules_are_named():
    with pytest.raises(ValueError, match="weight_scale must be one of 'absmean', 'gauss', 'ls', got 'max'"):
        ternarize(torch.ones(1, 1), "max")
    with pytest.raises(ValueError, match="granularity must be 'channel' or 'tensor', got 'row'"):
        ternarize(torch.ones(1, 1), granularity="row")


@given(n=st.integers(1, 33), out=st.integers(1, 6), seed=st.integers(0, 99))
def test_packing_is_undone_for_every_tail(n, out, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (out, n), generator=g, dtype=torch.int8)
    packed = pack_ternary(codes)
    assert packed.shape == (out, (n + 3) // 4)
    assert torch.equal(unpack_ternary(packed, n), codes)
    assert not has_invalid(packed)
    if n % 4:
        tail = unpack_ternary(packed, packed.shape[1] * 4)[:, n:]
        assert not tail.any()  # the tail is code 1: zero weights
    four = torch.randint(-8, 8, (out, n), generator=g, dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(four), n), four)


def test_code_three_is_found_and_other_values_are_refused():
    assert has_invalid(torch.tensor([[0x26, 0x30]], dtype=torch.uint8))
    with pytest.raises(ValueError, match="ternary codes are -1, 0 or 1, got 0 to 2"):
        pack_ternary(torch.tensor([[0, 2]], dtype=torch.int8))
