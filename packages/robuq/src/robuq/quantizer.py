"""RobustQuantizer: activations to 1 to 8 bits, one scale a token, and the quantisers it is compared with.

For a token y (a row after the rotation): ``s = sqrt(mean(y^2))``, ``d = delta_b s``, ``k = clip(floor(y/d), -L/2, L/2
- 1)``, value ``(k + 1/2) d`` with ``L = 2^b`` (RobuQ, arXiv 2509.23582); ``delta_b`` is `robuq.gaussian.gaussian_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from robuq.gaussian import Bits, check_bits, gaussian_nmse, gaussian_step, levels, lloyd_max_levels, lloyd_max_nmse
from robuq.hadamard import Rotation
from robuq.kernels.fake_quant import fake_quant
from robuq.kernels.grid import Grid, encode, token_step, within
from robuq.kernels.rotate import rotate

Kind = Literal["gauss_uniform", "gauss_lloyd", "minmax", "absmax"]
Ste = Literal["clipped", "identity"]
KINDS = ("gauss_uniform", "gauss_lloyd", "minmax", "absmax")
STES = ("clipped", "identity")
UNQUANTISED = 16
ActBits = Bits | Literal[16]


def check_act_bits(bits: object) -> ActBits:
    """``bits`` if it is 1 to 8, ``"ternary"``, or 16: activations as they are."""
    if bits == UNQUANTISED and not isinstance(bits, bool):
        return UNQUANTISED
    try:
        return check_bits(bits)
    except ValueError:
        raise ValueError(f"act_bits must be 1 to 8, 'ternary', or 16 (not quantised), got {bits!r}") from None


@dataclass(frozen=True)
class TokenQuantizer:
    """How tokens are quantised.

    Attributes:
        bits: 1 to 8 or ``"ternary"``.
        kind: ``"gauss_uniform"`` (default; integer products), ``"gauss_lloyd"`` (Lloyd-Max levels), ``"minmax"``
            (asymmetric, ``d = (max - min)/(L - 1)``: the paper's baseline) or ``"absmax"`` (BitNet's).
        unbiased: divide values by ``1 - NMSE``, so that ``<Q(y), y> = <y, y>`` for Gaussian tokens.
        ste: ``"clipped"``: the gradient passes where y lies inside the levels' range; ``"identity"``: everywhere.
    """

    bits: Bits
    kind: Kind = "gauss_uniform"
    unbiased: bool = False
    ste: Ste = "clipped"

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.kind not in KINDS:
            raise ValueError(f"quantizer must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        if self.ste not in STES:
            raise ValueError(f"ste must be 'clipped' or 'identity', got {self.ste!r}")
        if self.kind == "absmax" and self.bits == 1:
            raise ValueError("the absmax quantiser needs at least 2 bits: with 1 its largest level is 0")

    @property
    def gain(self) -> float:
        """Factor of the values: 1, or ``1 / (1 - NMSE)``."""
        if not self.unbiased or self.kind in ("minmax", "absmax"):
            return 1.0
        return 1 / (1 - (lloyd_max_nmse if self.kind == "gauss_lloyd" else gaussian_nmse)(self.bits))

    @property
    def grid(self) -> Grid | None:
        """The quantiser for the kernels; None where it has no uniform grid around zero."""
        return _grid(self)

    def tokens(self, y: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor, Tensor | float]:
        """Codes int8 [m, n], steps [m], and offset z (a number or [m]): the value is ``(k + z) d gain``.

        Raises:
            ValueError: Lloyd-Max levels are not of this form.
        """
        grid = self.grid
        if grid is not None:
            d = token_step(y, grid)
            return encode(y, d, grid), d, grid.offset
        if self.kind != "minmax":
            raise ValueError("Lloyd-Max levels have no step")
        count, y = levels(self.bits), y if y.dtype == torch.float64 else y.float()
        low, high = y.amin(1), y.amax(1)
        d = (high - low) / (count - 1)
        flat = ~(d > 0)  # all values equal: the step is chosen so that code 0 stands for them; NaN stays NaN
        d = torch.where(flat, torch.where(low == 0, 1.0, low.abs()), d)
        z = low / d + count // 2
        codes = torch.nan_to_num((y - low[:, None]) / d[:, None]).round().clamp(0, count - 1) - count // 2
        return codes.to(torch.int8), torch.where(torch.isfinite(high - low), d, torch.nan), z

    def values(self, y: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Quantised tokens, float32 (float64 for float64). Not differentiable; see :meth:`straight_through`."""
        if self.kind == "gauss_lloyd":
            y = y if y.dtype == torch.float64 else y.float()
            s = token_step(y, Grid("rms", 1.0, False, -1, 0, 0.5, math.inf, 1.0))
            positive = torch.tensor(lloyd_max_levels(self.bits), dtype=y.dtype, device=y.device)
            middle = (positive.new_zeros(1) if self.bits == "ternary" else positive.new_empty(0), positive)
            table = torch.cat([-positive.flip(0), *middle])
            edges = (table[1:] + table[:-1]) / 2
            safe = torch.where(s > 0, s, 1.0)[:, None]
            return table[torch.bucketize(y / safe, edges, right=True)] * (s * self.gain)[:, None]
        codes, d, z = self.tokens(y)
        offset = z[:, None] if isinstance(z, Tensor) else z
        return (codes.to(d.dtype) + offset) * (d * self.gain)[:, None]

    def straight_through(self, y: Tensor) -> Tensor:
        """:meth:`values` with the straight-through gradient: 1 inside the range, 0 outside, the scale a constant."""
        return _Straight.apply(y, self)  # type: ignore[no-any-return, no-untyped-call]

    def rotated(
        self, x: Tensor, recipe: Rotation, signs: Tensor | None, *, keep_rotated: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Rotated tokens ``y`` (None unless kept) and their quantised values, differentiably; x is [m, n]."""
        grid = self.grid
        if grid is not None:
            return fake_quant(x, recipe, signs, grid, keep_rotated=keep_rotated)
        y = rotate(x if x.dtype == torch.float64 else x.float(), recipe, signs)
        return (y if keep_rotated else None), self.straight_through(y)


@lru_cache(maxsize=256)
def _grid(q: TokenQuantizer) -> Grid | None:
    if q.kind == "absmax":
        if q.bits == "ternary":
            return Grid("max", 1.0, True, -1, 1, 0.0, math.inf, 1.0)
        top = 2 ** (int(q.bits) - 1) - 1
        return Grid("max", 1.0 / top, True, -top - 1, top, 0.0, math.inf, 1.0)
    if q.kind != "gauss_uniform":
        return None
    half, step = levels(q.bits) // 2, gaussian_step(q.bits)
    reach = math.inf if q.ste == "identity" else levels(q.bits) / 2
    if q.bits == "ternary":
        return Grid("rms", step, True, -1, 1, 0.0, reach, q.gain)
    return Grid("rms", step, False, -half, half - 1, 0.5, reach, q.gain)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, q: TokenQuantizer):  # type: ignore[no-untyped-def]
        if q.ste == "clipped" and q.kind in ("gauss_uniform", "gauss_lloyd"):
            uniform = TokenQuantizer(q.bits).grid  # the range of the uniform levels, for both
            ctx.save_for_backward(None if uniform is None else within(y, token_step(y, uniform), uniform))
        else:
            ctx.save_for_backward(None)  # min and max, and absmax, leave nothing outside
        return q.values(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def, override]
        (mask,) = ctx.saved_tensors
        return (grad if mask is None else torch.where(mask, grad, 0.0)), None


def robust_quantize(
    x: Float[Tensor, "*batch n"], bits: Bits, *, check: bool = False
) -> tuple[Int8[Tensor, "*batch n"], Tensor]:
    """Quantise tokens as they are (no rotation): the RobustQuantizer.

    Args:
        x: float tensor [..., n]; n >= 1.
        bits: 1 to 8, or ``"ternary"``.
        check: raise for values that are not finite.

    Returns:
        Codes int8 [..., n] and steps d float32 [...]: the value is ``(k + 1/2) d`` (``k d`` for ``"ternary"``). A
        token of zeros has d = 0; one with a NaN or infinity has d = NaN, and no other token is touched by it.

    Raises:
        ValueError: other bits, or a scalar.
        TypeError: x is not floating point.
        FloatingPointError: with ``check``, where a value is not finite.
    """
    quantizer = TokenQuantizer(check_bits(bits))
    if not x.is_floating_point():
        raise TypeError(f"robust_quantize takes floating point tensors, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"robust_quantize needs tokens of at least one value, got shape {tuple(x.shape)}")
    if check:
        check_finite(x, "robust_quantize")
    flat = x.reshape(-1, x.shape[-1])
    codes, d, _ = quantizer.tokens(flat if x.dtype == torch.float64 else flat.float())
    return codes.reshape(x.shape), d.reshape(x.shape[:-1])


def check_finite(x: Tensor, name: str) -> None:
    """Raise FloatingPointError, naming the layer, where x has a NaN or an infinity."""
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x).all(-1)).sum())
        raise FloatingPointError(f"{name}: {bad} token(s) have values that are not finite")
