"""Classification scores worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from icml26_shared.evaluation.classification import classification_scores

pytest.importorskip("sklearn")

TRUTH = ["a", "a", "a", "b", "b", "c"]
GUESS = ["a", "a", "b", "b", "c", "c"]


def test_scores_by_hand():
    scores = classification_scores(TRUTH, GUESS)
    assert scores.labels == ("a", "b", "c")
    assert scores.accuracy == pytest.approx(4 / 6)
    np.testing.assert_array_equal(scores.confusion, [[2, 1, 0], [0, 1, 1], [0, 0, 1]])
    np.testing.assert_allclose(scores.precision, [1, 1 / 2, 1 / 2])
    np.testing.assert_allclose(scores.recall, [2 / 3, 1 / 2, 1])
    np.testing.assert_allclose(scores.f1, [4 / 5, 1 / 2, 2 / 3])
    assert scores.macro_f1 == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3)
    assert scores.weighted_f1 == pytest.approx((3 * 4 / 5 + 2 * 1 / 2 + 2 / 3) / 6)
    assert scores.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    np.testing.assert_array_equal(scores.support, [3, 2, 1])
    assert scores.auroc is None


def test_a_class_that_never_occurs_counts_in_macro_f1_only(recwarn):
    scores = classification_scores(TRUTH, GUESS, labels=["a", "b", "c", "d"])
    assert scores.macro_f1 == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 4)
    assert scores.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert len(recwarn) == 0


def test_auroc_of_two_classes_is_the_share_of_ordered_pairs():
    truth, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
    assert classification_scores(truth, truth, scores=scores).auroc == pytest.approx(3 / 4)
    columns = np.stack([1 - np.array(scores), scores], axis=1)
    assert classification_scores(truth, truth, scores=columns).auroc == pytest.approx(3 / 4)
    # the order of the labels says which class is the second
    assert classification_scores(truth, truth, labels=[1, 0], scores=scores).auroc == pytest.approx(1 / 4)


def test_auroc_of_three_classes_is_the_mean_of_one_against_the_rest():
    truth = ["c", "a", "b", "a"]
    scores = [[0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.25, 0.5, 0.25]]
    # a: 0.5, 0.25 against 0.2, 0.3: 3 of 4 pairs; b: 0.4 against 0.2, 0.3, 0.5: 2 of 3; c: 0.6 against all: 1
    assert classification_scores(truth, truth, scores=scores).auroc == pytest.approx((3 / 4 + 2 / 3 + 1) / 3)


def test_scores_go_into_json():
    text = json.dumps(classification_scores(TRUTH, GUESS).to_json())
    assert json.loads(text)["confusion"] == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"must be \[N\] with N >= 1"):
        classification_scores([], [])
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
        classification_scores([0, 1], [0, 1, 1])
    with pytest.raises(ValueError, match=r"labels \['c'\] occur but are not among \['a', 'b'\]"):
        classification_scores(TRUTH, GUESS, labels=["a", "b"])
