"""The bench: what its rows compute, their goals, and what it says of missing environments. Nothing is timed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

import pytest
import torch

pytest.importorskip("rich")

from icml26_shared import bench as shared
from icml26_shared.console import Context
from icml26_shared.errors import UserError
from manifoldkv import KVConfig, bench, score_keys, select
from manifoldkv.cli import app


def arguments(python):
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    return parser.parse_args(["--kvpress-python", python, "--vllm-python", python])


def declared_rows(patch, folder, python):
    """Every row as it is declared, none of them measured; and what was noted."""
    declared, notes = {}, []

    def row(self, name, measure, goal=(), peer=""):
        rules = [goal] if isinstance(goal, shared.Rule) else list(goal)
        declared[name] = measure, {rule.text for rule in rules}, peer

    patch.setattr(shared.Bench, "row", row)
    context = Context("manifoldkv", quiet=True, out=folder)
    patch.setattr(context, "note", notes.append)
    bench.run(context, arguments(python))
    return declared, notes


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        found = declared_rows(patch, tmp_path_factory.mktemp("bench"), "nothing/python")
    return found


class TestRows:
    def test_the_goals_are_those_that_were_set(self, rows):
        goals = {name: found for name, (_, found, _) in rows[0].items()}
        scoring = next(found for name, found in goals.items() if name.startswith("score, select and gather"))
        assert scoring == {"ratio ≥ 0.5", "MiB beyond the result ≤ 64"}
        assert goals["score and select as the context grows, l2, bfloat16"] == {"growth ≤ 5"}
        assert goals["l2 scores against cosine scores, float32"] == {"time ratio ≤ 1.1"}
        assert goals["prefill of 2,048 tokens inside compress()"] == {f"ratio ≥ {1 / 1.05:g}"}
        decoding = next(found for name, found in goals.items() if "256 new tokens" in name)
        assert decoding == {"ratio ≥ 1", "stored bytes / dense ≤ 0.3"}

    def test_against_kvpress_where_it_is_installed(self, rows):
        if importlib.util.find_spec("kvpress") is None:
            pytest.skip("kvpress is not installed here")
        peers = {name: (found, peer) for name, (_, found, peer) in rows[0].items() if "KeyDiffPress" in peer}
        assert len(peers) == 2
        for found, _ in peers.values():
            assert found == {"ratio ≥ 1", "torch_peak_mib ≤ 6.4"}  # a tenth of 64 MiB of keys

    def test_environments_that_are_not_there_are_left_out_with_a_note(self, rows):
        declared, notes = rows
        assert not [name for name in declared if "in kvpress" in name or name.startswith("vLLM")]
        assert [note for note in notes if "no nothing/python (make setup-kvpress makes it)" in note]
        assert [note for note in notes if "no nothing/python (make setup-vllm makes it)" in note]

    def test_environments_that_are_there_have_their_rows(self, monkeypatch, tmp_path):
        monkeypatch.setattr(bench, "_scoring_rows", lambda *_: None)
        called = []
        monkeypatch.setattr(bench, "_in", lambda *given: called.append(given) or shared.Measured())
        declared, _ = declared_rows(monkeypatch, tmp_path, sys.executable)
        apart = {name: measure for name, (measure, *_) in declared.items() if "in kvpress" in name or "vLLM" in name}
        assert len(apart) == 4
        for measure in apart.values():
            measure()
        assert called == [
            (sys.executable, "manifoldkv.bench_kvpress", ["l2", "KeyDiffPress"]),
            (sys.executable, "manifoldkv.bench_kvpress", ["cosine", "KeyDiffPress"]),
            (sys.executable, "manifoldkv.bench_kvpress", ["knorm", "KnormPress"]),
            (sys.executable, "manifoldkv.bench_vllm", []),
        ]


class TestWhatIsTimed:
    def test_keys_are_seeded_and_have_a_mean_of_their_own(self):
        keys = bench._keys(400, 64, "bfloat16", 3)
        assert keys.shape == (1, 8, 400, 64)
        assert keys.dtype == torch.bfloat16
        assert torch.equal(keys, bench._keys(400, 64, "bfloat16", 3))
        assert not torch.equal(keys, bench._keys(400, 64, "bfloat16", 4))
        assert keys.float().mean(2).norm(dim=-1).min() > 4  # far from 0: sqrt(64) on average

    @pytest.mark.parametrize("metric", ["l2", "cosine"])
    def test_ours_selects_by_the_metric(self, metric):
        keys = bench._keys(300, 32, "float32")
        own = bench._score_and_select(keys, metric)
        centred = keys - keys.mean(2, keepdim=True)
        unit = torch.nn.functional.normalize(keys, dim=-1)
        scores = centred.norm(dim=-1) if metric == "l2" else -(
            unit @ torch.nn.functional.normalize(unit.mean(2, keepdim=True), dim=-1).mT).squeeze(-1)  # fmt: skip
        assert torch.equal(own, scores.topk(150, dim=-1).indices.sort(-1).values)

    def test_the_peer_selects_as_many(self):
        pytest.importorskip("kvpress")
        keys = bench._keys(300, 32, "float32")
        theirs = bench._keydiff(keys).sort(-1).values
        assert torch.equal(theirs, bench._score_and_select(keys, "cosine"))

    def test_gathering(self):
        keys, values = bench._keys(300, 32, "bfloat16"), bench._keys(300, 32, "bfloat16", 1)
        kept = select(score_keys(keys, KVConfig(metric="l2", n_sink=0, n_recent=0)), 150)[..., None]
        kept = kept.expand(-1, -1, -1, 32)
        own = bench._score_select_gather(keys, values)
        assert torch.equal(own[0], keys.gather(2, kept))
        assert torch.equal(own[1], values.gather(2, kept))

    def test_the_cost_of_a_metric_is_ours_over_cosine(self, monkeypatch):
        monkeypatch.setattr(bench, "compare", lambda *sides, **_: shared.Comparison((2.0, 2.0), (1.0, 1.0)))
        assert bench.metric_cost(0, tokens=64) == 2.0
        monkeypatch.undo()
        assert 0 < bench.metric_cost(0, tokens=64) < float("inf")

    def test_a_model_row_measures_the_same_prompt_dense_and_compressed(self, tiny, monkeypatch):
        pytest.importorskip("transformers")
        model, ran = tiny("llama"), []
        monkeypatch.setattr(bench, "_ids", lambda length: torch.arange(40)[None] % 59 + 2)

        def once(own, peer, **options):
            ran.append((own(), peer(), options))
            return shared.Comparison((1.0,), (1.0,))

        monkeypatch.setattr(bench, "compare", once)
        assert bench._prefill(model).comparison.ratio == 1.0
        found = bench._decode(model)
        # budget 10 of 40 after the prompt; 256 new tokens later 10 + 0 ... 127 are stored of 295
        assert 10 / 295 <= found.extra["stored bytes / dense"] <= 138 / 295
        assert ran[-1][2]["pairs"] == 5


class TestElsewhere:
    def test_reads_the_measurement_of_another_process(self, tmp_path):
        wanted = shared.Measured(shared.Comparison((1.0, 2.0), (2.0, 2.0)), extra={"blocks": 3})
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\necho loading\necho '{json.dumps(wanted.to_json())}'\n")
        script.chmod(0o755)
        assert bench._in(str(script), "a.module", ["x"]).to_json() == wanted.to_json()

    def test_says_why_it_failed(self, tmp_path):
        script = tmp_path / "python"
        script.write_text("#!/bin/sh\necho first >&2\necho 'ValueError: no model' >&2\nexit 1\n")
        script.chmod(0o755)
        with pytest.raises(UserError, match=r"python -m a\.module failed: ValueError: no model$"):
            bench._in(str(script), "a.module", [])
        script.write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(UserError, match=r"failed: exit code 3$"):
            bench._in(str(script), "a.module", [])
        script.write_text("#!/bin/sh\necho nothing measured\n")
        with pytest.raises(UserError, match="printed no measurement"):
            bench._in(str(script), "a.module", [])


def test_the_command_prints_a_report(monkeypatch, capsys, tmp_path):
    """Through the command line, with one row in place of the long ones."""

    def scoring(own, ctx):
        own.row("a row", lambda: {"time ratio": 1.05}, goal=shared.Rule("time ratio", "<=", 1.1), peer="cosine scores")

    monkeypatch.setattr(bench, "_scoring_rows", scoring)
    monkeypatch.setattr(bench, "_model_rows", lambda *_: None)
    command = ["bench", "--kvpress-python", "none", "--vllm-python", "none", "--out", str(tmp_path), "--json"]
    assert app.run(command) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)["rows"]
    assert row["name"] == "a row"
    assert row["met"] is True
    assert row["figures"] == {"time ratio": 1.05}
    assert "rows with vLLM left out" in said.err
