"""``y = x D H`` and its inverse ``x = y H^T D`` over the last axis.

Paths: the reference multiplies axis by axis in any dtype; float32 on the CPU runs in numba on eight tokens at a time
(`robuq.kernels.cpu_transform`); a GPU runs the Triton kernel (`robuq.kernels.triton_rotate`).
Cost: ``n (sum m_i + p)`` operations a token, never a dense ``n x n`` product.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icml26_shared.kernels import Path, choose_path

if TYPE_CHECKING:
    from robuq.hadamard import Rotation

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rotate(
    x: Tensor, recipe: Rotation, signs: Tensor | None = None, *, inverse: bool = False, prefer: Path | None = None
) -> Tensor:
    """Rotate tokens.

    Args:
        x: float tensor [..., n], or [..., n'] with ``inverse``.
        recipe: the rotation.
        signs: +-1 [n] or None.
        inverse: ``y H^T D`` instead, without the padding.
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        [..., n'] ([..., n] with ``inverse``), of x's dtype; computed in float32, or float64 for float64.
        Differentiable.
    """
    length = recipe.padded if inverse else recipe.width
    if x.shape[-1] != length:
        raise ValueError(f"the last axis must have length {length}, got shape {tuple(x.shape)}")
    return _Rotate.apply(x, recipe, signs, inverse, prefer)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: Rotation, signs: Tensor | None, inverse: bool, prefer: Path | None):  # type: ignore[no-untyped-def]
        ctx.settings = recipe, inverse, prefer
        ctx.signs = signs
        flat = x.reshape(-1, x.shape[-1])
        y = rotate_rows(flat, recipe, signs, inverse=inverse, prefer=prefer)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def, override]
        recipe, inverse, prefer = ctx.settings
        return rotate(grad, recipe, ctx.signs, inverse=not inverse, prefer=prefer), None, None, None, None


def rotate_rows(
    x: Tensor, recipe: Rotation, signs: Tensor | None, *, inverse: bool = False, prefer: Path | None = None
) -> Tensor:
    """:func:`rotate` for [m, n] without autograd."""
    path = choose_path(x, prefer=prefer)
    if path == "cpu" and x.dtype in _FLOATS:
        from robuq.kernels.cpu_transform import rotate_cpu

        return rotate_cpu(x, recipe, signs, inverse)
    if path == "triton" and x.dtype in _FLOATS:
        from robuq.kernels.triton_rotate import rotate_triton

        return rotate_triton(x, recipe, signs, inverse)
    return rotate_reference(x, recipe, signs, inverse)


def rotate_reference(x: Tensor, recipe: Rotation, signs: Tensor | None, inverse: bool = False) -> Tensor:
    """Plain torch: the axes of ``x`` viewed as [m, blocks, a, b] are multiplied by ``H_a`` and ``H_b``."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(dtype)
    if not inverse:
        if signs is not None:
            y = y * signs.to(dtype)
        if recipe.padded > recipe.width:
            y = torch.nn.functional.pad(y, (0, recipe.padded - recipe.width))
    a, b = factor_pair(recipe, dtype, y.device)
    if inverse:
        a, b = a.T, b.T
    shaped = y.reshape(-1, len(a), len(b)) @ b
    if len(a) > 1:
        shaped = a.T @ shaped
    y = shaped.reshape(x.shape[0], recipe.padded) * recipe.scale
    if inverse:
        y = y[:, : recipe.width]
        if signs is not None:
            y = y * signs.to(dtype)
    return y.to(x.dtype)


@functools.lru_cache(maxsize=256)
def factor_pair(recipe: Rotation, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """+-1 matrices A and B with ``A (x) B = H`` and the smallest total order."""
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    factors = [torch.from_numpy(m.copy()).to(dtype) for m in recipe.matrices()] + [sylvester] * recipe.power
    orders = [len(f) for f in factors]

    def product(numbers: list[int]) -> int:
        return functools.reduce(lambda u, v: u * v, numbers, 1)

    cut = min(range(len(factors) + 1), key=lambda c: product(orders[:c]) + product(orders[c:]))
    one = torch.ones(1, 1, dtype=dtype)
    a, b = (functools.reduce(torch.kron, part, one) for part in (factors[:cut], factors[cut:]))
    return a.contiguous().to(device), b.contiguous().to(device)
