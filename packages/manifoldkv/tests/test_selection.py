"""Which tokens stay: exact counts, original order, stable ties, proportional windows, shared head budgets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from manifoldkv import select
from manifoldkv.selection import select_adaptive, select_per_window, window_quotas

INF = math.inf


def row(*scores: float) -> torch.Tensor:
    return torch.tensor(scores)[None, None]


def naive(scores: list[float], n: int) -> list[int]:
    """The definition: sort by score downwards, then by index upwards; the first n, in original order."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:n])


# few distinct values, so that ties are the rule
_scores = hnp.arrays(
    "float32",
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)),
    elements=st.sampled_from([-INF, -1.5, 0.0, 0.25, 2.0, INF]),
)


@given(_scores, st.data())
def test_equals_a_stable_sort(array, data):
    scores = torch.from_numpy(array)
    n = data.draw(st.integers(0, scores.shape[-1] + 3))
    chosen = select(scores, n)
    assert chosen.dtype == torch.int64
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            assert chosen[b, h].tolist() == naive(scores[b, h].tolist(), min(n, scores.shape[-1]))


def test_worked_by_hand():
    assert select(row(1.0, 5.0, 3.0, 4.0), 2).tolist() == [[[1, 3]]]
    assert select(row(2.0, 2.0, 2.0, 2.0), 3).tolist() == [[[0, 1, 2]]]  # ties: the smaller index
    assert select(row(2.0, 7.0, 2.0, 2.0, 1.0), 3).tolist() == [[[0, 1, 2]]]
    assert select(row(-INF, 1.0, INF, -INF), 3).tolist() == [[[0, 1, 2]]]  # one -inf is needed: the earlier one
    assert select(row(0.0, -0.0, 0.0), 1).tolist() == [[[0]]]  # both zeros are equal


def test_budget_at_or_above_the_length_keeps_everything():
    assert select(row(3.0, 1.0), 2).tolist() == [[[0, 1]]]
    assert select(row(3.0, 1.0), 99).tolist() == [[[0, 1]]]


def test_empty_inputs():
    assert select(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)
    assert select(torch.zeros(2, 3, 5), 0).shape == (2, 3, 0)
    assert select(torch.zeros(0, 3, 5), 2).shape == (0, 3, 2)


def test_mask_excludes_padding():
    mask = torch.tensor([[False, False, True, True, True]])
    assert select(row(9.0, 9.0, 1.0, 3.0, 2.0), 2, mask).tolist() == [[[3, 4]]]
    assert select(row(9.0, 9.0, 1.0, 3.0, 2.0), 4, mask).tolist() == [[[0, 2, 3, 4]]]  # too few valid: pads fill up
    assert select(row(9.0, 9.0, 1.0, 3.0, 2.0), 2, mask.long()).tolist() == [[[3, 4]]]


def test_any_strides_and_dtypes():
    scores = torch.randn(3, 2, 17, generator=torch.Generator().manual_seed(0))
    expected = select(scores, 5)
    assert torch.equal(select(scores.transpose(1, 2).contiguous().transpose(1, 2), 5), expected)
    assert torch.equal(select(scores.double(), 5), expected)
    shared = scores[:1].expand(3, -1, -1)
    assert torch.equal(select(shared, 5), expected[:1].expand(3, -1, -1))


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_rank(self):
        with pytest.raises(ValueError, match=r"^scores must have shape \[batch, heads, tokens\], not \(4,\)"):
            select(torch.zeros(4), 2)

    def test_nan(self):
        with pytest.raises(ValueError, match=r"^scores contain NaN; give -inf"):
            select(row(1.0, math.nan), 1)

    def test_negative_count(self):
        with pytest.raises(ValueError, match=r"^n=-1 is negative"):
            select(row(1.0), -1)

    @pytest.mark.parametrize("n", [2.0, True, "2"])
    def test_count_of_another_type(self, n):
        with pytest.raises(TypeError, match=r"^n=.* must be an integer >= 0"):
            select(row(1.0), n)

    def test_lists_are_not_tensors(self):
        with pytest.raises(TypeError, match=r"scores must be a tensor of shape \[batch, heads, tokens\], not list"):
            select([[[1.0, 2.0]]], 1)
        with pytest.raises(TypeError, match=r"mask must be a tensor of shape \[batch, tokens\], not list"):
            select(torch.zeros(1, 1, 2), 1, [[1, 1]])

    def test_mask_of_another_shape(self):
        with pytest.raises(ValueError, match=r"^mask has shape \(1, 3\), but the keys are of 1 rows and 2 tokens"):
            select(row(1.0, 2.0), 1, torch.ones(1, 3, dtype=torch.bool))


