"""Scores of cached keys: golden values, a naive float64 definition, invariances, protection, faulty keys."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv import KVConfig, score_keys, select
from manifoldkv.rope import Rotary
from manifoldkv.scoring import NonFiniteKeysError

INF = math.inf
POINTS = torch.tensor([(3.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (-1.0, 0.5)])[None, None]
METRICS = ("l2", "cosine", "cosine_mean", "knorm", "decomposed")


def paper(metric: str, **settings) -> KVConfig:
    """The rule of the paper: nothing protected."""
    return KVConfig(**{"metric": metric, "n_sink": 0, "n_recent": 0, "budget": 1} | settings)


def random_keys(*shape: int, seed: int = 0, **kwargs) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(**kwargs)


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(a: list[float]) -> list[float]:
    norm = math.sqrt(dot(a, a))
    return [x / norm for x in a]


def mean(rows: list[list[float]]) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def naive_head(keys: list[list[float]], counted: list[list[float]], cfg: KVConfig) -> list[float]:
    """The formulas in plain Python: scores of ``keys`` against the centroid of ``counted``."""
    centre = mean([unit(k) for k in counted]) if cfg.metric == "cosine" else mean(counted)
    m = math.sqrt(dot(centre, centre))
    rho_mean = math.fsum(math.sqrt(dot(k, k)) for k in counted) / len(counted)
    scores = []
    for k in keys:
        rho = math.sqrt(dot(k, k))
        cosine = dot(k, centre) / (rho * m)
        away = [x - y for x, y in zip(k, centre, strict=True)]
        rho0 = m if cfg.rho0 == "centroid" else rho_mean
        rho_x = rho if cfg.rho_x == "self" else rho_mean
        scores.append(
            {
                "l2": math.sqrt(dot(away, away)),
                "cosine": -cosine,
                "cosine_mean": -cosine,
                "knorm": -rho,
                "decomposed": cfg.lambda_rad * (rho - rho0) ** 2 + cfg.lambda_ang * 2 * rho_x * m * (1 - cosine),
            }[cfg.metric]
        )
    return scores


class TestGoldenValues:
    def test_centroid_and_l2(self):
        scores = score_keys(POINTS, paper("l2", budget=None, compression_ratio=0.4))
        torch.testing.assert_close(
            scores[0, 0], torch.tensor([2.193171, 1.004988, 0.1, 1.486607, 2.039608]), atol=1e-6, rtol=0
        )
        assert KVConfig(compression_ratio=0.4).keep_count(5) == 3
        assert select(scores, 3).tolist() == [[[0, 3, 4]]]

    def test_cosine(self):
        scores = score_keys(POINTS, paper("cosine"))
        torch.testing.assert_close(
            scores[0, 0], torch.tensor([-0.4691, -0.8832, -0.9562, -0.9562, 0.0246]), atol=5e-5, rtol=0
        )
        assert select(scores, 3).tolist() == [[[0, 1, 4]]]

    def test_knorm(self):
        scores = score_keys(POINTS, paper("knorm"))
        torch.testing.assert_close(scores[0, 0], -torch.tensor([3.0, 1.0, 2**0.5, 8**0.5, 1.25**0.5]))
        assert select(scores, 3).tolist() == [[[1, 2, 4]]]

    def test_two_regimes_and_windows(self):
        keys = torch.cat((POINTS, POINTS + torch.tensor([10.0, 0.0])), dim=2)
        expected = [3.1321, 6.0008, 5.0010, 4.1485, 7.0114, 7.0576, 4.0012, 5.0010, 6.1000, 3.0265]
        torch.testing.assert_close(score_keys(keys, paper("l2"))[0, 0], torch.tensor(expected), atol=5e-5, rtol=0)
        alone = score_keys(POINTS, paper("l2"))[0, 0]
        torch.testing.assert_close(score_keys(keys, paper("l2", window=5))[0, 0], alone.repeat(2), atol=2e-6, rtol=0)


class TestWorkedByHand:
    def test_cosine_mean(self):
        # mu = (1, .9), |mu| = sqrt(1.81): cosines 1, .9, 1.9/sqrt 2, 1.9/sqrt 2, -.55/sqrt 1.25, each over sqrt 1.81
        cosines = torch.tensor([1.0, 0.9, 1.9 / 2**0.5, 1.9 / 2**0.5, -0.55 / 1.25**0.5]) / 1.81**0.5
        torch.testing.assert_close(score_keys(POINTS, paper("cosine_mean"))[0, 0], -cosines)

    def test_decomposed_is_the_squared_distance(self):
        expected = torch.tensor([4.81, 1.01, 0.01, 2.21, 4.16])  # 2^2+.9^2, 1+.1^2, .1^2, 1+1.1^2, 2^2+.4^2
        torch.testing.assert_close(score_keys(POINTS, paper("decomposed"))[0, 0], expected, atol=2e-6, rtol=1e-6)

    def test_decomposed_parts(self):
        rho = torch.tensor([3.0, 1.0, 2**0.5, 8**0.5, 1.25**0.5])
        m = 1.81**0.5
        radial = score_keys(POINTS, paper("decomposed", lambda_ang=0.0))[0, 0]
        torch.testing.assert_close(radial, (rho - m).square())
        angular = score_keys(POINTS, paper("decomposed", lambda_rad=0.0, lambda_ang=0.5))[0, 0]
        cosines = torch.tensor([1.0, 0.9, 1.9 / 2**0.5, 1.9 / 2**0.5, -0.55 / 1.25**0.5]) / m
        torch.testing.assert_close(angular, rho * m * (1 - cosines), atol=1e-6, rtol=1e-5)

    def test_radius_calibrated(self):
        keys = torch.tensor([(2.0, 0.0), (0.0, 4.0)])[None, None]  # mu = (1, 2), m = sqrt 5, mean norm 3
        scores = score_keys(keys, paper("decomposed", rho0="mean", rho_x="mean"))[0, 0]
        m = 5**0.5  # cosines 1/sqrt 5 and 2/sqrt 5: s = (rho - 3)^2 + 6 m (1 - cos) = 1 + 6 m - 6, 1 + 6 m - 12
        torch.testing.assert_close(scores, torch.tensor([6 * m - 5, 6 * m - 11]))

    def test_short_last_windows(self):
        # window 4 over 9 keys: the ninth is fewer than 2 and joins the second window; over 10 keys two are a window
        line = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 10.0, 10.0, 10.0, 15.0])[None, None, :, None]
        nine = score_keys(line, paper("l2", window=4))[0, 0]
        torch.testing.assert_close(nine, torch.tensor([1.5, 0.5, 0.5, 1.5, 1.0, 1.0, 1.0, 1.0, 4.0]))
        ten = score_keys(torch.cat((line, line[:, :, -1:] + 2), dim=2), paper("l2", window=4))[0, 0]
        torch.testing.assert_close(ten, torch.tensor([1.5, 0.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]))

    def test_streaming_keeps_the_latest(self):
        cfg = KVConfig(metric="streaming", budget=6, n_sink=2, n_recent=1)
        assert select(score_keys(random_keys(2, 3, 20, 4), cfg), 6)[1, 2].tolist() == [0, 1, 16, 17, 18, 19]

    def test_evictable_centroid(self):
        line = torch.tensor([100.0, 1.0, 3.0, 8.0, -50.0])[None, None, :, None]
        cfg = KVConfig(metric="l2", budget=3, n_sink=1, n_recent=1, centroid="evictable")
        assert score_keys(line, cfg)[0, 0].tolist() == [INF, 3.0, 1.0, 4.0, INF]  # mean of 1, 3, 8 is 4
        everything = score_keys(line, replace(cfg, centroid="all"))[0, 0]
        torch.testing.assert_close(everything[1:4], (line[0, 0, 1:4, 0] - 12.4).abs())

    def test_evictable_centroid_where_all_is_protected(self):
        cfg = KVConfig(metric="cosine", budget=8, n_sink=1, n_recent=6, centroid="evictable", window=4)
        scores = score_keys(random_keys(1, 2, 12, 8), cfg)  # the last window of 4 holds protected tokens only
        assert scores.isinf().sum(-1).tolist() == [[7, 7]]
        assert bool((scores > -INF).all())

    def test_large_offset_keeps_the_ranking(self):
        """``|mu|`` is a thousand times the spread: the expanded form of the square would lose the ranking."""
        spread = random_keys(1, 2, 300, 64, seed=3)
        keys = (spread + 1000.0).float()
        exact = (keys.double() - keys.double().mean(2, keepdim=True)).norm(dim=-1)
        scores = score_keys(keys, paper("l2"))
        torch.testing.assert_close(scores.double(), exact, rtol=2e-4, atol=0)
        assert torch.equal(select(scores, 75), select(exact, 75))


@pytest.mark.parametrize("window", [None, 5, 8])
@pytest.mark.parametrize("metric", METRICS)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 23), padding=st.integers(0, 6))
def test_equals_the_definition(metric, window, seed, length, padding):
    if metric == "knorm":
        window = None
    cfg = paper(metric, window=window)
    keys = random_keys(2, 2, padding + length, 3, seed=seed)
    mask = torch.ones(2, padding + length, dtype=torch.bool)
    mask[0, :padding] = False
    scores = score_keys(keys.float(), cfg, mask)
    assert scores.dtype == torch.float32
    for b, pads in enumerate((padding, 0)):
        for h in range(2):
            own = keys[b, h, pads:].float().tolist()
            edges = [0, len(own)]
            if window is not None:
                edges = list(range(0, len(own), window)) or [0]
                if len(edges) > 1 and 2 * (len(own) - edges[-1]) < window:
                    edges.pop()
                edges.append(len(own))
            expected = []
            for a, z in pairwise(edges):
                expected += naive_head(own[a:z], own[a:z], cfg)
            assert scores[b, h, :pads].tolist() == [-INF] * pads
            torch.testing.assert_close(
                scores[b, h, pads:].double(), torch.tensor(expected).double(), atol=5e-6, rtol=1e-4
            )


@pytest.mark.parametrize("metric", ["l2", "cosine", "cosine_mean"])
@given(seed=st.integers(0, 10_000), length=st.integers(1, 30), window=st.integers(2, 12))
def test_sliding_windows_equal_a_naive_loop(metric, seed, length, window):
    cfg = paper(metric, window=window, kind="sliding")
    keys = random_keys(1, 1, length, 3, seed=seed)
    own = keys[0, 0].float().tolist()
    expected = []
    for i in range(length):
        stop = min(max(i + 1, window), length)  # the first `window` keys share the first full window
        counted = own[max(stop - window, 0) : stop]
        expected += naive_head(own[i : i + 1], counted, cfg)
    torch.testing.assert_close(
        score_keys(keys.float(), cfg)[0, 0].double(), torch.tensor(expected).double(), atol=5e-6, rtol=1e-4
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"rho0": "mean"},
        {"rho_x": "mean"},
        {"rho0": "mean", "rho_x": "mean"},
        {"lambda_rad": 0.3, "lambda_ang": 2.0, "rho0": "mean", "window": 6},
    ],
)
def test_decomposed_options_equal_the_definition(settings):
    cfg = paper("decomposed", **settings)
    keys = random_keys(1, 1, 12, 4, seed=5)
    own = keys[0, 0].tolist()
    expected = naive_head(own, own, cfg)
    if "window" in settings:
        expected = naive_head(own[:6], own[:6], cfg) + naive_head(own[6:], own[6:], cfg)
    torch.testing.assert_close(
        score_keys(keys.float(), cfg)[0, 0].double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-4
    )


class TestEquivalences:
    @given(st.integers(0, 10_000), st.integers(2, 40))
    def test_l2_of_unit_keys_ranks_as_cosine(self, seed, length):
        keys = torch.nn.functional.normalize(random_keys(1, 2, length, 5, seed=seed), dim=-1)
        n = max(length // 2, 1)
        l2, cosine = (score_keys(keys, paper(metric)) for metric in ("l2", "cosine"))
        assert_same_ranking(l2, cosine, n)

    @given(st.integers(0, 10_000), st.integers(2, 40), st.floats(0.1, 50))
    def test_constant_norms_rank_as_cosine_mean(self, seed, length, norm):
        keys = norm * torch.nn.functional.normalize(random_keys(1, 2, length, 5, seed=seed), dim=-1)
        l2, cosine = (score_keys(keys.float(), paper(metric)) for metric in ("l2", "cosine_mean"))
        assert_same_ranking(l2 / norm, cosine, max(length // 2, 1))

    @given(st.integers(0, 10_000))
    def test_l2_is_invariant_to_rotation_and_translation(self, seed):
        keys = random_keys(1, 2, 30, 6, seed=seed)
        rotation = torch.linalg.qr(random_keys(6, 6, seed=seed + 1))[0]
        moved = keys @ rotation + 3 * random_keys(6, seed=seed + 2)
        for window in (None, 7):
            a, b = (score_keys(k.float(), paper("l2", window=window)) for k in (keys, moved))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    @given(st.integers(0, 10_000))
    def test_cosine_is_invariant_to_scaling_of_each_key(self, seed):
        keys = random_keys(1, 2, 30, 6, seed=seed)
        scales = torch.rand(1, 2, 30, 1, generator=torch.Generator().manual_seed(seed)) * 20 + 0.05
        a, b = (score_keys(k.float(), paper("cosine")) for k in (keys, keys * scales))
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)

    @given(st.integers(0, 10_000), st.integers(1, 40))
    def test_decomposed_default_is_l2_squared(self, seed, length):
        keys = random_keys(1, 2, length, 16, seed=seed).float()
        for window in (None, 8):
            squared = score_keys(keys, paper("l2", window=window)).square()
            torch.testing.assert_close(
                score_keys(keys, paper("decomposed", window=window)), squared, atol=1e-5, rtol=1e-5
            )

    @pytest.mark.parametrize("metric", METRICS)
    @given(seed=st.integers(0, 10_000))
    def test_permuting_the_tokens_permutes_the_scores(self, metric, seed):
        keys = random_keys(1, 2, 25, 4, seed=seed).float()
        order = torch.randperm(25, generator=torch.Generator().manual_seed(seed))
        scores = score_keys(keys, paper(metric))
        torch.testing.assert_close(
            score_keys(keys[:, :, order], paper(metric)), scores[..., order], atol=2e-6, rtol=1e-5
        )

    @pytest.mark.parametrize("kind", ["tumbling", "sliding"])
    @pytest.mark.parametrize("metric", ["l2", "cosine", "cosine_mean"])
    @given(length=st.integers(1, 12), slack=st.integers(0, 5))
    def test_a_context_within_the_window_is_bit_identical_to_global(self, metric, kind, length, slack):
        keys = random_keys(2, 2, length, 8, seed=length).float()
        window = max(length + slack, 2)
        assert torch.equal(score_keys(keys, paper(metric, window=window, kind=kind)), score_keys(keys, paper(metric)))

    @pytest.mark.parametrize("settings", [{}, {"window": 6}, {"window": 6, "kind": "sliding"}])
    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    @given(seed=st.integers(0, 1000), padding=st.integers(1, 9))
    def test_padding_changes_nothing(self, metric, settings, seed, padding):
        if settings and metric not in ("l2", "cosine", "cosine_mean"):
            settings = {}
        cfg = KVConfig(metric=metric, budget=7, n_sink=2, n_recent=3, **settings)
        keys = random_keys(1, 2, 20, 4, seed=seed).float()
        garbage = random_keys(1, 2, padding, 4, seed=seed + 1).float() * 100
        mask = torch.arange(padding + 20)[None] >= padding
        padded = score_keys(torch.cat((garbage, keys), dim=2), cfg, mask)
        alone = score_keys(keys, cfg)
        torch.testing.assert_close(padded[..., padding:], alone, atol=2e-6, rtol=1e-5)
        assert bool((padded[..., :padding] == -INF).all())

    def test_padding_may_hold_nan(self):
        keys = random_keys(1, 2, 20, 4).float()
        keys[:, :, :5] = math.nan
        mask = torch.arange(20)[None] >= 5
        for metric in METRICS:
            scores = score_keys(keys, paper(metric), mask)
            torch.testing.assert_close(scores[..., 5:], score_keys(keys[:, :, 5:], paper(metric)))
            assert bool((scores[..., :5] == -INF).all())

    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    def test_rows_and_heads_do_not_mix(self, metric):
        keys = random_keys(3, 2, 15, 4).float()
        together = score_keys(keys, paper(metric))
        for b in range(3):
            torch.testing.assert_close(together[b : b + 1], score_keys(keys[b : b + 1], paper(metric)))
        if metric != "random":  # each head draws on its own
            torch.testing.assert_close(together[:, 1:], score_keys(keys[:, 1:], paper(metric)))


def assert_same_ranking(a: Tensor, b: Tensor, n: int) -> None:
    """The same ``n`` best, but for scores so close that float32 can't tell them apart."""
    x, y = select(a, n), select(b, n)
    for h in range(a.shape[1]):
        swapped = set(x[0, h].tolist()) ^ set(y[0, h].tolist())
        if swapped:
            values = a[0, h, list(swapped)]
            assert float(values.max() - values.min()) < 1e-5 * (1 + float(values.abs().max()))


