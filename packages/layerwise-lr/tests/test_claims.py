"""Claims, demo and bench: what they are made of, on tiny settings."""

import math

import numpy as np
import pytest
import torch

from icml26_shared.claims import Claim, Rule, run
from icml26_shared.console import Context
from layerwise_lr import bench, claims, claims_runs, fit_tail
from layerwise_lr.eval import stdlib_lm
from layerwise_lr.eval.stdlib_lm import Run


def test_every_row_of_the_specification_is_a_claim():
    assert {claim.id for claim in claims.CLAIMS} == {
        "assignment", "uniform-at-larger-rates", "inverse", "muon", "tuned", "faster", "transfer", "alpha",
        "at-scale-60m", "at-scale-1b",
    }  # fmt: skip
    assert all(claim.rules for claim in claims.CLAIMS)
    seeds = {claim.id: claim.seeds for claim in claims.CLAIMS}
    assert (seeds["assignment"], seeds["tuned"]) == (10, 5)
    assert claims.LONG >= 1500
    assert len(claims.RATES) >= 5


def fake(factor_of):
    """Results that a formula gives."""

    def result(ctx, run, seed):
        loss = 2.0 + factor_of(run) + 0.001 * seed
        curve = [[step, loss + 1 - step / run.steps] for step in range(100, run.steps + 1, 100)]
        return {"loss": loss, "curve": curve, "mean_ratio": 2.0}

    return result


def test_checks_decide_by_the_figures(tmp_path, monkeypatch):
    worth = {"llr": 0.0, "uniform": 0.15, "permuted": 0.02, "mean": 0.03, "inverse": 0.2}
    monkeypatch.setattr(claims, "result", fake(lambda run: worth[run.method] + abs(math.log2(run.lr / 4e-3)) / 50))
    monkeypatch.setattr(
        claims, "losses", lambda ctx, run: [claims.result(ctx, run, seed)["loss"] for seed in ctx.seeds]
    )
    chosen = [claim.id for claim in claims.CLAIMS if claim.check is not None and claim.id != "alpha"]
    report = run(claims.CLAIMS, Context(quiet=True, out=tmp_path, distribution="layerwise-lr"), only=chosen)
    assert {verdict.claim.id: verdict.kind for verdict in report.verdicts} == dict.fromkeys(chosen, "holds")
    worth.update(llr=0.04, permuted=0.04, uniform=0.045, inverse=0.0)
    (tmp_path / "other").mkdir()
    report = run(claims.CLAIMS, Context(quiet=True, out=tmp_path / "other", distribution="layerwise-lr"), only=chosen)
    kinds = {verdict.claim.id: verdict.kind for verdict in report.verdicts}
    assert kinds["assignment"] == kinds["inverse"] == kinds["tuned"] == kinds["faster"] == "fails"
    assert kinds["transfer"] == "holds"


def test_runs_are_kept_one_by_one_for_all_claims(tmp_path, monkeypatch):
    calls = []

    def train(run, seed, text, on_step=None):
        calls.append((run.method, seed))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"loss": math.nan if seed else 2.5, "curve": []}

    monkeypatch.setattr(claims_runs, "train", train)
    context = Context(quiet=True, out=tmp_path, distribution="layerwise-lr")

    def check(ctx):
        return {"loss": claims_runs.losses(ctx, Run("llr"))}

    both = [Claim(name, "s", "s", check, Rule("loss", "<", 3), seeds=2) for name in ("a", "b")]
    with pytest.raises(KeyboardInterrupt):
        run(both, context)
    report = run(both, context)
    assert calls == [("llr", 0), ("llr", 1), ("llr", 1)]
    assert [verdict.kind for verdict in report.verdicts] == ["fails", "fails"]  # a run diverged


def test_speed_up_by_hand():
    theirs = [[50, 3.0], [100, 2.0]]
    assert claims.speed_up([[25, 3.0], [50, 2.0], [100, 1.5]], theirs) == 2.0
    assert claims.speed_up([[50, 2.5], [100, 1.5]], theirs) == pytest.approx(100 / 75)
    assert claims.speed_up([[50, 3.5], [100, 2.5]], theirs) == pytest.approx(0.75)
    assert math.isnan(claims.speed_up([[50, 3.0], [100, None]], theirs))
    assert math.isnan(claims.speed_up(theirs, [[100, None]]))


def test_the_loop_of_the_bench_is_the_same_fit():
    eigs = np.sort(np.random.default_rng(0).pareto(1.5, 200) + 1)
    fit = fit_tail(eigs, "gof")
    assert bench.gof_by_loop(eigs) == pytest.approx((fit.alpha, fit.D))


def test_demo_on_a_tiny_model(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import argparse

    from layerwise_lr import demo

    tokens = np.random.default_rng(0).integers(0, 128, 5000).astype(np.uint8)
    text = stdlib_lm.Text(torch.from_numpy(tokens[:4000]), torch.from_numpy(tokens[4000:]), "test", "test")
    monkeypatch.setattr(demo, "load_text", lambda path: text)
    monkeypatch.setattr(demo, "STEPS", 6)
    found = demo.run(Context(quiet=True, out=tmp_path), argparse.Namespace(text=None))
    assert set(found["results"]) == {"one rate", "LLR, 1 to 3", "one rate, LLR's mean"}
    assert f"{found['results']['LLR, 1 to 3']['loss']:.4f}" in found["conclusion"]
    assert (tmp_path / "loss.png").stat().st_size > 5000
    assert (tmp_path / "ratios.png").stat().st_size > 5000
