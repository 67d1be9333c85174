"""The Frechet distance of two samples of features, the "FID" of Inception features.

``|mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^{1/2})``: the squared 2-Wasserstein distance of the normal distributions
with the samples' means and covariances (M. Heusel et al., "GANs trained by a two time-scale update rule", 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Mean [d] and covariance [d, d] (over n - 1) of n rows of features, float64."""

    count: int
    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Moments:
        """Of rows [n, d] that are all there; errors as of :class:`MomentsSum`."""
        total = MomentsSum()
        total.add(features)
        return total.moments()


class MomentsSum:
    """Collects :class:`Moments` batch by batch, with no more memory than d x d.

    Batches are merged by their means and sums of squared deviations (T. Chan et al., 1979), which keeps the covariance
    exact where the mean is large.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = np.zeros(0)
        self._squares = np.zeros((0, 0))

    def add(self, features: np.ndarray) -> None:
        """Take in rows [m, d].

        Raises:
            ValueError: not two axes, another d than before, or values that are not finite.
        """
        rows = np.asarray(features, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] == 0:
            raise ValueError(f"features must be rows [n, d], got shape {rows.shape}")
        if not np.isfinite(rows).all():
            raise ValueError(f"{int((~np.isfinite(rows)).any(1).sum())} row(s) of features are not finite")
        if not len(rows):
            return
        if self.count == 0:
            self._mean, self._squares = np.zeros(rows.shape[1]), np.zeros((rows.shape[1], rows.shape[1]))
        if rows.shape[1] != len(self._mean):
            raise ValueError(f"rows had {len(self._mean)} features before, now {rows.shape[1]}")
        mean = rows.mean(0)
        centred, shift = rows - mean, mean - self._mean
        total = self.count + len(rows)
        self._squares += centred.T @ centred + np.outer(shift, shift) * (self.count * len(rows) / total)
        self._mean = self._mean + shift * (len(rows) / total)
        self.count = total

    def moments(self) -> Moments:
        """Of all rows so far.

        Raises:
            ValueError: fewer than two rows have no covariance.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two rows of features, got {self.count}")
        return Moments(self.count, self._mean, self._squares / (self.count - 1))


def frechet_distance(a: Moments, b: Moments) -> float:
    """The distance, at least 0; ``tr (S_a S_b)^{1/2}`` by the eigenvalues of ``S_a^{1/2} S_b S_a^{1/2}``.

    Raises:
        ValueError: features of different lengths.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"the samples have {len(a.mean)} and {len(b.mean)} features; they must be of one extractor")
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ b.covariance @ root), 0, None)).sum()
    shift = a.mean - b.mean
    return max(float(shift @ shift + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross), 0.0)
