"""pass@k: the chance that one of k samples solves a problem, estimated without bias from n >= k samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["mean_pass_at_k", "pass_at_k"]


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> NDArray[np.float64]:
    """Unbiased estimate per problem: `1 - C(n-c, k) / C(n, k)` (Chen et al., 2021, arXiv 2107.03374, equation 1).

    Computed as `1 - prod_{i=n-c+1}^{n} (1 - k/i)` in logarithms, so that neither the binomials overflow nor a small
    result is lost to cancellation.

    Args:
        n: samples drawn per problem, integers [P] or one for all.
        c: samples that passed per problem, integers [P], `0 <= c <= n`.
        k: number of tries, `1 <= k <= n`.

    Returns:
        float64 [P] (a 0-d array for scalars).

    Raises:
        ValueError: counts out of range; TypeError: counts that are not integers.
    """
    drawn, passed = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if not (np.issubdtype(drawn.dtype, np.integer) and np.issubdtype(passed.dtype, np.integer)):
        raise TypeError(f"n and c are counts and must be integers, got {drawn.dtype} and {passed.dtype}")
    if np.any(passed < 0) or np.any(passed > drawn):
        raise ValueError("c must lie between 0 and n for every problem")
    if k < 1 or np.any(drawn < k):
        smallest = int(drawn.min()) if drawn.size else 0
        raise ValueError(f"k must lie between 1 and the number of samples, got k={k} with n={smallest}")
    flat = [_one(int(a), int(b), k) for a, b in zip(drawn.ravel(), passed.ravel(), strict=True)]
    return np.array(flat, dtype=np.float64).reshape(drawn.shape)


def _one(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return float(-np.expm1(np.log1p(-k / np.arange(n - c + 1, n + 1, dtype=np.float64)).sum()))


def mean_pass_at_k(results: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of `pass_at_k` over problems, from the pass/fail results of each problem's samples."""
    if not results:
        raise ValueError("there are no problems to average over")
    n = np.array([len(samples) for samples in results])
    c = np.array([sum(map(bool, samples)) for samples in results])
    return float(pass_at_k(n, c, k).mean())
