"""How far predicted probabilities can be believed: reliability bins, ECE, MCE and Brier score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ReliabilityBins", "brier_score", "expected_calibration_error", "reliability_bins", "top_label"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReliabilityBins:
    """Mean confidence and accuracy of the examples in each of B bins; NaN where a bin is empty.

    `edges` has B + 1 entries; bin b holds confidences in `(edges[b], edges[b+1]]`, the first also its lower edge.
    """

    edges: Array
    count: NDArray[np.int64]
    confidence: Array
    accuracy: Array

    @property
    def ece(self) -> float:
        """Expected calibration error: `sum_b n_b/N * |accuracy_b - confidence_b|` (Guo et al., 2017)."""
        full = self.count > 0
        gaps = np.abs(self.accuracy[full] - self.confidence[full])
        return float((self.count[full] * gaps).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """Maximum calibration error: the largest `|accuracy_b - confidence_b|` over bins with examples."""
        return float(np.nanmax(np.abs(self.accuracy - self.confidence)))


def top_label(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    """Confidence of the likeliest class, and whether it is right.

    Args:
        probabilities: [N, C], rows summing to 1.
        labels: true classes [N], integers in `0 .. C-1`.

    Returns:
        `(confidence [N], correct [N])`; ties go to the smaller class.
    """
    p, y = _checked(probabilities, labels)
    if p.ndim != 2:
        raise ValueError(f"probabilities must be [N, C], got shape {p.shape}")
    return p.max(axis=1), p.argmax(axis=1) == y


def reliability_bins(
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, strategy: Literal["uniform", "quantile"] = "uniform"
) -> ReliabilityBins:
    """Group examples by confidence.

    Args:
        confidence: [N] in [0, 1].
        correct: [N], whether the prediction was right (or the outcome 0/1 of a binary event).
        bins: number of bins.
        strategy: `"uniform"`: equal widths on [0, 1]; `"quantile"`: equal counts (ties may merge bins).

    Raises:
        ValueError: empty input, different lengths, values outside [0, 1], fewer than one bin, an unknown strategy.
    """
    values, hits = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if values.ndim != 1 or values.shape != hits.shape or values.size == 0:
        raise ValueError(f"confidence and correct must be [N] with N >= 1, got {values.shape} and {hits.shape}")
    for name, array in (("confidence", values), ("correct", hits)):
        if not np.all((array >= 0) & (array <= 1)):
            raise ValueError(f"{name} must lie in [0, 1], got values from {array.min()} to {array.max()}")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if strategy == "uniform":
        edges = np.linspace(0.0, 1.0, bins + 1)
    elif strategy == "quantile":
        edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, bins + 1)))
        if edges.size == 1:
            edges = np.repeat(edges, 2)
    else:
        raise ValueError(f"strategy must be 'uniform' or 'quantile', got {strategy!r}")
    member = np.clip(np.searchsorted(edges, values, side="left") - 1, 0, edges.size - 2)
    count = np.bincount(member, minlength=edges.size - 1)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(member, weights=values, minlength=edges.size - 1) / count
        accuracy = np.bincount(member, weights=hits, minlength=edges.size - 1) / count
    return ReliabilityBins(edges, count, mean_confidence, accuracy)


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> float:
    """ECE of the top label over equal-width bins; probabilities [N, C], labels [N]."""
    return reliability_bins(*top_label(probabilities, labels), bins=bins).ece


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Brier score, 0 is best.

    Args:
        probabilities: [N, C]: `mean_n sum_c (p_nc - [y_n = c])^2`, in [0, 2] (Brier, 1950); or [N], the probability of
            class 1: `mean_n (p_n - y_n)^2`, in [0, 1], half of the former for two classes.
        labels: true classes [N].
    """
    p, y = _checked(probabilities, labels)
    if p.ndim == 1:
        return float(np.mean((p - y) ** 2))
    return float(np.mean(((p - np.eye(p.shape[1])[y]) ** 2).sum(axis=1)))


def _checked(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Array, NDArray[np.int64]]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if p.ndim not in (1, 2) or y.shape != p.shape[:1] or y.size == 0:
        raise ValueError(f"need probabilities [N] or [N, C] and labels [N], N >= 1; got {p.shape} and {y.shape}")
    if not np.all((p >= 0) & (p <= 1 + 1e-9)):
        raise ValueError("probabilities must lie in [0, 1]")
    if p.ndim == 2 and not np.allclose(p.sum(axis=1), 1.0, atol=1e-3):
        raise ValueError("each row of probabilities must sum to 1")
    classes = 2 if p.ndim == 1 else p.shape[1]
    whole = y.astype(np.int64)
    if np.any(whole != y) or np.any(whole < 0) or np.any(whole >= classes):
        raise ValueError(f"labels must be integers from 0 to {classes - 1}")
    return p, whole
