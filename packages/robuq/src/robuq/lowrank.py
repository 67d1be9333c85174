"""The low-rank branch: a truncated SVD of what ternary weights leave out, ``R = W' - Qw(W') ~ B A``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_EXACT = 2048  # up to this smaller side the eigenvectors of the Gram matrix are computed
_OVERSAMPLE, _ITERATIONS = 16, 8


def lowrank_factors(residual: Float[Tensor, "out n"], rank: int) -> tuple[Float[Tensor, "r n"], Float[Tensor, "out r"]]:
    """``B = U_r S_r^{1/2}``, ``A = S_r^{1/2} V_r^T``: the best approximation ``B A`` of rank r, split evenly.

    Through the eigenvectors of the smaller Gram matrix where that side has at most 2048 rows; beyond, by subspace
    iteration from a fixed start. A rank above the smaller side is filled up with zeros.

    Returns:
        A [r, n] and B [out, r] in the residual's dtype.
    """
    out, n = residual.shape
    r = min(rank, out, n)
    work = residual if residual.dtype == torch.float64 else residual.float()
    tall = work if out <= n else work.T  # [small, large]
    if r == 0:
        left = tall.new_zeros(len(tall), 0)
    elif len(tall) <= _EXACT:
        left = torch.linalg.eigh(tall @ tall.T).eigenvectors[:, -r:].flip(1)
    else:
        left = _subspace(tall, r)
    right = left.T @ tall  # S V^T
    singular = right.norm(dim=1)
    root = singular.sqrt()
    u = left * root
    v = right / torch.where(root > 0, root, 1.0)[:, None]
    a, b = (v, u) if out <= n else (u.T, v.T)
    pad = rank - r
    a, b = torch.nn.functional.pad(a, (0, 0, 0, pad)), torch.nn.functional.pad(b, (0, pad))
    return a.to(residual.dtype).contiguous(), b.to(residual.dtype).contiguous()


def _subspace(tall: Tensor, r: int) -> Tensor:
    """Leading left singular vectors by subspace iteration (N. Halko et al. 2011, algorithm 4.4)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(tall.shape[1], r + _OVERSAMPLE, generator=generator).to(tall)
    basis = torch.linalg.qr(tall @ start).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(tall.T @ basis).Q
        basis = torch.linalg.qr(tall @ basis).Q
    small = torch.linalg.svd(basis.T @ tall, full_matrices=False).U
    return basis @ small[:, :r]
