"""HOSVD and HOOI in factored form: against dense arithmetic and tensorly; and what they allocate."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tucker_attention.decomposition import (
    DenseTensor,
    SlicedTensor,
    hosvd,
    mode_spectra,
    rank_for_energy,
    ranks_for_energy,
)
from tucker_attention.ranks import allocate_ranks, factor_count

double = torch.float64


def sliced(heads=4, p=7, q=6, width=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(heads, p, width, generator=g, dtype=double),
        torch.randn(heads, q, width, generator=g, dtype=double),
    )
    return SlicedTensor(a, b), a @ b.transpose(1, 2)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_grams_are_those_of_the_dense_tensor(heads, p, q, width, seed):
    tensor, dense = sliced(heads, p, q, width, seed)
    same = DenseTensor(dense)
    assert tensor.norm2() == pytest.approx(float(dense.square().sum()))
    g = torch.Generator().manual_seed(seed)
    u = [torch.randn(size, min(2, size), generator=g, dtype=double) for size in (heads, p, q)]
    for mode in range(3):
        unfolded = dense.movedim(mode, 0).reshape(dense.shape[mode], -1)
        assert torch.allclose(tensor.gram(mode), unfolded @ unfolded.T, atol=1e-10)
        assert torch.allclose(tensor.gram(mode, u), same.gram(mode, u), atol=1e-10)
        for alone in range(3):
            some = [u[i] if i == alone else None for i in range(3)]
            assert torch.allclose(tensor.gram(mode, some), same.gram(mode, some), atol=1e-10)
    assert torch.allclose(tensor.core(*u), same.core(*u), atol=1e-10)


@pytest.mark.parametrize("ranks", [(2, 3, 3), (1, 1, 1), (4, 7, 6), (3, 5, 2)])
def test_hooi_is_no_worse_than_hosvd_and_agrees_with_tensorly(ranks):
    tensorly = pytest.importorskip("tensorly")
    from tensorly.decomposition import tucker

    tensor, dense = sliced()
    plain, improved = hosvd(tensor, ranks, sweeps=0), hosvd(tensor, ranks, sweeps=50)
    assert improved.error <= plain.error + 1e-12
    assert hosvd(tensor, ranks).error <= plain.error + 1e-12
    tensorly.set_backend("numpy")
    core, factors = tucker(dense.numpy(), list(ranks), n_iter_max=200, tol=1e-12, init="svd")
    rebuilt = torch.from_numpy(tensorly.tucker_to_tensor((core, factors)))
    theirs = float((rebuilt - dense).square().sum() / dense.square().sum())
    assert abs(improved.error - theirs) <= 1e-6


def test_error_is_measured_and_monotone_in_ranks():
    tensor, dense = sliced(5, 9, 8, 4)
    before = 1.0
    for r in range(1, 6):
        found = hosvd(tensor, (r, r, r))
        rebuilt = torch.einsum("abc,ha,pb,qc->hpq", found.core, found.u1, found.u2, found.u3)
        assert found.error == pytest.approx(float((rebuilt - dense).square().sum() / dense.square().sum()), abs=1e-12)
        assert found.error <= before
        before = found.error
        assert torch.allclose(found.u2.T @ found.u2, torch.eye(r, dtype=double), atol=1e-10)


def test_spectra_and_energy_by_hand():
    # slices diag(3, 0) and diag(0, 1): squared singular values 9 and 1 in every mode
    a = torch.tensor([[[3.0], [0.0]], [[0.0], [1.0]]], dtype=double)
    b = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]], dtype=double)
    spectra = mode_spectra(SlicedTensor(a, b))
    for spectrum in spectra:
        assert torch.allclose(spectrum, torch.tensor([9.0, 1.0], dtype=double))
    assert ranks_for_energy(spectra, 0.9) == (1, 1, 1)
    assert ranks_for_energy(spectra, 0.91) == (2, 2, 2)
    assert ranks_for_energy(spectra, 1.0) == (2, 2, 2)
    assert rank_for_energy(torch.tensor([4.0, 0.0, 0.0]), 1.0) == 1
    assert rank_for_energy(torch.zeros(3), 0.5) == 1


def test_budget_is_filled_by_energy_per_parameter():
    flat, steep = torch.ones(6, dtype=double), torch.tensor([1.0, 0.5, 1e-6, 1e-6, 1e-6, 1e-6], dtype=double)
    ranks = allocate_ranks([(flat, flat, flat), (steep, steep, steep)], 150)
    spent = sum(factor_count(r, (6, 6, 6)) for r in ranks)
    assert 150 - 20 < spent <= 150
    assert ranks[1] == (2, 2, 2)  # what is left of the steep one is worth nothing
    assert sum(ranks[0]) > sum(ranks[1])


_LARGE = """
import resource, torch
torch.set_num_threads(1)
from tucker_attention.decomposition import SlicedTensor, hosvd
g = torch.Generator().manual_seed(0)
a, b = (torch.randn(32, 2048, 64, generator=g) for _ in range(2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
soft = before * 1024 + 2**29
import psutil
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**29,) * 2)
found = hosvd(SlicedTensor(a, b), (4, 16, 16), sweeps=0)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(found.core.shape[0], grown * 1024)
"""


@pytest.mark.slow
def test_no_tensor_of_heads_by_width_by_width_is_allocated():
    """d = 2048, H = 32: such a tensor is 0.5 GiB in float32; the decomposition runs within 0.5 GiB of address space."""
    answer = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    rank, grown = map(int, answer.stdout.split())
    assert rank == 4
    assert grown < 2**29


def test_wrong_ranks_and_values_are_named():
    tensor, _ = sliced()
    with pytest.raises(ValueError, match=r"ranks \(5, 1, 1\): rank 5 of mode 1 is not between 1 and 4"):
        hosvd(tensor, (5, 1, 1))
    a = torch.full((2, 3, 1), float("nan"), dtype=double)
    with pytest.raises(ValueError, match="not finite"):
        hosvd(SlicedTensor(a, a), (1, 1, 1))
