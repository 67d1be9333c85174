"""Spectra: equivalences, invariances, convolutions, estimates, bad input."""

import math

import numpy as np
import pytest
import torch

from layerwise_lr import fit_tail, spectrum
from layerwise_lr.lanczos import lanczos_quantiles
from layerwise_lr.spectra import as_matrices, farms_spectrum, square_windows


def trained(m, n, seed=0):
    """A matrix with a falling spectrum, float32."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=g) * (torch.arange(1, n + 1) ** -0.5)


@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (96, 96), (600, 700)])
def test_gram_is_svd_is_float64(shape):
    w = trained(*shape)
    exact = torch.linalg.svdvals(w.double()).square().flip(0)
    for method in ("svd", "gram", "auto"):
        found = spectrum(w, method)
        assert found.shape == (min(shape),)
        assert (found[1:] >= found[:-1]).all()
        assert abs(fit_tail(found).alpha - fit_tail(exact).alpha) <= 1e-4
        assert torch.allclose(found.double(), exact, atol=1e-5 * float(exact[-1]))


def test_rotation_permutation_transposition():
    w = trained(80, 120).double()
    q = torch.linalg.qr(torch.randn(80, 80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    alpha = fit_tail(spectrum(w)).alpha
    for other in (w.T, w[torch.randperm(80)], q @ w, w.T.contiguous()):
        assert fit_tail(spectrum(other)).alpha == pytest.approx(alpha, rel=1e-9)


def test_half_precision_is_read_as_it_is():
    w = trained(64, 128).bfloat16()
    assert torch.allclose(spectrum(w), spectrum(w.double()), rtol=1e-9)
    assert spectrum(w).dtype == torch.float64
    assert spectrum(w, dtype=torch.float32).dtype == torch.float32


def test_convolution_is_one_matrix_a_position():
    w = torch.randn(30, 20, 3, 2, generator=torch.Generator().manual_seed(0))
    found = spectrum(w, "svd")
    by_hand = np.sort(
        np.concatenate(
            [np.linalg.svd(w[:, :, i, j].numpy(), compute_uv=False) ** 2 / 2 for i in range(3) for j in range(2)]
        )
    )
    assert np.allclose(found.numpy(), by_hand, rtol=1e-4, atol=1e-6)
    assert as_matrices(w).shape == (6, 30, 20)


def test_lanczos_estimates_alpha():
    for seed, shape in enumerate([(700, 900), (1024, 700)]):
        w = trained(*shape, seed) if seed else torch.randn(*shape, generator=torch.Generator().manual_seed(3))
        exact = fit_tail(spectrum(w, "gram")).alpha
        assert abs(fit_tail(spectrum(w, "lanczos")).alpha - exact) <= 0.05
    with pytest.raises(ValueError, match="probes >= 1"):
        lanczos_quantiles(w, probes=0)


def test_lanczos_is_exact_for_few_eigenvalues_and_leaves_the_random_state():
    w = torch.diag(torch.arange(1.0, 13.0))
    state = torch.get_rng_state()
    found = lanczos_quantiles(w, probes=200, steps=12)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.allclose(found[[0, -1]], torch.tensor([1.0, 144.0]), rtol=0.2)


def test_windows_are_square_and_touch_the_ends():
    w = torch.arange(50.0).reshape(10, 5)
    windows = square_windows(w)
    assert windows.shape == (3, 5, 5)
    assert torch.equal(windows[0], w[:5])
    assert torch.equal(windows[-1], w[5:])
    assert square_windows(w.T).shape == (3, 5, 5)
    assert farms_spectrum(w).shape == (15,)
    with pytest.raises(ValueError, match="overlap must be in"):
        square_windows(w, 1.0)


def test_windows_remove_the_aspect_ratio():
    g = torch.Generator().manual_seed(0)
    square, oblong = torch.randn(100, 100, generator=g), torch.randn(100, 400, generator=g)
    plain = abs(fit_tail(spectrum(square)).alpha - fit_tail(spectrum(oblong)).alpha)
    farms = abs(fit_tail(farms_spectrum(square)).alpha - fit_tail(farms_spectrum(oblong)).alpha)
    assert farms < 0.2 * plain


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.ones(3), r"two or more dimensions, got torch.float32 of shape \(3,\)"),
        (torch.ones(()), "two or more dimensions"),
        (torch.ones(0, 3), r"shape \(0, 3\)"),
        (torch.ones(3, 3, dtype=torch.int8), "got torch.int8"),
        (torch.full((3, 3), math.nan), "NaN or infinite"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_weights(w, message):
    with pytest.raises(ValueError, match=message):
        spectrum(w)


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments():
    with pytest.raises(ValueError, match="unknown method 'qr'; choose from auto, svd, gram, lanczos"):
        spectrum(torch.ones(3, 3), "qr")
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"):
        spectrum(torch.ones(3, 3), dtype=torch.float16)
