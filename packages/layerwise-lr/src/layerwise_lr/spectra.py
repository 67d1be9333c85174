"""Eigenvalues of ``W W^T``: the squared singular values of a weight."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from layerwise_lr.kernels import gram
from layerwise_lr.lanczos import lanczos_quantiles

Method = Literal["auto", "svd", "gram", "lanczos"]
METHODS: tuple[str, ...] = get_args(Method)
EXACT_UP_TO = 4096  # eigenvalues; beyond, "auto" estimates
DOUBLE_UP_TO = 512


def spectrum(W: Float[Tensor, "..."], method: Method = "auto", dtype: torch.dtype | None = None) -> Float[Tensor, " N"]:
    """Ascending eigenvalues of ``W W^T``, ``N = min(m, n)`` of them.

    A convolution [out, in, *kernel] is read as one matrix [out, in] for each kernel position, scaled by sqrt(0.5), and
    the eigenvalues of all positions together are its spectrum.

    Args:
        W: weight with at least two dimensions, any floating point dtype and device.
        method: ``"svd"``; ``"gram"``: eigenvalues of the Gram matrix of the smaller side, which lose what lies below
            ``eps lambda_max``; ``"lanczos"``: quantiles of a stochastic estimate of the density (see
            `layerwise_lr.lanczos`); ``"auto"``: gram up to N = 4096, lanczos beyond.
        dtype: float32 or float64 of the computation and the result. Default: float64 for float64 weights, and for
            the Gram matrix up to N = 512; else float32.

    Raises:
        ValueError: fewer than two dimensions, an empty weight, not floating point, NaN or infinite entries, an unknown
            method or dtype.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    matrices = as_matrices(W)
    if not bool(torch.isfinite(matrices).all()):
        raise ValueError(f"the weight of shape {tuple(W.shape)} has NaN or infinite entries")
    smaller = min(matrices.shape[-2:])
    if method == "auto":
        method = "gram" if smaller <= EXACT_UP_TO else "lanczos"
    wide = dtype or (torch.float64 if W.dtype == torch.float64 else torch.float32)
    if method == "lanczos":
        return torch.cat([lanczos_quantiles(matrix.to(wide)) for matrix in matrices]).sort().values
    if method == "svd":
        return torch.linalg.svdvals(matrices.to(wide)).square().flatten().sort().values
    if dtype is None and smaller <= DOUBLE_UP_TO:
        wide = torch.float64
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mT
    return torch.linalg.eigvalsh(gram(matrices, dtype=wide)).clamp(min=0).flatten().sort().values


def as_matrices(W: Tensor) -> Tensor:
    """The weight as [positions, rows, columns], detached.

    Raises:
        ValueError: fewer than two dimensions, empty, or not floating point.
    """
    if W.dim() < 2 or W.numel() == 0 or not W.is_floating_point():
        raise ValueError(
            f"a spectrum needs a floating point weight with two or more dimensions, got {W.dtype} of shape "
            f"{tuple(W.shape)}"
        )
    detached = W.detach()
    if detached.dim() == 2:
        return detached[None]
    positions = detached.flatten(2).permute(2, 0, 1)
    return (positions if positions.dtype == torch.float64 else positions.float()) * math.sqrt(0.5)


def square_windows(W: Tensor, overlap: float = 0.5) -> Tensor:
    """Square submatrices that slide along the longer side, [windows, side, side], side = min(m, n).

    The spread of a random matrix's eigenvalues depends on its aspect ratio; windows of one aspect ratio compare (FARMS,
    Hu et al., 2025). Neighbours share about ``overlap`` of their rows; the first and the last touch the ends.
    """
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap must be in [0, 1), got {overlap}")
    windows = []
    for matrix in as_matrices(W):
        tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
        long, side = tall.shape
        count = 1 + math.ceil((long - side) / max(1.0, side * (1 - overlap)))
        starts = [round(i * (long - side) / max(1, count - 1)) for i in range(count)]
        windows += [tall[start : start + side] for start in starts]
    return torch.stack(windows)


def farms_spectrum(W: Tensor, dtype: torch.dtype | None = None, overlap: float = 0.5) -> Tensor:
    """Eigenvalues of all `square_windows` together, ascending: their averaged spectral density."""
    return torch.cat([spectrum(window, "gram", dtype) for window in square_windows(W, overlap)]).sort().values
