"""Ternary weights, one scale per output channel: ``W ~ alpha_j T_ji`` with T in {-1, 0, 1}.

RobuQ (arXiv 2509.23582) quantises the rotated weight per channel with BitNet b1.58's absmean rule (arXiv 2402.17764).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from robuq.gaussian import gaussian_nmse, gaussian_step

WeightScale = Literal["absmean", "gauss", "ls"]
WEIGHT_SCALES = ("absmean", "gauss", "ls")
Granularity = Literal["channel", "tensor"]
_FLOOR = 1e-8


def ternarize(
    weight: Float[Tensor, "out n"],
    scale: WeightScale = "absmean",
    *,
    granularity: Granularity = "channel",
    unbiased: bool = False,
) -> tuple[Tensor, Tensor]:
    """Ternary codes and scales of a weight.

    * ``"absmean"`` (default, as in the paper): ``alpha_j = mean_i |W_ji|``, ``T = clip(round(W / alpha), -1, 1)`` (half
      to even).
    * ``"gauss"``: ``sigma_j = rms(W_j)``, threshold ``0.612 sigma``, level ``1.224 sigma``: the optimal 3-level
      quantiser of a Gaussian row, which a rotated row nearly is. What quantisation without training should use.
    * ``"ls"``: the codes of absmean, ``alpha = <W, T> / <T, T>``.

    A row of zeros gives ``T = 0`` and ``alpha = 0``.

    Args:
        weight: [out, n].
        scale: rule.
        granularity: ``"tensor"`` takes one scale for all rows (BitNet's layout); alpha is still given per row.
        unbiased: divide ``"gauss"`` levels by ``1 - NMSE`` = 0.80983, so that ``<Wh, W> = <W, W>`` for Gaussian rows.

    Returns:
        ``T`` int8 [out, n] and ``alpha`` float32 [out] (float64 for a float64 weight).

    Raises:
        ValueError: an unknown rule or granularity.
    """
    if scale not in WEIGHT_SCALES:
        raise ValueError(f"weight_scale must be one of {', '.join(map(repr, WEIGHT_SCALES))}, got {scale!r}")
    if granularity not in ("channel", "tensor"):
        raise ValueError(f"granularity must be 'channel' or 'tensor', got {granularity!r}")
    w = weight.detach()
    w = w if w.dtype == torch.float64 else w.float()
    if scale == "gauss":
        sigma = _mean(w.square(), granularity).sqrt()
        step = gaussian_step("ternary")
        threshold, alpha = sigma * (step / 2), sigma * step
        codes = (w > threshold[:, None]).to(torch.int8) - (w < -threshold[:, None]).to(torch.int8)
        if unbiased:
            alpha = alpha / (1 - gaussian_nmse("ternary"))
        return codes, alpha
    alpha = _mean(w.abs(), granularity)
    codes = (w / alpha.clamp(min=_FLOOR)[:, None]).round_().clamp_(-1, 1).to(torch.int8)
    if scale == "ls":
        t = codes.to(w.dtype)
        products, norms = (w * t).sum(1), (t * t).sum(1)
        if granularity == "tensor":
            products, norms = products.sum().expand(len(w)), norms.sum().expand(len(w))
        alpha = torch.where(norms > 0, products / norms.clamp(min=1), 0.0)
    return codes, alpha.contiguous()


def _mean(values: Tensor, granularity: str) -> Tensor:
    rows = values.mean(1)
    return rows.mean().expand(len(rows)) if granularity == "tensor" and len(rows) else rows


class TernaryWeight(torch.autograd.Function):
    """``Wh = alpha T`` forward, straight through backward: ``dL/dW = dL/dWh`` (alpha a constant, no mask)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: WeightScale, granularity: Granularity, unbiased: bool):  # type: ignore[no-untyped-def]
        codes, alpha = ternarize(weight, scale, granularity=granularity, unbiased=unbiased)
        return (codes * alpha[:, None]).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def, override]
        return grad, None, None, None