def test_shape_annotations_are_checked_in_these_tests():
    """The import hook of conftest is at work: without it, every annotation would be a mere comment."""
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        select(torch.zeros(1, 2, 3), 1, torch.ones(1, 4, dtype=torch.bool))  # mask of 4 tokens for scores of 3


class TestPerWindow:
    @given(
        st.lists(st.integers(1, 50), min_size=1, max_size=8).flatmap(
            lambda sizes: st.tuples(st.just(sizes), st.integers(0, sum(sizes)))
        )
    )
    def test_quotas_are_largest_remainders(self, case):
        sizes, n = case
        quotas = window_quotas(n, sizes)
        total = sum(sizes)
        assert sum(quotas) == n
        floors = [n * w // total for w in sizes]
        fractions = [n * w % total for w in sizes]
        order = sorted(range(len(sizes)), key=lambda j: (-fractions[j], j))
        expected = [f + (j in order[: n - sum(floors)]) for j, f in enumerate(floors)]
        assert quotas == expected
        assert all(q <= w for q, w in zip(quotas, sizes, strict=True))

    @given(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6).flatmap(
            lambda pairs: st.tuples(
                st.just([(w, min(f, w)) for w, f in pairs]),
                st.integers(sum(min(f, w) for w, f in pairs), sum(w for w, _ in pairs)),
            )
        )
    )
    def test_quotas_with_floors(self, case):
        pairs, n = case
        sizes, floors = [w for w, _ in pairs], [f for _, f in pairs]
        quotas = window_quotas(n, sizes, floors)
        assert sum(quotas) == n
        assert all(f <= q <= w for f, q, w in zip(floors, quotas, sizes, strict=True))

    def test_quotas_worked_by_hand(self):
        assert window_quotas(3, [4, 4]) == [2, 1]  # equal fractions: the earlier window
        assert window_quotas(5, [4, 4, 2]) == [2, 2, 1]
        assert window_quotas(5, [3, 3, 4]) == [2, 1, 2]  # 1.5, 1.5, 2.0
        assert window_quotas(4, [8, 8, 8], [0, 0, 3]) == [1, 0, 3]  # the last window's floor leaves one for the others

    def test_quotas_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"^n=9 must lie between the 0 protected and the 8 stored tokens"):
            window_quotas(9, [4, 4])
        with pytest.raises(ValueError, match=r"^n=3 must lie between the 4 protected and the 8 stored tokens"):
            window_quotas(3, [4, 4], [2, 2])

    def test_selection_worked_by_hand(self):
        scores = row(9.0, 8.0, 7.0, 6.0, 1.0, 4.0, 2.0, 3.0)
        assert select(scores, 4).tolist() == [[[0, 1, 2, 3]]]
        assert select_per_window(scores, 4, [0, 4, 8]).tolist() == [[[0, 1, 5, 7]]]
        assert select_per_window(scores, 3, [0, 4, 8]).tolist() == [[[0, 1, 5]]]
        assert select_per_window(scores, 8, [0, 4, 8]).tolist() == [[list(range(8))]]

    def test_protected_tokens_stay_beyond_their_windows_share(self):
        scores = row(9.0, 8.0, 7.0, 6.0, 5.0, INF, INF, INF)
        assert select_per_window(scores, 4, [0, 4, 8]).tolist() == [[[0, 5, 6, 7]]]

    def test_each_head_has_protected_tokens_of_its_own(self):
        scores = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(0))
        scores[0, 1, :3] = INF
        scores[1, 0, 8:] = INF
        together = select_per_window(scores, 5, [0, 4, 8, 12])
        for b in range(2):
            for h in range(2):
                alone = select_per_window(scores[b : b + 1, h : h + 1], 5, [0, 4, 8, 12])
                assert together[b, h].tolist() == alone[0, 0].tolist()
        assert together[0, 1, :3].tolist() == [0, 1, 2]
        assert together[1, 0, -4:].tolist() == [8, 9, 10, 11]

    @given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 60))
    def test_counts_of_each_window(self, n, window, length):
        from manifoldkv.windows import tumbling_bounds

        scores = torch.randn(2, 2, length, generator=torch.Generator().manual_seed(length))
        bounds = tumbling_bounds(length, window)
        chosen = select_per_window(scores, n, bounds)
        assert chosen.shape[-1] == min(n, length)
        assert bool((chosen.diff(dim=-1) > 0).all())  # ascending, none twice
        quotas = window_quotas(min(n, length), [b - a for a, b in pairwise(bounds)])
        for a, b, quota in zip(bounds[:-1], bounds[1:], quotas, strict=True):
            assert ((chosen >= a) & (chosen < b)).sum(-1).unique().tolist() == [quota]


