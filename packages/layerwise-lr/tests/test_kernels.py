"""Every path of an operation gives one result: reference, CPU, Triton in its interpreter."""

import pytest
import torch

from icml26_shared.kernels import interpreting
from layerwise_lr.kernels import AOT_SPECS, gram, tail_scan
from layerwise_lr.kernels.tail_scan import tail_scan_reference

interpreted = pytest.mark.triton_interpreter
SHAPES = [(1, 1), (1, 70), (3, 5), (64, 64), (65, 33), (130, 40), (200, 257)]


def matrix(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_gram(prefer, shape, dtype=torch.float32):
    w = matrix(*shape, dtype=dtype)
    exact = w.double() @ w.double().mT
    found = gram(w, prefer=prefer)
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=2e-5 * max(1.0, shape[-1] ** 0.5))
    assert torch.allclose(found, found.mT, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 20, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_gram(shape, dtype):
    w = matrix(*shape, dtype=dtype)
    assert torch.allclose(gram(w).double(), w.double() @ w.double().mT, rtol=1e-4, atol=1e-4)
    assert torch.equal(gram(w, dtype=torch.float64), w.double() @ w.double().mT)


@interpreted
@pytest.mark.parametrize("shape", [*SHAPES, (3, 20, 31), (2, 65, 66)])
def test_triton_gram(shape):
    assert interpreting()
    check_gram("triton", shape)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_gram_of_half_precision(dtype):
    check_gram("triton", (70, 45), dtype)


@interpreted
def test_triton_gram_reads_strides():
    w = matrix(90, 140).T[::2, ::3]
    assert torch.allclose(gram(w, prefer="triton"), w @ w.T, atol=1e-4)


def check_empty(prefer):
    assert gram(torch.zeros(0, 4), prefer=prefer).shape == (0, 0)
    assert torch.equal(gram(torch.zeros(3, 0), prefer=prefer), torch.zeros(3, 3))
    assert [part.shape for part in tail_scan(torch.zeros(0), prefer=prefer)] == [(0,), (0,)]


def test_cpu_empty():
    check_empty("cpu")
    check_empty("torch")


@interpreted
def test_triton_empty():
    check_empty("triton")


def check_scan(prefer, count, dtype, batch=None):
    shape = (count,) if batch is None else (batch, count)
    logs = matrix(*shape, dtype=dtype).sort(-1).values
    if count > 6:
        logs[..., -4:] = logs[..., -4:-3]  # ties at the top: no tail from there on
    alpha, distance = tail_scan(logs, prefer=prefer)
    rows = logs if batch else logs[None]
    expected = [part if batch else part[0] for part in tail_scan_reference(rows.double())]
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    for found, exact in zip((alpha, distance), expected, strict=True):
        assert found.dtype == dtype
        assert torch.equal(torch.isfinite(found), torch.isfinite(exact))
        finite = torch.isfinite(exact)
        assert torch.allclose(found[finite].double(), exact[finite], rtol=tolerance, atol=tolerance)
    assert torch.isinf(alpha[..., -1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 200, 300])
def test_cpu_scan(count, dtype):
    check_scan("cpu", count, dtype)
    check_scan("torch", count, dtype, batch=2)
    check_scan("cpu", count, dtype, batch=2)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 17, 140])
def test_triton_scan(count, dtype):
    check_scan("triton", count, dtype)
    check_scan("triton", count, dtype, batch=3)


def test_scan_by_hand():
    alpha, distance = tail_scan(torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64))
    assert alpha.tolist()[:2] == [1 + 3 / 4, 1 + 2 / 2]
    by_hand = max(0.0, abs(1 - 2.718281828459045**-0.75 - 1 / 3), abs(1 - 2.718281828459045**-2.25 - 2 / 3))
    assert float(distance[0]) == pytest.approx(by_hand)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"matrix \[m, n\] or \[batch, m, n\], got torch.int8 of shape \(2, 2\)"):
        gram(torch.ones(2, 2, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(3,\)"):
        gram(torch.ones(3))
    with pytest.raises(ValueError, match=r"float32 or float64, got torch\.float16"):
        gram(torch.ones(2, 2), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"got torch.float16 of shape \(2,\)"):
        tail_scan(torch.ones(2, dtype=torch.float16))


def test_all_kernels_are_listed_for_compiling():
    assert [spec.name for spec in AOT_SPECS()] == [
        "gram bf16 ieee", "gram fp16 ieee", "gram fp32 ieee", "gram fp32 tf32", "tail_scan fp32", "tail_scan fp64",
    ]  # fmt: skip
