"""Claims and benches: what they are made of, on tiny settings."""

import dataclasses

import numpy as np
import pytest
import torch

from icml26_shared.bench import Bench
from icml26_shared.claims import Claim, ClaimContext, Rule, run
from icml26_shared.console import Context
from robuq.bench import GOALS, SHAPES, goal_for, make_layer
from robuq.claims import CLAIMS, check_size, check_speed
from robuq.claims_runs import CONFIGURATIONS
from robuq.eval import digits
from robuq.eval.tiny_dit import TinyDiT, add_noise, alphas_bar, sample
from robuq.frechet import Moments, frechet_distance


def test_every_row_of_the_specification_is_a_claim():
    ids = {claim.id for claim in CLAIMS}
    assert ids == {
        "normality", "robust-minilm", "robust-dit", "bottleneck", "branch", "hadamard", "uniform-quantiser", "ampn",
        "bits-by-type", "stable-a2", "checkpoint-size", "speed-theory", "speed-gpu", "fid",
    }  # fmt: skip
    assert all(claim.rules for claim in CLAIMS)


def test_sizes_and_counts_are_computed(tmp_path):
    rules = [Rule("ratio, r=0", ">=", 14.5), Rule("ratio, r=16", ">=", 12.0)]
    size = Claim("size", "s", "s", check_size, rules, seeds=1)
    speed = Claim("speed", "s", "s", check_speed, Rule("GFLOP-eq over published", ">=", 0.95), seeds=1)
    report = run([size, speed], Context(quiet=True, out=tmp_path, distribution="robuq"))
    assert [verdict.kind for verdict in report.verdicts] == ["holds", "holds"]


def test_tiny_run_is_the_protocol(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(digits, "BATCH", 8)
    monkeypatch.setattr(digits, "judge", lambda: digits.Judge().eval())  # untrained: its figures are not judged here
    fp = digits.train_fp(0, 3)
    settings = dataclasses.replace(CONFIGURATIONS["plan 2.0"], steps=3, warm=1)
    model, training = digits.train_quantised(fp, settings, 0)
    assert training.plan.avg <= 2
    assert np.isfinite(digits.validation_loss(model))
    again, _ = digits.train_quantised(fp, settings, 0)
    assert digits.validation_loss(again) == digits.validation_loss(model)
    found = digits.judge_samples(model, count=20, steps=2)
    assert 0 <= found["accuracy"] <= 1
    assert found["fd"] >= 0


def test_frechet_distance_by_hand():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4000, 3))
    assert frechet_distance(Moments.of(a), Moments.of(a)) == pytest.approx(0, abs=1e-8)
    assert frechet_distance(Moments.of(a), Moments.of(a + np.array([1.0, 2.0, 0.0]))) == pytest.approx(5, abs=1e-8)
    assert frechet_distance(Moments.of(a), Moments.of(3 * a)) == pytest.approx(
        4 * np.cov(a.T).trace() + 4 * (a.mean(0) ** 2).sum()
    )


def test_diffusion_by_hand():
    abar = alphas_bar()
    assert float(abar[0]) == pytest.approx(1 - 1e-4)
    assert float(abar[-1]) == pytest.approx(4.036e-5, rel=1e-2)
    x, noise = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 2.0)
    expected = abar[500].sqrt() + 2 * (1 - abar[500]).sqrt()
    assert torch.allclose(add_noise(x, torch.tensor([500]), noise), expected.expand(1, 1, 2, 2))
    torch.manual_seed(0)
    images = sample(TinyDiT(depth=1), torch.arange(4), steps=3)
    assert images.shape == (4, 1, 8, 8)
    assert float(images.abs().max()) <= 1


def test_bench_goals_follow_the_number_of_tokens(tmp_path):
    assert [goal_for(m) for m, _, _ in SHAPES] == [1 / 1.5, 1.0, 1.3, 1.5, 1.5]
    assert len(GOALS) == 4
    linear, packed = make_layer(64, 32, rank=2)
    x = torch.randn(3, 64)
    assert packed(x).shape == linear(x).shape
    bench = Bench(Context(quiet=True, out=tmp_path, distribution="robuq"))
    from robuq.bench import _allocation_row

    _allocation_row(bench)
    row = bench.report().rows[0]
    assert row.measured.figures()["seconds"] > 0
    assert row.goal_text == "seconds ≤ 1"


def test_claim_context_is_what_checks_take():
    assert {"cached", "track", "out_file", "progress"} <= set(dir(ClaimContext))
