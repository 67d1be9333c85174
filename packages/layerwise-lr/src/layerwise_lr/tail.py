"""How heavy the tail of an eigenvalue spectrum is: the exponent of a power law above a threshold.

For eigenvalues ``lambda_0 <= ... <= lambda_{N-1}`` and the threshold ``lambda_i``, with ``n = N - i`` (Hill, 1975;
Clauset, Shalizi and Newman, 2009):

    alpha = 1 + n / sum_{j = i}^{N-1} ln(lambda_j / lambda_i)
    D     = max_j | 1 - (lambda_j / lambda_i)^{1 - alpha} - (j - i) / n |

A small alpha is a heavy tail: a well-correlated, well-trained layer. Alpha does not change when the matrix is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from layerwise_lr.kernels import tail_scan

Fit = Literal["median", "gof", "fix_finger"]
FITS: tuple[str, ...] = get_args(Fit)
ALPHA_MAX = 50.0
ZERO = 1e-5  # what filter_zeros drops, as published
_FINGER_BINS, _FINGER = 100, (0.95, 1.5)


@dataclass(frozen=True)
class TailFit:
    """A fitted tail.

    Attributes:
        alpha: exponent, at most ``alpha_max``.
        xmin: the threshold, an eigenvalue.
        D: Kolmogorov-Smirnov distance between tail and power law.
        n_tail: eigenvalues from the threshold on.
        degenerate: why the fit means nothing ("" when it does): too few eigenvalues, no spread, rank at most half.
        saturated: alpha was cut at ``alpha_max``.
    """

    alpha: float
    xmin: float
    D: float
    n_tail: int
    degenerate: str = ""
    saturated: bool = False

    @property
    def sigma(self) -> float:
        """Standard error of alpha, ``(alpha - 1) / sqrt(n)``; NaN where nothing was fitted."""
        return (self.alpha - 1) / math.sqrt(self.n_tail) if self.n_tail else math.nan


def fit_tail(
    eigs: Float[Tensor, " N"] | Sequence[float | int] | np.ndarray,
    method: Fit = "median",
    k: float | int = 2,
    *,
    filter_zeros: bool = False,
    alpha_max: float | int = ALPHA_MAX,
) -> TailFit:
    """Fit a power law to the upper part of a spectrum.

    Args:
        eigs: N eigenvalues (squared singular values), not negative, in any order; float32 or float64. Lists are
            float64. Negative values within rounding of zero count as zero.
        method: where the tail starts. ``"median"``: at index ``floor(N / k)``. ``"gof"``: where D is smallest over
            all ``i <= N - 2``. ``"fix_finger"``: the same among eigenvalues in ``[0.95, 1.5] * 10^p``, with p the lower
            edge of the fullest of 100 bins of ``log10 lambda``.
        k: the divisor of ``"median"``, above 1; beyond N the whole sample is the tail.
        filter_zeros: first drop eigenvalues up to 1e-5.
        alpha_max: largest exponent; equal eigenvalues would give infinity.

    Returns:
        The fit. ``degenerate`` is set, and alpha is NaN or 1 or the maximum, where the spectrum has no tail to speak
        of: fewer than two positive eigenvalues, or (median) a threshold below ``N eps lambda_max``.

    Raises:
        ValueError: no eigenvalues, not one dimension, NaN or infinite or negative ones, an unknown method, k <= 1,
            alpha_max <= 1.
    """
    if method not in FITS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(FITS)}")
    if not k > 1:
        raise ValueError(f"k must be above 1 (2: the tail starts at the median), got {k}")
    if not alpha_max > 1:
        raise ValueError(f"alpha_max must be above 1, got {alpha_max}")
    values = _checked(eigs)
    if filter_zeros:
        values = values[values > ZERO]
    if values.numel() < 2 or not float(values[-1]) > 0:
        return _degenerate("fewer than two positive eigenvalues")
    return (
        _at_median(values, float(k), float(alpha_max))
        if method == "median"
        else _by_distance(values, method, float(alpha_max))
    )


def _checked(eigs: Any) -> Tensor:
    values = torch.as_tensor(eigs if isinstance(eigs, Tensor) else np.asarray(eigs, dtype=np.float64)).detach()
    if values.dim() != 1 or values.numel() == 0:
        raise ValueError(f"eigs must be N >= 1 eigenvalues in one dimension, got shape {tuple(values.shape)}")
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    values = values.sort().values
    low, high = float(values[0]), float(values[-1])
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"eigenvalues must be finite, got values from {low} to {high}")
    if low < -_resolution(values):
        raise ValueError(f"eigenvalues of W W^T are not negative, got {low:g} (largest {high:g})")
    return values.clamp(min=0)


def _resolution(values: Tensor) -> float:
    """What rounding leaves of an eigenvalue that is zero: ``N eps lambda_max``."""
    return values.numel() * torch.finfo(values.dtype).eps * float(values[-1])


def _degenerate(why: str, alpha: float = math.nan, xmin: float = math.nan, n: int = 0) -> TailFit:
    return TailFit(alpha, xmin, math.nan, n, why)


def _at_median(values: Tensor, k: float, alpha_max: float) -> TailFit:
    count = values.numel()
    start = int(count / k)
    tail = values[start:].double()
    xmin, n = float(tail[0]), count - start
    if n < 2:
        return _degenerate("fewer than two eigenvalues in the tail")
    if xmin < _resolution(values) or xmin <= 0:
        return _degenerate(f"rank at most {start} of {count}: the threshold is zero", 1.0, xmin, n)
    logs = torch.log(tail) - math.log(xmin)
    total = float(logs.sum())
    alpha = 1 + n / total if total > 0 else math.inf
    cut = min(alpha, alpha_max)
    place = torch.arange(n, dtype=torch.float64, device=tail.device)
    distance = float((1 - torch.exp((1 - cut) * logs) - place / n).abs().max())
    return TailFit(cut, xmin, distance, n, saturated=alpha >= alpha_max)


def _by_distance(values: Tensor, method: str, alpha_max: float) -> TailFit:
    positive = values[values > 0]
    if positive.numel() < 2:
        return _degenerate("fewer than two positive eigenvalues")
    alpha, distance = tail_scan(positive.double().log())
    open_ = torch.isfinite(alpha) & (alpha > 1)
    open_[-1] = False
    if method == "fix_finger":
        open_ &= _finger(positive)
    if not bool(open_.any()):
        if float(positive[0]) == float(positive[-1]):
            n = positive.numel()
            return TailFit(alpha_max, float(positive[0]), math.nan, n, saturated=True)
        return _degenerate("no eigenvalue lies in the window around the fullest bin")
    best = int(torch.where(open_, distance, torch.inf).argmin())
    found = float(alpha[best])
    return TailFit(
        min(found, alpha_max), float(positive[best]), float(distance[best]), positive.numel() - best,
        saturated=found >= alpha_max,
    )  # fmt: skip


def _finger(values: Tensor) -> Tensor:
    """Which eigenvalues lie in the window around the fullest bin of ``log10 lambda``."""
    counts, edges = np.histogram(values.double().log10().cpu().numpy(), bins=_FINGER_BINS)
    peak = 10 ** edges[int(counts.argmax())]
    return (values >= _FINGER[0] * peak) & (values <= _FINGER[1] * peak)
