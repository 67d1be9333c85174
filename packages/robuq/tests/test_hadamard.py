"""Rotations of every width: orthonormal, exact, seeded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robuq.hadamard import (
    factorise,
    hadamard,
    inverse_hadamard,
    paley,
    paley_orders,
    random_signs,
    rotation,
    unpack_signs,
)
from robuq.kernels.rotate import rotate

FACTORS = {
    96: (12, 8), 192: (12, 16), 384: (12, 32), 576: (12, 12, 4), 640: (20, 32), 768: (12, 64), 1152: (12, 12, 8),
    1536: (12, 128), 2304: (12, 12, 16), 3072: (12, 256), 3584: (28, 128), 4608: (12, 12, 32), 5120: (20, 256),
    8960: (20, 28, 16), 14336: (28, 512), 18944: (148, 128),
}  # fmt: skip


@pytest.mark.parametrize("n", list(FACTORS))
def test_factorisation(n):
    orders, power = factorise(n)
    assert (*orders, 2**power) == FACTORS[n]


@pytest.mark.parametrize("n", [4304, 5461, 5504, 11008])
def test_widths_without_a_factorisation_are_padded_by_at_most_an_eighth(n):
    assert factorise(n) is None
    found = rotation(n)
    assert n < found.padded <= n + n // 8
    block = rotation(n, "block")
    assert (block.padded, block.blocks * 2**block.power) == (n, n)


@pytest.mark.parametrize("order", paley_orders())
def test_paley_matrices_are_hadamard(order):
    h = torch.from_numpy(paley(order).copy()).double()
    assert torch.equal(h.abs(), torch.ones_like(h))
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_named_in_the_specification_exist():
    assert {12, 20, 24, 28, 36, 44, 48, 60, 68, 72, 76, 80, 148} <= set(paley_orders())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 12, 28, 96, 100, 192, 576, 640, 768, 1152, 1536])
def test_dense_matrix_is_orthonormal(n):
    h = rotation(n).dense()
    assert torch.allclose(h @ h.T, torch.eye(len(h), dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("n", list(FACTORS))
def test_transform_keeps_products_and_is_undone(n):
    g = torch.Generator().manual_seed(n)
    x, w = torch.randn(3, n, generator=g, dtype=torch.float64), torch.randn(2, n, generator=g, dtype=torch.float64)
    signs = unpack_signs(torch.from_numpy(random_signs(n, "layer", 0)), n).double()
    rotated = hadamard(x, signs)
    assert torch.allclose(rotated @ hadamard(w, signs).T, x @ w.T, atol=1e-9)
    assert torch.allclose(inverse_hadamard(rotated, rotation(n), signs), x, atol=1e-12)


def test_golden_four():
    assert hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [5.0, -1.0, -2.0, 0.0]


@given(n=st.integers(1, 200), tokens=st.integers(0, 19), seed=st.integers(0, 99))
def test_fast_path_equals_the_dense_matrix(n, tokens, seed):
    x = torch.randn(tokens, n, generator=torch.Generator().manual_seed(seed))
    recipe = rotation(n)
    padded = torch.nn.functional.pad(x, (0, recipe.padded - n))
    assert torch.allclose(hadamard(x).double(), padded.double() @ recipe.dense(), atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 12, 100, 1152])
def test_cpu_kernel_equals_the_reference(n):
    x = torch.randn(21, n, generator=torch.Generator().manual_seed(0))
    signs = unpack_signs(torch.from_numpy(random_signs(n, "a.b", 3)), n)
    there, expected = rotate(x, rotation(n), signs), rotate(x, rotation(n), signs, prefer="torch")
    assert torch.allclose(there, expected, atol=2e-6)
    back = rotate(there, rotation(n), signs, inverse=True)
    assert torch.allclose(back, x, atol=2e-6)


def test_gradient_of_the_rotation():
    x = torch.randn(3, 100, dtype=torch.float64, requires_grad=True)
    signs = unpack_signs(torch.from_numpy(random_signs(100, "x", 0)), 100).double()
    assert torch.autograd.gradcheck(lambda t: hadamard(t, signs), (x,))
    recipe = rotation(100)
    y = torch.randn(3, recipe.padded, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: inverse_hadamard(t, recipe, signs), (y,))


def test_any_shape_stride_and_dtype():
    x = torch.randn(4, 2, 3, 12).transpose(0, 2)
    expected = hadamard(x.contiguous().reshape(-1, 12)).reshape(x.shape)
    assert torch.allclose(hadamard(x), expected, atol=1e-6)
    assert torch.equal(hadamard(x[0, 0, 0]), hadamard(x)[0, 0, 0])
    for dtype in (torch.bfloat16, torch.float16):
        assert hadamard(x.to(dtype)).dtype == dtype
        assert torch.allclose(hadamard(x.to(dtype)).float(), expected, atol=0.05)


def test_signs_depend_on_name_and_seed_and_are_packed():
    bits = random_signs(13, "blocks.0.attn.qkv", 0)
    assert bits.shape == (2,)
    assert bits[1] < 2**5
    assert (bits == random_signs(13, "blocks.0.attn.qkv", 0)).all()
    assert (random_signs(64, "a", 0) != random_signs(64, "b", 0)).any()
    assert (random_signs(64, "a", 0) != random_signs(64, "a", 1)).any()
    share = (unpack_signs(torch.from_numpy(random_signs(10000, "a", 0)), 10000) < 0).float().mean()
    assert 0.47 < float(share) < 0.53


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    with pytest.raises(ValueError, match="width of at least 1, got 0"):
        rotation(0)
    with pytest.raises(ValueError, match="fallback must be one of 'pad', 'block', got 'dense'"):
        rotation(8, "dense")
    with pytest.raises(TypeError, match=r"floating point tensors, got torch.int64"):
        hadamard(torch.arange(4))
    with pytest.raises(ValueError, match=r"signs must have shape \(4,\), got \(3,\)"):
        hadamard(torch.ones(4), torch.ones(3))
    with pytest.raises(ValueError, match="no Paley matrix of order 16"):
        paley(92 - 76)


def kurtosis(x):
    x = x - x.mean()
    return float(x.pow(4).mean() / x.square().mean().square())


def test_random_signs_make_post_gelu_tokens_normal_and_plain_ones_do_not():
    x = torch.nn.functional.gelu(torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)))
    signs = unpack_signs(torch.from_numpy(random_signs(1024, "mlp.fc2", 0)), 1024)
    assert 2.8 <= kurtosis(hadamard(x, signs)) <= 3.2
    assert kurtosis(hadamard(x)) > 10
