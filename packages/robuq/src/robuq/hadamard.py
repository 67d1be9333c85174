"""Orthonormal Hadamard rotations of any width: Sylvester's matrices, Paley's two families, and Kronecker products.

``y = x D H`` with ``D`` a diagonal of signs and ``H H^T = I``. A width n is written as ``m_1 ... m_k 2^p`` with the
``m_i`` orders of Paley matrices, and ``H_n = H_{m_1} (x) ... (x) H_{m_k} (x) H_{2^p}`` (RobuQ, arXiv 2509.23582, uses
such transforms on every linear layer; R. Paley, "On orthogonal matrices", 1933; J. Sylvester 1867).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from robuq.kernels.rotate import rotate

Fallback = Literal["pad", "block"]
FALLBACKS = ("pad", "block")
# Larger Paley matrices exist, but a product with one costs more than padding to a width with small factors.
LARGEST_ORDER = 256


@dataclass(frozen=True)
class Rotation:
    """The rotation ``x -> x D H`` of one width, as a recipe; :func:`rotation` makes it.

    Attributes:
        width: n, the length of a token.
        padded: n' >= n, the length after it; zeros are appended before the transform.
        blocks: number m of equal blocks of a block-diagonal ``I_m (x) H``; 1 for a full transform.
        orders: orders of the Paley factors, in the order of the Kronecker product.
        power: p of the last factor ``H_{2^p}``.
    """

    width: int
    padded: int
    blocks: int
    orders: tuple[int, ...]
    power: int

    @property
    def scale(self) -> float:
        """``1 / sqrt(n' / m)``, which makes the product of the +-1 matrices orthonormal."""
        return 1.0 / math.sqrt(self.padded // self.blocks)

    def matrices(self) -> tuple[np.ndarray, ...]:
        """The Paley factors as float32 arrays of +-1."""
        return tuple(paley(order) for order in self.orders)

    def dense(self, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n n"]:
        """The whole orthonormal matrix: for tests."""
        h = torch.eye(self.blocks, dtype=dtype)
        for m in self.matrices():
            h = torch.kron(h, torch.from_numpy(m.copy()).to(dtype))
        for _ in range(self.power):
            h = torch.kron(h, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype))
        return h * self.scale

    def to_json(self) -> dict[str, Any]:
        """For metadata."""
        return {
            "width": self.width,
            "padded": self.padded,
            "blocks": self.blocks,
            "orders": list(self.orders),
            "power": self.power,
        }


@lru_cache(maxsize=1024)
def rotation(width: int, fallback: Fallback = "pad") -> Rotation:
    """The rotation of a width with the fewest operations.

    Args:
        width: n >= 1.
        fallback: where n has no factorisation: ``"pad"`` appends zeros up to the next width that has one, if that is
            at most n/8 more, else it does what ``"block"`` does: a block-diagonal ``I_m (x) H_{2^p}`` with the largest
            power of two that divides n (for odd n that is the identity).

    Raises:
        ValueError: a width below 1 or an unknown fallback.
    """
    if width < 1:
        raise ValueError(f"a rotation needs a width of at least 1, got {width}")
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback must be one of {', '.join(map(repr, FALLBACKS))}, got {fallback!r}")
    longest = width + width // 8 if fallback == "pad" else width
    for padded in range(width, longest + 1):
        found = factorise(padded)
        if found is not None:
            return Rotation(width, padded, 1, *found)
    power = (width & -width).bit_length() - 1
    return Rotation(width, width, width >> power, (), power)


@lru_cache(maxsize=65536)
def factorise(n: int) -> tuple[tuple[int, ...], int] | None:
    """Paley orders and the exponent of two with product n and the fewest operations ``sum m_i + p``, or None."""
    best: tuple[int, tuple[int, ...], int] | None = None

    def search(rest: int, smallest: int, chosen: tuple[int, ...], cost: int) -> None:
        nonlocal best
        if rest & (rest - 1) == 0:
            power = rest.bit_length() - 1
            found = (cost + power, chosen, power)
            if best is None or found < best:
                best = found
        for order in paley_orders():
            if order >= smallest and rest % order == 0 and (best is None or cost + order < best[0]):
                search(rest // order, order, (*chosen, order), cost + order)

    search(n, 0, (), 0)
    return None if best is None else (best[1], best[2])


@lru_cache(maxsize=1)
def paley_orders() -> tuple[int, ...]:
    """Orders up to :data:`LARGEST_ORDER` that are no powers of two and have a Paley matrix over a prime field."""
    orders = set()
    for q in range(3, LARGEST_ORDER):
        if _is_prime(q):
            orders.add(q + 1 if q % 4 == 3 else 2 * (q + 1))
    return tuple(sorted(m for m in orders if m <= LARGEST_ORDER and m & (m - 1)))


@lru_cache(maxsize=64)
def paley(order: int) -> np.ndarray:
    """The Paley matrix of an order as float32 +-1, ``P P^T = order I``.

    With the Jacobsthal matrix ``Q_ij = chi(i - j)`` over the field of q elements: family I (q = order - 1 = 3 mod 4) is
    ``I + S`` with ``S = [[0, 1], [-1, Q]]``; family II (q = order/2 - 1 = 1 mod 4) replaces in ``[[0, 1], [1, Q]]``
    each 0 by ``[[1, -1], [-1, -1]]`` and each +-1 by ``+-[[1, 1], [1, -1]]``. Family I where an order has both.

    Raises:
        ValueError: no such matrix.
    """
    q = order - 1
    if _is_prime(q) and q % 4 == 3:
        matrix = np.eye(order) + _bordered(q, -1)
    elif order % 2 == 0 and _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        core = _bordered(order // 2 - 1, 1)
        diagonal, other = np.array([[1, -1], [-1, -1]]), np.array([[1, 1], [1, -1]])
        matrix = np.kron(np.eye(order // 2), diagonal) + np.kron(core, other)
    else:
        raise ValueError(f"there is no Paley matrix of order {order} over a prime field")
    matrix = matrix.astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def _bordered(q: int, left: int) -> np.ndarray:
    """``[[0, 1], [left, Q]]`` of order q + 1."""
    squares = {(i * i) % q for i in range(1, q)}
    chi = np.array([0 if d == 0 else (1 if d in squares else -1) for d in range(q)], dtype=np.float64)
    index = np.arange(q)
    bordered = np.zeros((q + 1, q + 1))
    bordered[0, 1:], bordered[1:, 0] = 1, left
    bordered[1:, 1:] = chi[(index[:, None] - index[None, :]) % q]
    return bordered


@lru_cache(maxsize=4096)
def _is_prime(q: int) -> bool:
    return q >= 2 and all(q % d for d in range(2, math.isqrt(q) + 1))


def random_signs(width: int, name: str, seed: int) -> np.ndarray:
    """Signs of a layer as packed bits, uint8 [ceil(n / 8)], bit i%8 of byte i//8; a set bit is -1.

    They depend on the layer's qualified name and the seed alone: the output of SHAKE-256 on both.
    """
    digest = hashlib.shake_256(f"robuq signs {seed} {name}".encode()).digest((width + 7) // 8)
    bits = np.frombuffer(digest, dtype=np.uint8).copy()
    if width % 8:
        bits[-1] &= (1 << width % 8) - 1
    return bits


def unpack_signs(bits: Tensor, width: int) -> Float[Tensor, " n"]:
    """float32 +-1 of packed bits (see :func:`random_signs`)."""
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    flags = (bits[:, None] >> places) & 1
    return 1.0 - 2.0 * flags.reshape(-1)[:width].float()


def hadamard(x: Tensor, signs: Tensor | None = None, *, fallback: Fallback = "pad") -> Tensor:
    """``x D H`` over the last axis, with orthonormal H.

    Args:
        x: float tensor [..., n], n >= 1; float16 and bfloat16 are transformed in float32.
        signs: +-1 [n] of D; None is the identity.
        fallback: see :func:`rotation`.

    Returns:
        Tensor [..., n'] of x's dtype: n' = n wherever n has a factorisation. Differentiable.

    Raises:
        TypeError: x is not floating point.
        ValueError: signs of another length.
    """
    if not x.is_floating_point():
        raise TypeError(f"hadamard takes floating point tensors, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("hadamard needs at least one axis, got a scalar")
    if signs is not None and tuple(signs.shape) != (x.shape[-1],):
        raise ValueError(f"signs must have shape ({x.shape[-1]},), got {tuple(signs.shape)}")
    return rotate(x, rotation(x.shape[-1], fallback), signs)


def inverse_hadamard(y: Tensor, recipe: Rotation, signs: Tensor | None = None) -> Tensor:
    """``y H^T D`` over the last axis, without the padding: undoes :func:`hadamard`. Shape [..., n]."""
    if y.shape[-1] != recipe.padded:
        raise ValueError(f"the last axis must have length {recipe.padded}, got {y.shape[-1]}")
    return rotate(y, recipe, signs, inverse=True)