class TestProtection:
    def test_counts_and_places(self):
        cfg = KVConfig(metric="l2", budget=10, n_sink=2, n_recent=3)
        scores = score_keys(random_keys(1, 1, 20, 4), cfg)
        assert (scores[0, 0] == INF).nonzero()[:, 0].tolist() == [0, 1, 17, 18, 19]

    @pytest.mark.parametrize(
        ("budget", "protected"),
        [(5, [0, 1, 17, 18, 19]), (4, [0, 17, 18, 19]), (3, [17, 18, 19]), (2, [18, 19]), (1, [19])],
    )
    def test_recent_first_then_the_earliest_sinks(self, budget, protected):
        cfg = KVConfig(metric="l2", budget=budget, n_sink=2, n_recent=3)
        scores = score_keys(random_keys(1, 1, 20, 4), cfg)
        assert (scores[0, 0] == INF).nonzero()[:, 0].tolist() == protected
        assert set(protected) == set(select(scores, budget)[0, 0].tolist()) or budget == 5

    def test_follows_n_rather_than_the_settings_where_given(self):
        cfg = KVConfig(metric="l2", compression_ratio=0.5, n_sink=2, n_recent=3)
        assert (score_keys(random_keys(1, 1, 20, 4), cfg, n=4)[0, 0] == INF).nonzero()[:, 0].tolist() == [0, 17, 18, 19]

    def test_sinks_are_valid_tokens(self):
        cfg = KVConfig(metric="l2", budget=8, n_sink=2, n_recent=1)
        mask = torch.arange(20)[None] >= 6
        scores = score_keys(random_keys(1, 1, 20, 4), cfg, mask)[0, 0]
        assert (scores == INF).nonzero()[:, 0].tolist() == [6, 7, 19]

    def test_sinks_are_found_by_position_after_evictions(self):
        cfg = KVConfig(metric="l2", budget=4, n_sink=2, n_recent=1)
        positions = torch.tensor([[[1, 5, 6, 7, 8], [0, 1, 6, 7, 8]]])  # head 0 has lost its first sink
        scores = score_keys(random_keys(1, 2, 5, 4), cfg, positions=positions)
        assert (scores == INF).tolist() == [[[True, False, False, False, True], [True, True, False, False, True]]]

    def test_everything_protected(self):
        cfg = KVConfig(metric="cosine", budget=9, n_sink=4, n_recent=32)
        assert score_keys(random_keys(1, 1, 9, 4), cfg).tolist() == [[[INF] * 9]]


