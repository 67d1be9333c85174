"""What is read off one matrix: its spectrum, the fitted tail and the other measures of the same spectrum."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from layerwise_lr.spectra import EXACT_UP_TO, Method, as_matrices, farms_spectrum, spectrum
from layerwise_lr.tail import ALPHA_MAX, Fit, TailFit, fit_tail

Metric = Literal["alpha", "alphahat", "stable_rank", "entropy"]
METRICS: tuple[str, ...] = get_args(Metric)
MIN_DIM = 50


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name, shape, role: which weight.
        alpha, xmin, D, n_tail, sigma: the fitted tail, see `layerwise_lr.tail.TailFit`.
        alphahat: ``alpha log10(lambda_max)``.
        stable_rank: ``sum lambda / lambda_max``.
        entropy: ``-sum p ln p / ln N``, ``p = lambda / sum lambda``; 1 for equal eigenvalues.
        lambda_max: largest eigenvalue, the square of the spectral norm.
        seconds: time taken.
        note: why there is no fit, or what is odd about it; "" for an ordinary one.
        saturated: alpha was cut at its maximum.
    """

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"
    alpha: float = math.nan
    xmin: float = math.nan
    D: float = math.nan
    n_tail: int = 0
    sigma: float = math.nan
    alphahat: float = math.nan
    stable_rank: float = math.nan
    entropy: float = math.nan
    lambda_max: float = math.nan
    seconds: float = 0.0
    note: str = ""
    saturated: bool = False

    @property
    def fitted(self) -> bool:
        """Whether the exponent means something."""
        return not self.note

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True)
class Measure:
    """How layers are measured.

    Args:
        fit, k, filter_zeros, alpha_max: of `layerwise_lr.tail.fit_tail`.
        method, dtype: of `layerwise_lr.spectra.spectrum`.
        min_dim: matrices with fewer eigenvalues are not fitted.
        farms: average over square windows, which removes the influence of the aspect ratio.
    """

    fit: Fit = "median"
    k: float = 2
    filter_zeros: bool = False
    alpha_max: float = ALPHA_MAX
    method: Method = "auto"
    dtype: torch.dtype | None = None
    min_dim: int = MIN_DIM
    farms: bool = False

    def __post_init__(self) -> None:
        fit_tail([1.0, 2.0], self.fit, self.k, alpha_max=self.alpha_max)  # checks its arguments
        if self.min_dim < 2:
            raise ValueError(f"min_dim must be at least 2, got {self.min_dim}")

    def __call__(self, name: str, weight: Tensor, role: str = "matrix") -> LayerReport:
        """Measure a weight: never raises for what it holds, but says so in ``note``."""
        start = time.perf_counter()
        shape = tuple(weight.shape)
        matrices = as_matrices(weight)
        count = matrices.shape[0] * min(matrices.shape[1:])
        if count < self.min_dim:
            return LayerReport(name, shape, role, note=f"{count} eigenvalues, fewer than min_dim = {self.min_dim}")
        if not bool(torch.isfinite(matrices).all()):
            return LayerReport(name, shape, role, note="NaN or infinite weights")
        eigs = self.eigenvalues(weight)
        fit = self._fit(eigs)
        if fit.degenerate and fit.n_tail and eigs.dtype == torch.float32 and count <= EXACT_UP_TO:
            eigs = self.eigenvalues(weight, torch.float64)  # is the threshold zero, or only lost in float32?
            fit = self._fit(eigs)
        return _report(name, shape, role, eigs.double(), fit, time.perf_counter() - start)

    def eigenvalues(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The spectrum that is fitted."""
        dtype = dtype or self.dtype
        return farms_spectrum(weight, dtype) if self.farms else spectrum(weight, self.method, dtype)

    def _fit(self, eigs: Tensor) -> TailFit:
        return fit_tail(eigs, self.fit, self.k, filter_zeros=self.filter_zeros, alpha_max=self.alpha_max)


def _report(name: str, shape: tuple[int, ...], role: str, eigs: Tensor, fit: TailFit, seconds: float) -> LayerReport:
    largest, total = float(eigs[-1]), float(eigs.sum())
    measures = {"stable_rank": math.nan, "entropy": math.nan, "alphahat": math.nan}
    if largest > 0:
        p = eigs / total
        measures = {
            "stable_rank": total / largest,
            "entropy": float(-torch.special.xlogy(p, p).sum()) / math.log(eigs.numel()),
            "alphahat": fit.alpha * math.log10(largest),
        }
    return LayerReport(
        name, shape, role, fit.alpha, fit.xmin, fit.D, fit.n_tail, fit.sigma, **measures, lambda_max=largest,
        seconds=seconds, note=fit.degenerate, saturated=fit.saturated,
    )  # fmt: skip
