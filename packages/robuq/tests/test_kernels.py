"""Every operation's paths give one result: reference, CPU kernels, Triton in its interpreter."""

import math

import pytest
import torch

from icml26_shared.kernels import interpreting
from robuq.gaussian import gaussian_step
from robuq.hadamard import Rotation, random_signs, rotation, unpack_signs
from robuq.kernels import Grid, fake_quant, hadamard_quant, pack_ternary, rotate, ternary_gemm
from robuq.kernels import ternary_gemm as gemm_module_function
from robuq.quantizer import TokenQuantizer

interpreted = pytest.mark.triton_interpreter
WIDTHS = [1, 4, 7, 12, 64, 100, 576, 1152]
KINDS = [TokenQuantizer(2), TokenQuantizer(4), TokenQuantizer("ternary"), TokenQuantizer(8, "absmax")]


def tokens(m, n, dtype=torch.float32, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def signs_of(n):
    return unpack_signs(torch.from_numpy(random_signs(n, "layer", 0)), n)


def agree(codes, d, expected_codes, expected_d, y, grid):
    """Codes are equal but for ties: values within 1e-6 relative of a threshold."""
    assert torch.allclose(d, expected_d, rtol=1e-5, equal_nan=True)
    differs = codes != expected_codes
    ratio = y / expected_d[:, None]
    shifted = ratio + 0.5 if grid.rounds else ratio
    near = (shifted - shifted.round()).abs() <= 1e-5 * shifted.abs().clamp(min=1)
    assert not (differs & ~near).any()
    assert differs.float().mean() < 1e-3


def check_quant(prefer, n, quantizer, dtype=torch.float32, m=19):
    grid, x, recipe, signs = quantizer.grid, tokens(m, n, dtype), rotation(n), signs_of(n)
    x[1] = 0
    codes, d, y = hadamard_quant(x, recipe, signs, grid, keep_rotated=True, prefer=prefer)
    expected_codes, expected_d, expected_y = hadamard_quant(x, recipe, signs, grid, keep_rotated=True, prefer="torch")
    assert torch.allclose(y, expected_y, atol=1e-5)
    live = torch.arange(m) != 1
    agree(codes[live], d[live], expected_codes[live], expected_d[live], expected_y[live], grid)
    assert float(d[1]) == 0
    assert not codes[1].any()


@pytest.mark.parametrize("quantizer", KINDS, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_cpu_codes_are_the_references(n, quantizer):
    check_quant("cpu", n, quantizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_codes_of_half_precision(dtype):
    check_quant("cpu", 576, TokenQuantizer(4), dtype)


@interpreted
@pytest.mark.parametrize("quantizer", KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 4, 12, 64, 100, 576])
def test_triton_codes_are_the_references(n, quantizer):
    assert interpreting()
    check_quant("triton", n, quantizer, m=5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_codes_of_half_precision(dtype):
    check_quant("triton", 96, TokenQuantizer(4), dtype, m=5)


@interpreted
@pytest.mark.parametrize("n", [1, 2, 3, 12, 28, 96, 100, 18944])
@pytest.mark.parametrize("inverse", [False, True])
def test_triton_rotation(n, inverse):
    recipe, signs = rotation(n), signs_of(n)
    x = tokens(3, recipe.padded if inverse else n)
    found = rotate(x, recipe, signs, inverse=inverse, prefer="triton")
    assert torch.allclose(found, rotate(x, recipe, signs, inverse=inverse, prefer="torch"), atol=2e-5)


@interpreted
def test_triton_reads_strides_and_blocks():
    recipe = Rotation(24, 24, 3, (), 3)
    wide = tokens(48, 6).T[:, ::2]
    assert torch.allclose(
        rotate(wide, recipe, signs_of(24), prefer="triton"),
        rotate(wide, recipe, signs_of(24), prefer="torch"),
        atol=1e-5,
    )
    codes, _, _ = hadamard_quant(
        tokens(40, 12).T[:, ::2][:, :20], rotation(20), None, TokenQuantizer(3).grid, prefer="triton"
    )
    expected, _, _ = hadamard_quant(
        tokens(40, 12).T[:, ::2][:, :20], rotation(20), None, TokenQuantizer(3).grid, prefer="torch"
    )
    assert (codes != expected).float().mean() < 1e-3


def check_empty(prefer):
    grid = TokenQuantizer(4).grid
    codes, d, y = hadamard_quant(torch.zeros(0, 12), rotation(12), None, grid, keep_rotated=True, prefer=prefer)
    assert (codes.shape, d.shape, y.shape) == ((0, 12), (0,), (0, 12))
    packed = pack_ternary(torch.ones(3, 12, dtype=torch.int8))
    assert ternary_gemm(codes, d, packed, torch.ones(3), torch.full((3,), 12), prefer=prefer).shape == (0, 3)


def test_cpu_empty():
    check_empty("cpu")


@interpreted
def test_triton_empty():
    check_empty("triton")


def check_bad_values(prefer):
    x = tokens(4, 12)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    grid = TokenQuantizer(4).grid
    codes, d, _ = hadamard_quant(x, rotation(12), None, grid, prefer=prefer)
    assert torch.isnan(d[1:3]).all()
    assert torch.isfinite(d[[0, 3]]).all()
    assert not codes[1:3].any()
    for size in (1e-30, 1e30):
        assert float(hadamard_quant(tokens(1, 12) * size, rotation(12), None, grid, prefer=prefer)[1][0]) > 0


def test_cpu_bad_values():
    check_bad_values("cpu")


@interpreted
def test_triton_bad_values():
    check_bad_values("triton")


def check_fake(prefer, n, quantizer, m=9):
    grid, recipe, signs = quantizer.grid, rotation(n), signs_of(n)
    results = []
    for path in (prefer, "torch"):
        x = (2 * tokens(m, n)).requires_grad_()
        y, v = fake_quant(x, recipe, signs, grid, prefer=path)
        ((y * tokens(m, recipe.padded, seed=1)).sum() + (v * tokens(m, recipe.padded, seed=2)).sum()).backward()
        only = (2 * tokens(m, n)).requires_grad_()
        (
            fake_quant(only, recipe, signs, grid, keep_rotated=False, prefer=path)[1] * tokens(m, recipe.padded, seed=2)
        ).sum().backward()
        results.append((y.detach(), v.detach(), x.grad, only.grad))
    for found, expected in zip(*results, strict=True):
        # one code may differ at a tie; then one value of a row differs by a step
        assert (found - expected).abs().median() <= 1e-5
        assert float(((found - expected).abs() > 1e-4).float().mean()) < 0.01


@pytest.mark.parametrize(
    "quantizer", [TokenQuantizer(2), TokenQuantizer(4, ste="identity"), TokenQuantizer(2, unbiased=True)]
)
@pytest.mark.parametrize("n", [1, 7, 12, 100, 576])
def test_cpu_fake_quant(n, quantizer):
    check_fake("cpu", n, quantizer)


@interpreted
@pytest.mark.parametrize("quantizer", [TokenQuantizer(2), TokenQuantizer(4, ste="identity")])
@pytest.mark.parametrize("n", [1, 4, 12, 64, 100])
def test_triton_fake_quant(n, quantizer):
    check_fake("triton", n, quantizer, m=5)


def gemm_case(m, n, out, bits=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (m, n), generator=g, dtype=torch.int8)
    weights = torch.randint(-1, 2, (out, n), generator=g, dtype=torch.int8)
    d, alpha = torch.rand(m, generator=g), torch.rand(out, generator=g)
    return codes, d, weights, pack_ternary(weights), alpha, weights.sum(1, dtype=torch.int32)


def check_gemm(prefer, m, n, out, bits=4, *, extras=False):
    codes, d, weights, packed, alpha, rowsum = gemm_case(m, n, out, bits)
    z = torch.rand(m) if extras else 0.5
    bias, inner, outer = torch.rand(out), torch.randn(m, 5), torch.randn(out, 5).bfloat16()
    kwargs = {"bias": bias, "inner": inner, "outer": outer} if extras else {}
    y = ternary_gemm(codes, d, packed, alpha, rowsum, offset=z, prefer=prefer, **kwargs)
    values = (codes.double() + (z[:, None].double() if extras else 0.5)) * d.double()[:, None]
    expected = values @ (weights.double() * alpha.double()[:, None]).T
    if extras:
        expected = expected + bias.double() + inner.double() @ outer.double().T
    scale = expected.abs().max().clamp(min=1)
    assert float(((y.double() - expected).abs() / scale).max()) < 1e-5


SHAPES = [
    (1, 1, 1),
    (1, 5, 3),
    (2, 128, 4),
    (3, 127, 5),
    (4, 130, 7),
    (5, 64, 2),
    (17, 1152, 9),
    (33, 4608, 6),
    (16, 300, 130),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_cpu_product(shape, bits):
    check_gemm("cpu", *shape, bits)
    check_gemm("torch", *shape, bits)
    check_gemm("cpu", *shape, bits, extras=True)


@pytest.mark.parametrize("integer", [False, True])
def test_row_blocks_for_processors_without_byte_products(integer, monkeypatch):
    import importlib

    module = importlib.import_module("robuq.kernels.ternary_gemm")
    monkeypatch.setattr(module, "_CACHE_BYTES", 4096)
    codes, d, weights, packed, alpha, rowsum = gemm_case(40, 72, 50)
    expected = ternary_gemm(codes, d, packed, alpha, rowsum, prefer="torch")
    for unpacked in (None, weights):
        y = module._by_rows(codes, d, packed, alpha, rowsum, 0.5, unpacked, integer=integer)
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_threads_share_rows_and_columns():
    torch.set_num_threads(2)
    for shape in ((2, 256, 1024), (70, 100, 30), (129, 64, 16)):
        check_gemm("cpu", *shape)
    x = tokens(400, 100)
    assert torch.allclose(rotate(x, rotation(100), None), rotate(x, rotation(100), None, prefer="torch"), atol=1e-5)


@interpreted
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 127, 5), (16, 300, 70), (17, 64, 9), (40, 260, 66)])
def test_triton_product(shape):
    check_gemm("triton", *shape)
    check_gemm("triton", *shape, 8, extras=True)


@interpreted
def test_triton_product_reads_two_codes_a_byte():
    from robuq.kernels.triton_gemm import pack_codes, ternary_gemm_triton

    for m, n in ((3, 65), (20, 130)):
        codes, d, _, packed, alpha, rowsum = gemm_case(m, n, 12)
        y = ternary_gemm_triton(
            pack_codes(codes), d, packed, alpha, rowsum, 0.5, None, None, None, nibbles=True, width=n
        )
        assert torch.allclose(y, ternary_gemm(codes, d, packed, alpha, rowsum, prefer="torch"), rtol=1e-5, atol=1e-4)


def test_wrong_shapes_are_named():
    codes, d, _, packed, alpha, rowsum = gemm_case(2, 8, 3)
    with pytest.raises(ValueError, match=r"shapes do not fit: codes \(2, 8\)"):
        gemm_module_function(codes, d, packed[:, :1], alpha, rowsum)
    with pytest.raises(ValueError, match=r"takes tokens \[m, 12\], got shape \(2, 8\)"):
        hadamard_quant(torch.ones(2, 8), rotation(12), None, TokenQuantizer(2).grid)
    with pytest.raises(ValueError, match=r"takes tokens \[m, 12\], got shape \(2, 8\)"):
        fake_quant(torch.ones(2, 8), rotation(12), None, TokenQuantizer(2).grid)


def test_grid_is_the_gaussian_quantiser():
    assert TokenQuantizer(2).grid == Grid("rms", gaussian_step(2), False, -2, 1, 0.5, 2.0, 1.0)
    assert TokenQuantizer(4, "absmax").grid == Grid("max", 1 / 7, True, -8, 7, 0.0, math.inf, 1.0)