class TestFaultyKeys:
    @pytest.mark.parametrize("bad", [math.nan, INF, -INF])
    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    def test_a_bad_position_goes_first_and_spoils_nothing_else(self, metric, bad):
        keys = random_keys(1, 2, 12, 4).float()
        good = score_keys(keys[:, :, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]], paper(metric))
        keys[0, 1, 5, 2] = bad
        scores = score_keys(keys, paper(metric))
        assert scores[0, 1, 5] == -INF
        assert bool(scores.isfinite()[0, 0].all())
        if metric not in ("random", "streaming"):  # those go by place
            torch.testing.assert_close(
                scores[0, 1, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]], good[0, 1], atol=1e-6, rtol=1e-5
            )
        assert 5 not in select(scores, 11)[0, 1].tolist()

    @pytest.mark.parametrize("kind", ["tumbling", "sliding"])
    def test_in_a_window(self, kind):
        keys = random_keys(1, 1, 12, 4).float()
        keys[0, 0, 5] = math.nan
        scores = score_keys(keys, paper("l2", window=4, kind=kind))
        assert (scores == -INF).nonzero()[:, -1].tolist() == [5]
        assert bool(scores[..., [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]].isfinite().all())

    def test_protection_does_not_save_it(self):
        keys = random_keys(1, 1, 12, 4)
        keys[0, 0, [0, 11]] = math.nan
        scores = score_keys(keys, KVConfig(metric="l2", budget=6, n_sink=2, n_recent=2))[0, 0]
        assert scores[[0, 1, 10, 11]].tolist() == [-INF, INF, INF, -INF]

    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    def test_a_head_without_one_finite_key(self, metric):
        keys = random_keys(2, 3, 12, 4)
        keys[1, 2] = math.nan
        with pytest.raises(
            NonFiniteKeysError, match=r"^layer 7, key-value head 2: every key is NaN, infinite or too large"
        ) as caught:
            score_keys(keys, paper(metric), layer=7)
        assert isinstance(caught.value, FloatingPointError)
        assert (caught.value.layer, caught.value.head) == caught.value.args == (7, 2)

    def test_only_the_valid_keys_count_for_that(self):
        keys = random_keys(1, 2, 6, 4)
        keys[0, 1, 2:] = math.nan
        with pytest.raises(FloatingPointError, match="head 1"):
            score_keys(keys, paper("l2"), torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.bool))
        assert score_keys(keys, paper("l2"), torch.tensor([[1, 0, 1, 1, 1, 1]], dtype=torch.bool))[0, 1, 0] == 0

    @pytest.mark.parametrize("metric", ["cosine", "cosine_mean", "knorm"])
    def test_a_finite_key_too_large_for_float32_squares(self, metric):
        keys = random_keys(1, 1, 6, 4).float()
        keys[0, 0, 2] = 3e30
        scores = score_keys(keys, paper(metric))
        assert not bool(scores.isnan().any())
        assert bool((scores < INF).all())

    @pytest.mark.parametrize("metric", ["l2", "decomposed"])
    def test_a_centroid_beyond_float32(self, metric):
        keys = random_keys(1, 1, 6, 4).float()
        keys[0, 0, 2] = 3e30
        with pytest.raises(FloatingPointError, match="head 0: every key is NaN, infinite or too large for float32"):
            score_keys(keys, paper(metric))


