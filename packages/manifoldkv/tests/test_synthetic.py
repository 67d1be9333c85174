"""Key geometries of known outcome: their construction as described, and what each metric recalls."""

from __future__ import annotations

import math

import pytest
import torch

from manifoldkv import KVConfig, score_keys, select, synthetic
from manifoldkv.geometry import diagnose_keys

KINDS = ["collision", "mirrored", "constant_norm", "aligned", "regimes"]


def recall(keys, needles, ratio, **settings):
    cfg = KVConfig(compression_ratio=ratio, n_sink=0, n_recent=0, **settings)
    return synthetic.recall(select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2])), needles)


def split(keys, needles):
    chosen = torch.zeros(keys.shape[2], dtype=torch.bool).index_fill(0, needles, True)
    return keys[0, 0][~chosen], keys[0, 0][chosen]


def cosines(a, b):
    return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1)


class TestConstruction:
    @pytest.mark.parametrize("kind", KINDS)
    def test_shapes_seeds_and_places(self, kind):
        make = getattr(synthetic, kind)
        keys, needles = make(3)
        total, wanted = (65536, 64) if kind == "regimes" else (2030, 30)
        assert keys.shape == (1, 1, total, 64)
        assert keys.dtype == torch.float32
        assert needles.shape == (wanted,)
        assert needles.dtype == torch.int64
        assert needles.tolist() == sorted(set(needles.tolist()))
        again, other = make(3), make(4)
        assert torch.equal(keys, again[0])
        assert torch.equal(needles, again[1])
        assert not torch.equal(needles, other[1])

    def test_collision_needles_share_the_directions_and_lead_in_radius(self):
        common, own = split(*synthetic.collision(0))
        radius = common.norm(dim=-1)
        assert radius.mean() == pytest.approx(10, abs=0.05)  # 4 standard errors of 2000 draws with deviation 0.5
        assert radius.std() == pytest.approx(0.5, abs=0.04)
        torch.testing.assert_close(own.norm(dim=-1), torch.full((30,), 16.0))
        axis = common.mean(0)
        away, near = cosines(common, axis), cosines(own, axis)
        assert near.mean() == pytest.approx(float(away.mean()), abs=4 * float(away.std()) / math.sqrt(30))

    def test_mirrored_needles_stand_apart_by_30_degrees(self):
        common, own = split(*synthetic.mirrored(0))
        radius = common.norm(dim=-1)
        assert radius.min() >= 5.99
        assert radius.max() <= 18.01
        assert radius.mean() == pytest.approx(12, abs=0.35)  # 4.5 standard errors of a uniform draw
        torch.testing.assert_close(own.norm(dim=-1), torch.full((30,), 10.0))
        degrees = torch.rad2deg(torch.arccos(cosines(own, torch.nn.functional.normalize(common, dim=-1).mean(0))))
        assert degrees.mean() == pytest.approx(30, abs=0.5)

    def test_constant_norm_is_constant_and_ranks_alike(self):
        keys, needles = synthetic.constant_norm(0)
        torch.testing.assert_close(keys.norm(dim=-1), torch.full((1, 1, 2030), 10.0))
        kept = {}
        for metric in ("l2", "cosine_mean"):
            cfg = KVConfig(metric=metric, compression_ratio=0.7, n_sink=0, n_recent=0)
            kept[metric] = select(score_keys(keys, cfg), 609)
        assert torch.equal(kept["l2"], kept["cosine_mean"])
        assert recall(keys, needles, 0.9, metric="l2") == 1.0

    def test_aligned_radius_and_angle_agree(self):
        keys, _ = synthetic.aligned(0)
        radius = keys[0, 0].norm(dim=-1)
        away = -cosines(keys[0, 0], torch.nn.functional.normalize(keys[0, 0], dim=-1).mean(0))
        assert torch.corrcoef(torch.stack((radius, away)))[0, 1] > 0.5

    def test_regimes_have_means_of_their_own_and_needles_at_distance_6(self):
        keys, needles = synthetic.regimes(1, count=3, length=500, needles=4)
        assert keys.shape == (1, 1, 1500, 64)
        for regime in range(3):
            own = keys[0, 0, 500 * regime : 500 * (regime + 1)]
            where = needles[(needles >= 500 * regime) & (needles < 500 * (regime + 1))] - 500 * regime
            assert len(where) == 4
            rest = torch.ones(500, dtype=torch.bool).index_fill(0, where, False)
            centre = own[rest].mean(0)
            assert centre.norm() == pytest.approx(20, abs=0.05)
            assert (own[rest] - centre).norm(dim=-1).mean() == pytest.approx(1, abs=0.05)
            assert (own[where] - centre).norm(dim=-1).mean() == pytest.approx(6, abs=0.1)


class TestRecall:
    def test_counts_the_share_of_needles_kept(self):
        assert synthetic.recall(torch.tensor([[[1, 2, 5]]]), torch.tensor([2, 5, 7, 9])) == 0.5

    @pytest.mark.parametrize("seed", range(3))
    def test_collisions_are_for_l2(self, seed):
        keys, needles = synthetic.collision(seed)
        assert recall(keys, needles, 0.9, metric="l2") >= 0.95
        assert recall(keys, needles, 0.9, metric="cosine") <= 0.3
        assert recall(keys, needles, 0.9, metric="knorm") <= 0.05
        assert diagnose_keys([keys]).metric == "l2"

    @pytest.mark.parametrize("seed", range(3))
    def test_mirrored_is_for_cosine(self, seed):
        keys, needles = synthetic.mirrored(seed)
        assert recall(keys, needles, 0.9, metric="cosine") >= 0.95
        assert recall(keys, needles, 0.9, metric="l2") <= 0.1
        assert diagnose_keys([keys]).metric == "cosine"

    def test_windows_restore_what_one_centroid_dilutes(self):
        keys, needles = synthetic.regimes(0, count=8, length=1024)
        windowed = recall(keys, needles, 0.75, metric="l2", window=1024)
        overall = recall(keys, needles, 0.75, metric="l2")
        assert windowed >= 0.95
        assert overall <= windowed - 0.15
