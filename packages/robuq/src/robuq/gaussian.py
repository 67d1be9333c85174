"""Quantisers of the normal distribution: optimal steps, levels and errors, computed and not typed in.

A rotated token is close to Gaussian, so one table of steps for N(0, 1), scaled by the token's root mean square, serves
every layer (RobuQ, arXiv 2509.23582, RobustQuantizer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np

Bits = int | Literal["ternary"]
ALLOWED_BITS: tuple[Bits, ...] = (1, 2, 3, 4, 5, 6, 7, 8, "ternary")
_GOLDEN = (math.sqrt(5) - 1) / 2


def check_bits(bits: object) -> Bits:
    """``bits`` itself, if it is 1 to 8 or ``"ternary"``.

    Raises:
        ValueError: anything else, booleans and floats included.
    """
    if bits == "ternary" or (isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 8):
        return bits  # type: ignore[return-value]
    raise ValueError(f"bits must be one of 1 to 8 or 'ternary', got {bits!r}")


def levels(bits: Bits) -> int:
    """Number of levels: ``2^b``, or 3 for ``"ternary"``."""
    return 3 if check_bits(bits) == "ternary" else 2 ** int(bits)


def gaussian_step(bits: Bits) -> float:
    """Step ``delta_b`` that minimises ``E (x - Q(x))^2`` for x ~ N(0, 1) and a uniform quantiser.

    Mid-rise with ``L = 2^b`` levels ``(k + 1/2) delta``, ``k = -L/2 .. L/2 - 1``; for ``"ternary"`` mid-tread with the
    levels ``-delta, 0, delta``. Golden section on the closed-form error; agrees with J. Max, "Quantizing for minimum
    distortion" (1960), where that table ends (32 levels).

    Raises:
        ValueError: bits other than 1 to 8 or ``"ternary"``.
    """
    return _optimum(check_bits(bits))[0]


def gaussian_nmse(bits: Bits) -> float:
    """Mean squared error of the quantiser of :func:`gaussian_step` on N(0, 1): relative to the variance."""
    return _optimum(check_bits(bits))[1]


def sqnr_db(bits: Bits) -> float:
    """Signal to quantisation noise ratio in dB, ``-10 log10 NMSE``."""
    return -10 * math.log10(gaussian_nmse(bits))


@lru_cache(maxsize=16)
def _optimum(bits: Bits) -> tuple[float, float]:
    count = levels(bits)

    def error(step: float) -> float:
        return _error(_uniform_cells(count, step))

    low, high = 0.2 / count, 8.0 / count + 0.5
    step = _golden_section(error, low, high)
    return step, error(step)


def _uniform_cells(count: int, step: float) -> Iterator[tuple[float, float, float]]:
    """(lower end, upper end, value) of the cells on the positive side, where the value is not 0."""
    if count % 2:
        for k in range(1, count // 2 + 1):
            yield (k - 0.5) * step, math.inf if k == count // 2 else (k + 0.5) * step, k * step
    else:
        for k in range(count // 2):
            yield k * step, math.inf if k == count // 2 - 1 else (k + 1) * step, (k + 0.5) * step


def _error(cells: Iterator[tuple[float, float, float]]) -> float:
    """``E (x - Q(x))^2 = 1 - 2 E x Q + E Q^2``, with integrals of ``x phi`` and ``phi`` over each cell; twice a
    side.
    """
    terms = [2 * value * (value * _mass(a, b) - 2 * (_density(a) - _density(b))) for a, b, value in cells]
    return math.fsum([1.0, *terms])


def _density(x: float) -> float:
    return 0.0 if math.isinf(x) else math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mass(a: float, b: float) -> float:
    return 0.5 * (math.erfc(a / math.sqrt(2)) - (0.0 if math.isinf(b) else math.erfc(b / math.sqrt(2))))


def _golden_section(f: Callable[[float], float], low: float, high: float) -> float:
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = f(a), f(b)
    while high - low > 1e-9:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = f(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = f(b)
    return 0.5 * (low + high)


@lru_cache(maxsize=16)
def lloyd_max_levels(bits: Bits) -> tuple[float, ...]:
    """Positive levels of the optimal non-uniform quantiser of N(0, 1), in rising order.

    Each level is the mean of its cell, each threshold the middle of two levels (S. Lloyd 1957/1982; J. Max 1960):
    ``v_i = (phi(t_i) - phi(t_{i+1})) / (Phi(t_{i+1}) - Phi(t_i))``, solved by Newton's method from the high-rate
    density (levels at quantiles of N(0, 3)).

    Raises:
        ValueError: bits other than 1 to 8 or ``"ternary"``.
    """
    count = levels(bits)
    if bits == "ternary":
        return (gaussian_step("ternary"),)  # three levels: the uniform optimum is the optimum
    half = count // 2
    wide = NormalDist(0, math.sqrt(3))
    v = np.array([wide.inv_cdf((half + i + 0.5) / count) for i in range(half)])
    for _ in range(100):
        edges = np.concatenate([[0.0], (v[1:] + v[:-1]) / 2, [math.inf]])
        density = np.array([_density(t) for t in edges])
        mass = np.array([_mass(a, b) for a, b in pairwise(edges)])
        centre = (density[:-1] - density[1:]) / mass
        # d centre / d lower edge = phi(a) (c - a) / mass, d centre / d upper edge = phi(b) (b - c) / mass
        lower = density[:-1] * (centre - edges[:-1]) / mass
        upper = np.append(density[1:-1] * (edges[1:-1] - centre[:-1]) / mass[:-1], 0.0)
        lower[0] = 0.0  # the edge at zero stays
        jacobian = np.eye(half) - 0.5 * np.diag(lower + upper)
        jacobian -= 0.5 * (np.diag(upper[:-1], 1) + np.diag(lower[1:], -1))
        change = np.linalg.solve(jacobian, centre - v)
        v = v + change
        if np.abs(change).max() < 1e-10:
            return tuple(float(x) for x in v)
    raise ArithmeticError(f"the Lloyd-Max levels for {bits} bits did not converge")


def lloyd_max_nmse(bits: Bits) -> float:
    """Mean squared error of the quantiser of :func:`lloyd_max_levels` on N(0, 1)."""
    v = lloyd_max_levels(bits)
    edges = [gaussian_step("ternary") / 2 if bits == "ternary" else 0.0]
    edges += [(a + b) / 2 for a, b in pairwise(v)] + [math.inf]
    return _error(iter([(edges[i], edges[i + 1], v[i]) for i in range(len(v))]))
