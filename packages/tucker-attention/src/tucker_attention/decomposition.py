"""Tucker decompositions of attention's tensors from their factors: no H d^2 numbers are formed.

A tensor W of modes (head, query, key) has slices ``W_i = A_i B_i^T``. Its mode Grams need only ``A^T A`` and ``B^T B``
of all heads side by side, (H w)^2 numbers:

    G1_ij = <A_i^T A_j, B_i^T B_j>_F,   G2 = sum_i A_i (B_i^T B_i) A_i^T,   G3 = sum_i B_i (A_i^T A_i) B_i^T.

HOSVD takes the leading eigenvectors of each; HOOI (De Lathauwer, De Moor and Vandewalle, 2000) then updates one mode
after the other with the others projected, which never raises the error. All of it is in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

SWEEPS = 5
# Eigenvalues of a Gram below this share of the largest are rounding: singular values below a millionth.
ROUNDING = 1e-12


@dataclass(frozen=True)
class TuckerFactors:
    """``core x1 u1 x2 u2 x3 u3`` with orthonormal columns in each u, and the squared relative error."""

    core: Float[Tensor, "r1 r2 r3"]
    u1: Float[Tensor, "h r1"]
    u2: Float[Tensor, "p r2"]
    u3: Float[Tensor, "q r3"]
    error: float


class SlicedTensor:
    """A tensor [H, p, q] given by its slices ``a_i b_i^T``, with a [H, p, w] and b [H, q, w]."""

    def __init__(self, a: Float[Tensor, "h p w"], b: Float[Tensor, "h q w"]) -> None:
        self.a, self.b = a.double(), b.double()
        self.shape = (a.shape[0], a.shape[1], b.shape[1])
        self._grams = {"a": _side_by_side(self.a), "b": _side_by_side(self.b)}

    def norm2(self) -> float:
        """Squared Frobenius norm."""
        return float(torch.trace(self.gram(0)))

    def gram(self, mode: int, u: Sequence[Tensor | None] = (None, None, None)) -> Tensor:
        """``W_(mode) W_(mode)^T`` [size, size] of the tensor with the other modes projected on u's columns."""
        heads, width = self.a.shape[0], self.a.shape[2]
        ga = self._grams["a"] if u[1] is None else _side_by_side(u[1].T @ self.a)
        gb = self._grams["b"] if u[2] is None else _side_by_side(u[2].T @ self.b)
        if mode == 0:
            return (ga * gb).view(heads, width, heads, width).sum((1, 3))
        mixing = torch.eye(heads, dtype=ga.dtype, device=ga.device) if u[0] is None else u[0] @ u[0].T
        inner, outer = (gb, self.a) if mode == 1 else (ga, self.b)
        weighted = (inner.view(heads, width, heads, width) * mixing[:, None, :, None]).view_as(inner)
        flat = outer.transpose(0, 1).reshape(outer.shape[1], heads * width)
        return flat @ weighted @ flat.T

    def core(self, u1: Tensor, u2: Tensor, u3: Tensor) -> Tensor:
        """The tensor projected on the columns of all three, a head's slice at a time."""
        made = self.a.new_zeros(u1.shape[1], u2.shape[1], u3.shape[1])
        for head in range(self.shape[0]):
            piece = (u2.T @ self.a[head]) @ (u3.T @ self.b[head]).T
            made += u1[head][:, None, None] * piece
        return made


class DenseTensor:
    """A small tensor [H, p, q] as it is, with the interface of `SlicedTensor`."""

    def __init__(self, tensor: Float[Tensor, "h p q"]) -> None:
        self.tensor = tensor.double()
        self.shape = tuple(tensor.shape)

    def norm2(self) -> float:
        """Squared Frobenius norm."""
        return float(self.tensor.square().sum())

    def gram(self, mode: int, u: Sequence[Tensor | None] = (None, None, None)) -> Tensor:
        """See `SlicedTensor.gram`."""
        projected = self.tensor
        for other, factor in enumerate(u):
            if other != mode and factor is not None:
                projected = torch.tensordot(projected, factor, ([other], [0])).movedim(-1, other)
        unfolded = projected.movedim(mode, 0).reshape(self.shape[mode], -1)
        return unfolded @ unfolded.T

    def core(self, u1: Tensor, u2: Tensor, u3: Tensor) -> Tensor:
        """The tensor projected on the columns of all three."""
        return torch.einsum("hpq,ha,pb,qc->abc", self.tensor, u1, u2, u3)


Tensor3 = SlicedTensor | DenseTensor


def mode_spectra(tensor: Tensor3) -> tuple[Tensor, Tensor, Tensor]:
    """Squared singular values of the three unfoldings, largest first."""
    found = [torch.linalg.eigvalsh(tensor.gram(mode)).flip(0).clamp(min=0) for mode in range(3)]
    return found[0], found[1], found[2]


def hosvd(tensor: Tensor3, ranks: Sequence[int], sweeps: int = SWEEPS) -> TuckerFactors:
    """Truncated HOSVD, improved by sweeps of HOOI.

    Args:
        tensor: what to decompose.
        ranks: (r1, r2, r3), each from 1 to the size of its mode.
        sweeps: HOOI sweeps over the modes; 0 is HOSVD alone.

    Raises:
        ValueError: ranks out of range, or a tensor that is not finite.
    """
    for mode, (rank, size) in enumerate(zip(ranks, tensor.shape, strict=True)):
        if not 1 <= rank <= size:
            raise ValueError(f"ranks {tuple(ranks)}: rank {rank} of mode {mode + 1} is not between 1 and {size}")
    total = tensor.norm2()
    if not torch.isfinite(torch.tensor(total)):
        raise ValueError("the tensor has values that are not finite: NaN or infinity")
    factors = [_leading(tensor.gram(mode), ranks[mode]) for mode in range(3)]
    if any(rank < size for rank, size in zip(ranks, tensor.shape, strict=True)):
        for _ in range(sweeps):
            for mode in range(3):
                others = [None if other == mode else factors[other] for other in range(3)]
                factors[mode] = _leading(tensor.gram(mode, others), ranks[mode])
    core = tensor.core(*factors)
    kept = float(core.square().sum())
    u1, u2, u3 = factors
    return TuckerFactors(core, u1, u2, u3, max(0.0, 1 - kept / total) if total else 0.0)


def ranks_for_energy(spectra: Sequence[Tensor], energy: float) -> tuple[int, int, int]:
    """The fewest ranks that keep this share of each mode's squared singular values; 1.0: all above rounding.

    Raises:
        ValueError: energy outside (0, 1].
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy must be in (0, 1], got {energy}")
    found = [rank_for_energy(spectrum, energy) for spectrum in spectra]
    return found[0], found[1], found[2]


def rank_for_energy(spectrum: Tensor, energy: float) -> int:
    """As :func:`ranks_for_energy`, of one mode."""
    if energy == 1.0:
        return max(1, int((spectrum > ROUNDING * spectrum[0]).sum()))
    shares = spectrum.cumsum(0)
    if float(shares[-1]) == 0.0:
        return 1
    return min(len(spectrum), int((shares < energy * shares[-1] * (1 - 1e-12)).sum()) + 1)


def _side_by_side(x: Tensor) -> Tensor:
    """``X^T X`` of [X_1 .. X_H], [H w, H w]."""
    flat = x.transpose(0, 1).reshape(x.shape[1], -1)
    return flat.T @ flat


def _leading(gram: Tensor, rank: int) -> Tensor:
    """Orthonormal eigenvectors of the largest eigenvalues, each with its largest entry positive."""
    vectors = torch.linalg.eigh(gram)[1][:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors.dtype)