class TestAdaptive:
    def test_worked_by_hand(self):
        # z-scores: head 0 (mean 2, sd 2): -1, 0... ; head 1 is flat apart from one peak
        scores = torch.tensor([[[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 1.0, 5.0]]])
        # head 0: -1, -1, 1, 1; head 1 (mean 2, sd sqrt 3): -.577 x 3, 1.732. Best 4: 1.732, 1, 1, then the first -.577
        kept = select_adaptive(scores, 2)
        assert kept.tolist() == [[[False, False, True, True], [True, False, False, True]]]

    def test_every_head_keeps_its_floor(self):
        scores = torch.zeros(1, 2, 100)
        scores[0, 0] = torch.arange(100) % 2  # z: -1 and 1, half of them each
        scores[0, 1] = 1e-3 * torch.arange(100)
        scores[0, 1, 99] = 1e3  # one outlier: the z-scores of the rest are near 0 and lose to the 50 ones
        kept = select_adaptive(scores, 20)
        assert kept.sum().item() == 40
        assert kept[0, 1].sum().item() == 4  # ceil(0.2 * 20): the outlier and its best three others
        assert kept[0, 1].nonzero()[:, 0].tolist() == [96, 97, 98, 99]
        assert kept[0, 0].nonzero()[:, 0].tolist() == list(range(1, 72, 2))

    @given(st.integers(1, 4), st.integers(2, 30), st.data())
    def test_total_and_floor(self, heads, length, data):
        n = data.draw(st.integers(1, length))
        generator = torch.Generator().manual_seed(length)
        scale = torch.rand(1, heads, 1, generator=generator) * 10
        scores = torch.randn(2, heads, length, generator=generator) * scale
        kept = select_adaptive(scores, n)
        assert kept.sum((1, 2)).tolist() == [heads * n] * 2
        assert int(kept.sum(-1).min()) >= math.ceil(n / 5 - 1e-9)
        for b in range(2):
            for h in range(heads):  # within a head, always its best
                chosen = kept[b, h].nonzero()[:, 0].tolist()
                assert chosen == naive(scores[b, h].tolist(), len(chosen))

    def test_protected_first_and_padding_last(self):
        scores = torch.tensor([[[-INF, -INF, 1.0, 2.0, INF], [-INF, -INF, 5.0, 0.0, INF]]])
        kept = select_adaptive(scores, 3)
        assert kept.tolist() == [[[False, False, True, True, True], [False, False, True, True, True]]]
        assert select_adaptive(scores, 1).tolist() == [[[False] * 4 + [True]] * 2]

    def test_budget_at_or_above_the_length(self):
        assert bool(select_adaptive(torch.zeros(1, 2, 4), 4).all())

    def test_affine_changes_of_one_head_do_not_matter(self):
        scores = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(1))
        scaled = scores * torch.tensor([1.0, 7.0, 0.01])[:, None] + torch.tensor([0.0, -3.0, 50.0])[:, None]
        assert torch.equal(select_adaptive(scores, 12), select_adaptive(scaled.double(), 12))