class TestShapesAndLayouts:
    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming", "auto"])
    def test_no_tokens(self, metric):
        scores = score_keys(torch.zeros(2, 3, 0, 4), KVConfig(metric=metric, budget=4))
        assert scores.shape == (2, 3, 0)
        assert scores.dtype == torch.float32

    @pytest.mark.parametrize("metric", ["l2", "cosine", "cosine_mean", "decomposed"])
    def test_equal_keys_keep_the_first(self, metric):
        keys = torch.tensor([0.1, -0.7, 0.3]).expand(1, 2, 50, 3)
        scores = score_keys(keys, paper(metric))
        if metric in ("l2", "decomposed"):
            torch.testing.assert_close(scores, torch.zeros_like(scores), atol=1e-6, rtol=0)
        assert select(scores, 7).tolist() == [[list(range(7))] * 2]

    def test_zero_keys(self):
        for metric in METRICS:
            scores = score_keys(torch.zeros(1, 1, 8, 4), paper(metric))
            assert scores.tolist() == [[[0.0] * 8]]

    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    @pytest.mark.parametrize("window", [None, 4])
    def test_a_row_without_valid_tokens_stays_empty(self, metric, window):
        if metric not in ("l2", "cosine", "cosine_mean", "decomposed"):
            window = None
        mask = torch.tensor([[False] * 9, [True] * 9])
        scores = score_keys(random_keys(2, 2, 9, 4), KVConfig(metric=metric, budget=5, window=window), mask)
        assert bool((scores[0] == -INF).all())
        assert bool((scores[1] > -INF).all())
        assert select(scores, 5)[0, 0].tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("metric", [*METRICS, "random", "streaming"])
    def test_any_strides(self, metric):
        keys = random_keys(2, 3, 33, 8).float()
        expected = score_keys(keys, paper(metric))
        by_token = keys.transpose(1, 2).contiguous().transpose(1, 2)
        padded = torch.nn.functional.pad(keys, (3, 5))[..., 3:11]
        sparse = keys.repeat_interleave(2, dim=2)[:, :, ::2]
        for other in (by_token, padded, sparse):
            assert not other.is_contiguous()
            torch.testing.assert_close(score_keys(other, paper(metric)), expected, atol=1e-6, rtol=1e-6)
        shared = keys[:1, :1].expand(2, 3, -1, -1)
        assert shared.stride()[:2] == (0, 0)
        torch.testing.assert_close(score_keys(shared, paper(metric)), score_keys(shared.contiguous(), paper(metric)))
        one_row = keys[1:2]
        torch.testing.assert_close(score_keys(one_row, paper(metric)), expected[1:2], atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("metric", METRICS)
    def test_scores_are_float32_of_the_values_stored(self, metric, dtype):
        keys = random_keys(1, 2, 40, 16).to(dtype)
        scores = score_keys(keys, paper(metric))
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, score_keys(keys.float(), paper(metric)), atol=1e-5, rtol=1e-5)

    def test_keys_are_left_alone(self):
        keys = random_keys(1, 2, 40, 16).float()
        before = keys.clone()
        for metric in METRICS:
            score_keys(keys, KVConfig(metric=metric, budget=5))
        assert torch.equal(keys, before)

    def test_no_gradient(self):
        keys = random_keys(1, 1, 8, 4).float().requires_grad_()
        assert not score_keys(keys, paper("l2")).requires_grad


