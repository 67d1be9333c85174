"""Ranks under a budget of parameters, for one layer or for many at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tucker_attention.config import Ranks


def factor_count(ranks: Sequence[int], sizes: Sequence[int]) -> int:
    """Parameters of one tensor: r1 r2 r3 + H r1 + d r2 + d r3."""
    r1, r2, r3 = ranks
    return r1 * r2 * r3 + sum(size * rank for size, rank in zip(sizes, ranks, strict=True))


def allocate_ranks(spectra: Sequence[Sequence[Tensor]], budget: int) -> list[Ranks]:
    """Ranks of several tensors within one budget, greedily by energy per parameter.

    Every tensor begins at (1, 1, 1). The rank that adds the largest share of its tensor's energy (next squared singular
    value over the tensor's total) for each parameter it costs is raised, until nothing fits.

    Args:
        spectra: for each tensor the squared singular values of its three modes.
        budget: parameters in all.

    Raises:
        ValueError: a budget below ranks of 1.
    """
    sizes = np.array([[len(mode) for mode in modes] for modes in spectra])
    shares = [[(m / m.sum().clamp(min=1e-300)).cpu().numpy() for m in modes] for modes in spectra]
    ranks = np.ones_like(sizes)
    spent = int((np.prod(ranks, 1) + (sizes * ranks).sum(1)).sum())
    if budget < spent:
        raise ValueError(f"a budget of {budget} parameters is below the {spent} of ranks (1, 1, 1)")

    def next_share(tensor: int, mode: int) -> float:
        rank = ranks[tensor, mode]
        return float(shares[tensor][mode][rank]) if rank < sizes[tensor, mode] else -1.0

    gains = np.array([[next_share(t, m) for m in range(3)] for t in range(len(sizes))])
    costs = np.stack([_step_costs(ranks[t], sizes[t]) for t in range(len(sizes))])
    while True:
        value = np.where((gains > 0) & (costs <= budget - spent), gains / costs, -1.0)
        tensor, mode = np.unravel_index(int(value.argmax()), value.shape)
        if value[tensor, mode] <= 0:
            break
        spent += int(costs[tensor, mode])
        ranks[tensor, mode] += 1
        gains[tensor, mode] = next_share(int(tensor), int(mode))
        costs[tensor] = _step_costs(ranks[tensor], sizes[tensor])
    return [(int(a), int(b), int(c)) for a, b, c in ranks]


def _step_costs(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Parameters that one more of each rank costs."""
    r1, r2, r3 = (int(r) for r in ranks)
    return np.array([r2 * r3 + sizes[0], r1 * r3 + sizes[1], r1 * r2 + sizes[2]])
