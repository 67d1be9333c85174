"""The density of eigenvalues of ``W W^T`` from products with vectors alone: stochastic Lanczos quadrature.

For a random start vector v of unit length, m steps of Lanczos give a tridiagonal T whose eigenpairs
``(theta_k, u_k)`` are a Gauss rule: ``sum_k u_k[0]^2 f(theta_k)`` approximates ``v^T f(W W^T) v``, and the mean over
vectors approximates ``tr f(W W^T) / N`` (Ubaru, Chen and Saad, 2017). The distribution function is read off with half
of each weight at its node, interpolated in ln theta, averaged over the vectors, and inverted at ``(i + 1/2) / N``.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROBES, STEPS, SEED = 8, 80, 0
_GRID = 4096


def lanczos_quantiles(W: Tensor, probes: int = PROBES, steps: int = STEPS, seed: int = SEED) -> Tensor:
    """N estimated eigenvalues: the quantiles of the estimated density, ascending.

    Args:
        W: matrix [m, n], floating point; products are computed in its dtype, everything else in float64.
        probes: random vectors.
        steps: Lanczos steps of each; at most N.
        seed: of the vectors; the global random state is left alone.

    Returns:
        [min(m, n)], in W's dtype.
    """
    if W.dim() != 2 or probes < 1 or steps < 2:
        raise ValueError(
            f"lanczos needs a matrix, probes >= 1 and steps >= 2, got shape {tuple(W.shape)}, {probes}, {steps}"
        )
    matrix = W if W.shape[0] <= W.shape[1] else W.mT
    count = matrix.shape[0]
    nodes, weights = _gauss_rules(matrix, probes, min(steps, count), seed)
    floor = torch.finfo(torch.float32).tiny
    logs = nodes.clamp(min=floor).log()
    levels = weights.cumsum(1) - weights / 2
    grid = torch.linspace(float(logs.min()), float(logs.max()), _GRID, dtype=torch.float64)
    distribution = torch.stack([_interpolate(grid, x, y) for x, y in zip(logs, levels, strict=True)]).mean(0)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return _interpolate(wanted, distribution, grid).exp().to(device=W.device, dtype=W.dtype)


def _gauss_rules(matrix: Tensor, probes: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, float64 [probes, steps], ascending nodes. All vectors go through each product together."""
    count = matrix.shape[0]
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(probes, count, generator=generator, dtype=torch.float64).to(matrix.device)
    basis = vector.new_zeros(probes, steps, count)
    basis[:, 0] = vector / vector.norm(dim=1, keepdim=True)
    diagonal = torch.zeros(probes, steps, dtype=torch.float64)
    beside = torch.zeros(probes, steps - 1, dtype=torch.float64)
    for step in range(steps):
        last = basis[:, step]
        product = ((last.to(matrix.dtype) @ matrix) @ matrix.mT).double()
        diagonal[:, step] = (last * product).sum(1).cpu()
        if step == steps - 1:
            break
        known = basis[:, : step + 1]
        for _ in range(2):  # full reorthogonalisation, twice is enough
            product = product - torch.bmm(torch.bmm(product[:, None], known.mT), known)[:, 0]
        length = product.norm(dim=1, keepdim=True)
        beside[:, step] = length[:, 0].cpu()
        basis[:, step + 1] = product / length.clamp(min=torch.finfo(torch.float64).tiny)
    tridiagonal = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[:, 0, :].square()


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear interpolation of y over ascending x, held at the ends."""
    right = torch.searchsorted(x.contiguous(), at.contiguous()).clamp(1, x.numel() - 1)
    width = (x[right] - x[right - 1]).clamp(min=torch.finfo(torch.float64).tiny)
    share = ((at - x[right - 1]) / width).clamp(0, 1)
    return y[right - 1] + share * (y[right] - y[right - 1])
