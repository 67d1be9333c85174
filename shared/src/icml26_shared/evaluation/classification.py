"""Scores of a classifier in one call; the arithmetic is scikit-learn's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from icml26_shared.errors import require

__all__ = ["ClassificationScores", "classification_scores"]


@dataclass(frozen=True)
class ClassificationScores:
    """Scores over N examples and C classes. Per-class arrays follow `labels`; `confusion[i, j]` counts examples of true
    class i predicted as j. `auroc` is None without scores, macro one-vs-rest for more than two classes.
    """

    labels: tuple[Any, ...]
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    weighted_f1: float
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    f1: NDArray[np.float64]
    support: NDArray[np.int64]
    confusion: NDArray[np.int64]
    auroc: float | None = None

    def to_json(self) -> dict[str, Any]:
        """All scores as plain lists and numbers."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in self.__dict__.items()
        }


def classification_scores(
    truth: ArrayLike, predicted: ArrayLike, *, labels: Sequence[Any] | None = None, scores: ArrayLike | None = None
) -> ClassificationScores:
    """Score predictions of one label each.

    Args:
        truth: true labels [N]; strings or integers.
        predicted: predicted labels [N].
        labels: the classes in the order wanted. Default: all that occur, sorted.
        scores: probabilities [N, C] in the order of `labels`, or [N] for the second of two classes; adds AUROC.

    Returns:
        The scores; a class that is never predicted, or never true, has precision, or recall, 0. Balanced accuracy is
        the mean recall of the classes that occur in `truth`.

    Raises:
        ValueError: different lengths, nothing to score, or a label outside `labels`.
        MissingExtra: scikit-learn is not installed.
    """
    metrics = require("sklearn.metrics", "icml26-shared[evaluation]")
    true, guess = np.asarray(truth), np.asarray(predicted)
    if true.ndim != 1 or true.shape != guess.shape or true.size == 0:
        raise ValueError(f"truth and predicted must be [N] with N >= 1, got {true.shape} and {guess.shape}")
    seen = np.union1d(true, guess)
    classes = seen if labels is None else np.asarray(labels)
    strange = np.setdiff1d(seen, classes)
    if strange.size:
        raise ValueError(f"labels {strange.tolist()} occur but are not among {classes.tolist()}")
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        true, guess, labels=classes, zero_division=0.0
    )
    return ClassificationScores(
        labels=tuple(classes.tolist()),
        accuracy=float((true == guess).mean()),
        balanced_accuracy=float(recall[support > 0].mean()),
        macro_f1=float(f1.mean()),
        weighted_f1=float(np.average(f1, weights=support)),
        precision=precision,
        recall=recall,
        f1=f1,
        support=support,
        confusion=metrics.confusion_matrix(true, guess, labels=classes),
        auroc=None if scores is None else _auroc(metrics, true, np.asarray(scores, dtype=np.float64), classes),
    )


def _auroc(metrics: Any, truth: NDArray[Any], scores: NDArray[np.float64], classes: NDArray[Any]) -> float:
    if len(classes) == 2:
        column = scores[:, 1] if scores.ndim == 2 else scores
        return float(metrics.roc_auc_score(truth == classes[1], column))
    positions = np.array([int(np.flatnonzero(classes == label)[0]) for label in truth])
    return float(
        metrics.roc_auc_score(positions, scores, multi_class="ovr", average="macro", labels=range(len(classes)))
    )