class TestRandom:
    def test_seed_and_layer(self):
        keys = random_keys(2, 2, 50, 4)
        draws = score_keys(keys, paper("random", seed=1), layer=3)
        assert torch.equal(draws, score_keys(keys * 2, paper("random", seed=1), layer=3))
        assert not torch.equal(draws, score_keys(keys, paper("random", seed=2), layer=3))
        assert not torch.equal(draws, score_keys(keys, paper("random", seed=1), layer=4))
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[:, 0], draws[:, 1])

    def test_uniform(self):
        draws = score_keys(torch.zeros(1, 4, 5000, 1), paper("random"))
        assert float(draws.min()) >= 0
        assert float(draws.max()) < 1
        assert abs(float(draws.mean()) - 0.5) < 0.01  # 20,000 draws: five standard errors are 0.0102
        kept = select(draws, 1000).double().mean().item()
        assert abs(kept - 2500) < 5 * 5000 / 12**0.5 / 4000**0.5

    def test_a_token_keeps_its_draw_after_evictions(self):
        """So that what stays after many evictions is a uniform sample, not the tokens at lucky places."""
        before = score_keys(random_keys(1, 2, 50, 4), paper("random"))
        positions = torch.stack((torch.arange(10, 40), torch.arange(20, 50)))[None]
        after = score_keys(random_keys(1, 2, 30, 4), paper("random"), positions=positions)
        assert torch.equal(after, before.gather(-1, positions))


