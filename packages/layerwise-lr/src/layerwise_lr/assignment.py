"""From exponents to learning rate ratios.

With ``a_l`` the metric of matrix l (alpha), over n fitted matrices:

    linear    s1 + (a_l - a_min) / (a_max - a_min) * (s2 - s1)
    sqrt      n sqrt(a_l) / sum sqrt(a)
    log2      n log2(a_l) / sum log2(a)
    sigmoid   2 / (1 + exp(-4 z_l)),  z_l = (a_l - mean) / std
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np

Assign = Literal["linear", "sqrt", "log2", "sigmoid"]
ASSIGNS: tuple[str, ...] = get_args(Assign)


def assign_ratios(
    values: Mapping[str, float],
    s1: float = 1.0,
    s2: float = 3.0,
    method: Assign = "linear",
    *,
    inverse: bool = False,
    block_of: Callable[[str], str] | None = None,
) -> dict[str, float]:
    """Ratio of each matrix's learning rate to the base rate.

    Args:
        values: metric of each matrix, finite; a large one is a light tail and gets a large rate.
        s1, s2: bounds of ``"linear"``, both attained; equal values all get s1. The others ignore them.
        method: see the module.
        inverse: larger rates for heavier tails instead: a is replaced by ``a_min + a_max - a``.
        block_of: names the block of a matrix; the map is then applied within each block.

    Raises:
        ValueError: an unknown method, a value that is not finite, bounds that are not 0 < s1 <= s2, or for ``"sqrt"``
            and ``"log2"`` a value that gives no positive ratio.
    """
    check_bounds(s1, s2)
    if method not in ASSIGNS:
        raise ValueError(f"unknown assignment {method!r}; choose from {', '.join(ASSIGNS)}")
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if bad:
        raise ValueError(f"values to assign ratios from must be finite, got {bad}")
    if block_of is not None:
        blocks: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            blocks.setdefault(block_of(name), {})[name] = value
        mapped: dict[str, float] = {}
        for block in blocks.values():
            mapped |= assign_ratios(block, s1, s2, method, inverse=inverse)
        return {name: mapped[name] for name in values}
    if not values:
        return {}
    a = np.array(list(values.values()), dtype=np.float64)
    if inverse:
        a = a.min() + a.max() - a
    ratios = _MAPS[method](a, s1, s2)
    if not (ratios > 0).all():
        raise ValueError(f"{method!r} needs values above {1 if method == 'log2' else 0}, got {dict(values)}")
    return dict(zip(values, map(float, ratios), strict=True))


def check_bounds(s1: float, s2: float) -> None:
    """Raises ValueError unless ``0 < s1 <= s2``, both finite."""
    if not (math.isfinite(s1) and math.isfinite(s2) and 0 < s1 <= s2):
        raise ValueError(f"the bounds of the ratios must be 0 < s1 <= s2, got s1 = {s1}, s2 = {s2}")


def shrink(values: Mapping[str, float], sigma: Mapping[str, float]) -> dict[str, float]:
    """Pull badly determined values to the mean: ``mean + tau^2 / (tau^2 + sigma_l^2) (a_l - mean)``.

    ``tau^2`` is the spread between matrices beyond their errors, ``max(0, var(a) - mean(sigma^2))``.
    """
    if not values:
        return {}
    a = np.array(list(values.values()), dtype=np.float64)
    noise = np.array([sigma[name] for name in values], dtype=np.float64) ** 2
    between = max(0.0, float(a.var() - noise.mean()))
    kept = between / (between + noise) if between > 0 else np.zeros_like(a)
    return dict(zip(values, map(float, a.mean() + kept * (a - a.mean())), strict=True))


def _linear(a: np.ndarray, s1: float, s2: float) -> np.ndarray:
    low, high = a.min(), a.max()
    if low == high:
        return np.full_like(a, s1)
    share = (a - low) / (high - low)
    # the ends are attained exactly, also where s1 + (s2 - s1) rounds
    return np.where(share == 1, s2, np.clip(s1 + share * (s2 - s1), s1, s2))


def _share_of_mean(of: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, float, float], np.ndarray]:
    def mapped(a: np.ndarray, s1: float, s2: float) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            b = of(a)
            return np.nan_to_num(b.size * b / b.sum(), nan=0.0)

    return mapped


def _sigmoid(a: np.ndarray, s1: float, s2: float) -> np.ndarray:
    spread = a.std()
    z = (a - a.mean()) / spread if spread > 0 else np.zeros_like(a)
    return np.asarray(2 / (1 + np.exp(-4 * z)))


_MAPS: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "linear": _linear,
    "sqrt": _share_of_mean(np.sqrt),
    "log2": _share_of_mean(np.log2),
    "sigmoid": _sigmoid,
}