class TestAuto:
    def test_scores_with_the_metric_of_the_geometry(self):
        from manifoldkv.geometry import diagnose_keys

        background = torch.nn.functional.normalize(torch.ones(64) + 0.3 * random_keys(1, 2, 500, 64), dim=-1)
        radii = torch.cat((10 + 0.1 * random_keys(1, 2, 480, 1), 30 + random_keys(1, 2, 20, 1)), dim=2)
        for keys, metric in ((background * radii, "l2"), (background * (6 + 12 * torch.rand(1, 2, 500, 1)), None)):
            chosen = diagnose_keys([keys]).metric
            assert metric in (None, chosen)
            assert torch.equal(score_keys(keys, paper("auto")), score_keys(keys, paper(chosen)))


class TestPreRotation:
    def test_scores_of_the_unrotated_keys(self):
        rotary = Rotary(torch.tensor([1.0, 0.1]))
        plain = random_keys(1, 2, 9, 6).float()
        angle = torch.arange(9.0)[:, None] * rotary.inv_freq
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        turned = plain[..., :4] * cos + torch.cat((-plain[..., 2:4], plain[..., :2]), -1) * sin
        keys = torch.cat((turned, plain[..., 4:]), -1)
        for metric in METRICS:
            pre = score_keys(keys, paper(metric, space="pre"), rotary=rotary)
            torch.testing.assert_close(pre, score_keys(plain, paper(metric)), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(score_keys(keys, paper("l2")), score_keys(plain, paper("l2")), atol=1e-3)

    def test_positions_are_logical(self):
        rotary = Rotary(torch.tensor([1.0]))
        keys = random_keys(1, 1, 6, 2).float()
        mask = torch.arange(6)[None] >= 2
        by_mask = score_keys(keys, paper("l2", space="pre"), mask, rotary=rotary)
        given_positions = torch.tensor([[[0, 0, 0, 1, 2, 3]]])
        by_position = score_keys(keys, paper("l2", space="pre"), mask, rotary=rotary, positions=given_positions)
        assert torch.equal(by_mask, by_position)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool])
    def test_dtypes_that_have_no_geometry(self, dtype):
        with pytest.raises(
            TypeError, match=rf"^keys of dtype {dtype} can't be scored; dequantise to one of torch.float32"
        ):
            score_keys(torch.zeros(1, 1, 4, 2).to(dtype), paper("l2"))

    @pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 2, 4), (1, 1, 1, 2, 4)])
    def test_rank(self, shape):
        with pytest.raises(ValueError, match=r"^keys must be a tensor of shape \[batch, heads, tokens, dim\], not \("):
            score_keys(torch.zeros(shape), paper("l2"))

    def test_not_a_tensor(self):
        with pytest.raises(ValueError, match=r"^keys must be a tensor .* not list"):
            score_keys([[1.0]], paper("l2"))

    @pytest.mark.parametrize("cfg", [None, {"metric": "l2"}, "l2"])
    def test_not_a_config(self, cfg):
        with pytest.raises(TypeError, match=r"^cfg must be a KVConfig, not "):
            score_keys(POINTS, cfg)

    @pytest.mark.parametrize("shape", [(1, 4), (2, 5), (5,)])
    def test_mask_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=r"^mask has shape \(.*\), but the keys are of 1 rows and 5 tokens"):
            score_keys(POINTS, paper("l2"), torch.ones(shape, dtype=torch.bool))

    def test_pre_without_a_rotation(self):
        with pytest.raises(ValueError, match=r"^space='pre' needs the model's rotation"):
            score_keys(POINTS, paper("l2", space="pre"))

    def test_rotation_wider_than_the_keys(self):
        with pytest.raises(ValueError, match=r"^the rotation covers 4 dimensions, but the keys have 2"):
            score_keys(POINTS, paper("l2", space="pre"), rotary=Rotary(torch.ones(2)))

    def test_auto_on_too_few_tokens(self):
        with pytest.raises(ValueError, match=r"^5 tokens are too few to diagnose; give at least 12 valid ones a row"):
            score_keys(POINTS, paper("auto"))
