"""Claims: verdicts follow from the figures, the quick ones run for real, what cannot run here says what it needs."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from icml26_shared import claims as shared
from icml26_shared.checkpoint import JsonlStore
from icml26_shared.console import Context
from manifoldkv import claims, claims_vllm
from manifoldkv.claims import CLAIMS, MULTI, PROMPTS, SAMPLES, SINGLE
from manifoldkv.cli import app

SETTINGS = ["dense", *(f"{name}@{ratio}" for ratio in (0.2, 0.5) for name in ("auto", "l2", "cosine", "calibrated"))]


def judge(identity, out):
    """The verdict on one claim."""
    (verdict,) = shared.run(CLAIMS, Context("manifoldkv", quiet=True, out=out), only=[identity]).verdicts
    return verdict


def rows_of(**shares):
    """Answers of every sample: the share right of each ``setting`` or of ``setting_one`` / ``setting_three`` keys."""
    rows = []
    for task in (*SINGLE, *MULTI):
        kind = "three" if task in MULTI else "one"
        for length in PROMPTS:
            for setting in SETTINGS:
                name = setting.replace("@0.", "")
                right = round(SAMPLES * shares.get(f"{name}_{kind}", shares.get(name, 0.5)))
                rows += [
                    {"task": f"{task}@{length}", "index": i, "config": setting, "score": float(i < right)}
                    for i in range(SAMPLES)
                ]
    return rows


@pytest.fixture
def answers(monkeypatch):
    """``answers(**shares)``: the model's answers are these."""

    def give(**shares):
        rows = rows_of(**shares)
        chosen = lambda ctx, tasks, *_: [row for row in rows if row["task"].partition("@")[0] in tasks]  # noqa: E731
        monkeypatch.setattr(claims, "_answers", chosen)
        diagnosis = {"metric": "cosine", "reason": "made for this test"}
        monkeypatch.setattr(claims, "_diagnosis", lambda ctx: {"diagnosis": diagnosis})

    return give


class TestList:
    def test_every_row_of_the_table(self, capsys, tmp_path):
        assert app.run(["claims", "--list", "--json", "--out", str(tmp_path)]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [row["id"] for row in listed] == [claim.id for claim in CLAIMS]
        assert {row["id"] for row in listed} >= {
            *("guideline", "light-compression", "multi-key", "collisions", "mirrored", "dilution", "cost"),
            *("vllm-blocks", "ruler-64k", "ruler-16k", "longbench", "helmet-infinitebench"),
        }
        assert not list(tmp_path.iterdir())  # nothing was measured

    def test_rules_as_they_were_set(self):
        rules = {claim.id: claim.rule_text for claim in CLAIMS}
        assert rules["light-compression"] == (
            "auto, one key ≥ 0.95 × full, one key; auto, three keys ≥ 0.85 × full, three keys; auto ≥ cosine − 0.03"
        )
        assert rules["multi-key"] == "l2 − cosine ≥ 0.05"
        assert rules["collisions"] == "l2 ≥ 0.95; cosine ≤ 0.3; knorm ≤ 0.05"
        assert rules["mirrored"] == "cosine ≥ 0.95; l2 ≤ 0.1"
        assert rules["dilution"] == "windowed ≥ 0.95; global ≤ windowed − 0.15; cosine < global"
        assert rules["cost"] == "time of L2 / time of cosine ≤ 1.1"
        assert rules["guideline"] == ("models within 0.03 of the best ≥ 1; models that tell the metrics apart ≥ 3")

    def test_an_unknown_claim(self, capsys, tmp_path):
        assert app.run(["claims", "--only", "ruler", "--out", str(tmp_path)]) == 2
        assert "unknown claim 'ruler'; choose from guideline" in capsys.readouterr().err


class TestQuickOnes:
    def test_collisions_and_mirrored_run_for_real_and_are_remembered(self, capsys, tmp_path, monkeypatch):
        command = ["claims", "--only", "collisions", "--only", "mirrored", "--json", "--quiet", "--out", str(tmp_path)]
        assert app.run(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["summary"]["error"] == 0
        first = {claim["id"]: claim for claim in found["claims"]}
        assert list(first) == ["collisions", "mirrored"]
        for claim in first.values():
            assert claim["seeds"] == list(range(10))
            assert {"l2", "cosine", "knorm", "calibrated"} == set(claim["measurements"])
            for measurement in claim["measurements"].values():
                assert len(measurement["values"]) == 10
                assert measurement["interval"][0] <= measurement["mean"] <= measurement["interval"][1]
            assert claim["holds"] == all(rule["holds"] for rule in claim["rules"])
        own = {name: first["collisions"]["measurements"][name]["mean"] for name in ("l2", "cosine", "knorm")}
        assert first["collisions"]["holds"] == (own["l2"] >= 0.95 and own["cosine"] <= 0.3 and own["knorm"] <= 0.05)
        # again: the same figures, and nothing is measured
        monkeypatch.setattr("manifoldkv.synthetic.collision", lambda seed: pytest.fail("measured again"))
        assert app.run(command) == 0
        again = json.loads(capsys.readouterr().out)["claims"]
        for before, after in zip(first.values(), again, strict=True):
            assert after["measurements"] == before["measurements"]
            assert after["seconds"] is None

    def test_an_interrupted_claim_goes_on_with_the_next_seed(self, tmp_path, monkeypatch):
        from manifoldkv import synthetic

        make, seeds = synthetic.collision, []

        def broken(seed):
            seeds.append(seed)
            if seed == 4 and seeds.count(4) == 1:
                raise KeyboardInterrupt
            return make(seed)

        monkeypatch.setattr(synthetic, "collision", broken)
        with pytest.raises(KeyboardInterrupt):
            judge("collisions", tmp_path)
        verdict = judge("collisions", tmp_path)
        assert verdict.kind in ("holds", "fails")
        assert seeds == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]

    def test_other_keys_fail_the_claim(self, tmp_path, monkeypatch):
        """On the opposite geometry the same check says that it fails."""
        from manifoldkv import synthetic

        monkeypatch.setattr(synthetic, "collision", synthetic.mirrored)
        verdict = judge("collisions", tmp_path)
        assert verdict.verdict == "fails"
        assert verdict.result.measurements["l2"].mean <= 0.1

    def test_dilution_on_short_regimes(self, tmp_path, monkeypatch):
        """Windows of 4096 see four regimes of 1024 keys at once, so they can't restore: the rule notices."""
        from functools import partial

        from icml26_shared.claims import Measurement
        from manifoldkv import synthetic

        monkeypatch.setattr(synthetic, "regimes", partial(synthetic.regimes, count=8, length=1024))
        monkeypatch.setattr(claims, "_long_prompts", lambda ctx: {"SmolLM2": Measurement(0.5)})
        verdict = judge("dilution", tmp_path)
        assert verdict.verdict == "fails"
        assert set(verdict.result.measurements) == {"windowed", "global", "cosine", "SmolLM2"}
        assert len(verdict.result.measurements["windowed"].values) == 5

    @pytest.mark.parametrize(("ratios", "expected"), [([1.0, 1.05, 1.2], "holds"), ([1.0, 1.2, 1.2], "fails")])
    def test_cost(self, ratios, expected, tmp_path, monkeypatch):
        monkeypatch.setattr("manifoldkv.bench.metric_cost", lambda seed: ratios[seed])
        verdict = judge("cost", tmp_path)
        assert verdict.verdict == expected
        assert list(verdict.result.measurements["time of L2 / time of cosine"].values) == ratios


GOOD = {"dense": 1.0, "auto2": 0.95, "auto2_three": 0.85, "cosine2": 0.95, "cosine2_three": 0.85}


class TestAccuracyVerdicts:
    """From answers made by hand."""

    def test_light_compression_holds(self, answers, tmp_path):
        answers(**GOOD)
        verdict = judge("light-compression", tmp_path)
        assert verdict.verdict == "holds"
        measured = verdict.result.measurements
        assert measured["auto, one key"].mean == pytest.approx(0.95)
        assert measured["auto, three keys"].mean == pytest.approx(0.85)
        assert measured["auto"].mean == pytest.approx((2 * 0.95 + 0.85) / 3)
        assert len(measured["auto, one key"].values) == 2 * 2 * SAMPLES
        cells = verdict.result.details["cells"]
        assert cells["niah_3key@1024"]["auto@0.2"] == pytest.approx(0.85)

    @pytest.mark.parametrize("changed", [{"auto2": 0.925}, {"auto2_three": 0.825}, {"cosine2": 1.0}])
    def test_light_compression_fails(self, changed, answers, tmp_path):
        answers(**GOOD | changed)
        assert judge("light-compression", tmp_path).verdict == "fails"

    @pytest.mark.parametrize(
        ("l2", "cosine", "expected"), [(0.6, 0.55, "holds"), (0.575, 0.55, "fails"), (0, 0.7, "fails")]
    )
    def test_multi_key(self, l2, cosine, expected, answers, tmp_path):
        answers(l25=l2, cosine5=cosine, dense=0.9)
        verdict = judge("multi-key", tmp_path)
        assert verdict.verdict == expected
        difference = verdict.result.measurements["l2 − cosine"]
        assert difference.mean == pytest.approx(l2 - cosine)
        assert len(difference.values) == 2 * SAMPLES
        assert verdict.result.details["diagnosis"]["reason"] == "made for this test"

    @pytest.mark.parametrize(
        ("chosen", "l2", "cosine", "expected"),
        [
            ("cosine", 0.5, 0.7, "holds"),
            ("l2", 0.5, 0.7, "fails"),
            ("l2", 0.68, 0.7, "holds"),
            ("l2", 0.9, 0.1, "holds"),
        ],
    )
    def test_guideline(self, chosen, l2, cosine, expected, answers, tmp_path, monkeypatch):
        answers(l25=0.2, cosine5=0.6)
        good = {"chosen": "l2", "l2": 1.0, "cosine": 0.2}
        many = {"chosen": "l2 for 39, cosine for 1", "l2": 1.0, "cosine": 0.5, "with the chosen": 0.9875}
        monkeypatch.setattr(claims, "_geometry_cases", lambda ctx: {"built": good, "another": many})
        case = {"chosen": chosen, "l2": l2, "cosine": cosine}
        lost = max(l2, cosine) - case[chosen]
        monkeypatch.setattr(claims, "_recall_cases", lambda ctx: {"trained": case})
        verdict = judge("guideline", tmp_path)
        assert verdict.verdict == expected
        measured = verdict.result.measurements
        assert measured["loss on SmolLM2"].mean == pytest.approx(0.0)
        assert measured["loss on trained"].mean == pytest.approx(lost)
        assert measured["models within 0.03 of the best"].mean == pytest.approx(1 if lost < 0.031 else 3 / 4)
        assert measured["loss on another"].mean == pytest.approx(0.0125)
        assert measured["models that tell the metrics apart"].mean == 3 + (abs(l2 - cosine) > 0.03)
        assert verdict.result.details["trained"] == case

    def test_guideline_fails_where_the_metrics_tie(self, answers, tmp_path, monkeypatch):
        answers(l25=0.2, cosine5=0.6)
        tie = {"chosen": "l2", "l2": 1.0, "cosine": 1.0}
        monkeypatch.setattr(claims, "_geometry_cases", lambda ctx: {"built": tie, "telling": tie | {"cosine": 0.0}})
        monkeypatch.setattr(claims, "_recall_cases", lambda ctx: {"trained": tie})
        assert judge("guideline", tmp_path).verdict == "fails"

    def test_a_check_that_crashes_is_no_verdict(self, tmp_path, monkeypatch):
        monkeypatch.setattr(claims, "_answers", lambda *_: 1 / 0)
        verdict = judge("multi-key", tmp_path)
        assert verdict.kind == "error"
        assert "ZeroDivisionError" in verdict.verdict


class TestBlocksOfVllm:
    """From engine runs made by hand."""

    @staticmethod
    def result(ids, free, pool=10, **more):
        from manifoldkv.integrations.vllm.engine_job import JobResult

        return JobResult(pool=pool, free=free, seconds=1.0, ids=ids, preemptions=0, peak_blocks=4, bound=4,
                         tokens=(400, 20), **more)  # fmt: skip

    @pytest.mark.parametrize(
        ("together", "alone", "long", "expected"),
        [
            (([[1], [2]], [4, 10]), [[1], [2]], [2, 5, 3, 10], "holds"),
            (([[1], [2]], [4, 9]), [[1], [2]], [2, 5, 3, 10], "fails"),  # a block is missing at the end
            (([[1], [3]], [4, 10]), [[1], [2]], [2, 5, 3, 10], "fails"),  # an answer differs
            (([[1], [2]], [4, 10]), [[1], [2]], [5, 4, 3, 10], "fails"),  # free blocks never rose during the request
        ],
    )
    def test_verdicts(self, together, alone, long, expected, tmp_path, monkeypatch):
        runs = [self.result(*together), self.result(alone, [10]), self.result([[1]], long)]
        monkeypatch.setattr(claims_vllm, "engine_runs", lambda ctx: runs)
        monkeypatch.setattr(claims_vllm, "PYTHON", __file__)
        assert judge("vllm-blocks", tmp_path).verdict == expected

    def test_without_its_environment_it_needs_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        verdict = judge("vllm-blocks", tmp_path / "out")
        assert verdict.verdict.startswith("needs: vLLM 0.32 in .venv-vllm")
        assert verdict.claim.command.startswith("make setup-vllm")


class TestNeeds:
    def test_rows_for_other_hardware_print_their_commands(self, capsys, tmp_path):
        names = [claim.id for claim in CLAIMS if isinstance(claim.needs, str)]
        only = [argument for name in names for argument in ("--only", name)]
        assert app.run(["claims", *only, "--out", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        for claim in CLAIMS:
            if claim.id in names:
                assert f"{claim.id}: where that is at hand, run: {claim.command}" in shown
        assert f"{len(names)} need more" in shown

    def test_the_commands_are_commands_of_this_program(self, capsys):
        """Every option they use is one that the command has."""
        for claim in CLAIMS:
            for command in (claim.command or "").split("; "):
                words = command.split()
                if not words or words[0] != "manifoldkv":
                    continue
                name = re.match(r"manifoldkv ((?:[a-z-]+ ?)+)", command)[1].split()
                name = name[:2] if name[0] == "ruler" else name[:1]
                assert app.run([*name, "--help"]) == 0
                shown = capsys.readouterr().out
                for word in words:
                    if word.startswith("-"):
                        assert re.search(rf"(?<![\w-]){word}(?![\w-])", shown), (claim.id, word)

    def test_without_the_essays_nothing_is_computed_in_vain(self, tmp_path, monkeypatch):
        monkeypatch.delenv("ICML26_DATA", raising=False)
        monkeypatch.setattr("icml26_shared.models.load", lambda *_, **__: pytest.fail("a model was loaded"))
        verdict = judge("light-compression", tmp_path)
        assert verdict.verdict.startswith("needs: the essay haystack (manifoldkv/emerson_essays.txt is needed")
        assert "ICML26_DATA" in verdict.verdict

    def test_answers_on_disk_need_no_essays_and_no_model(self, tmp_path, monkeypatch):
        monkeypatch.delenv("ICML26_DATA", raising=False)
        monkeypatch.setattr("icml26_shared.models.load", lambda *_, **__: pytest.fail("a model was loaded"))
        context = Context("manifoldkv", quiet=True, out=tmp_path)
        claim = next(claim for claim in CLAIMS if claim.id == "light-compression")
        with JsonlStore(tmp_path / "kept.jsonl", key=("claim", "key")) as kept:
            ctx = shared.ClaimContext(context, kept, claim)
            rows = rows_of(dense=1.0)
            with claims._store(ctx, "claims-answers.jsonl", new_tokens=claims._NEW_TOKENS) as store:
                monkeypatch.setattr("os.fsync", lambda descriptor: None)  # thousands of rows
                for row in rows:
                    store.append(row)
            found = claims._answers(ctx, [*SINGLE, *MULTI])
        order = lambda row: (row["task"], row["index"], row["config"])  # noqa: E731
        assert sorted(found, key=order) == sorted(rows, key=order)

    def test_answers_of_other_sources_are_made_again(self, tmp_path, monkeypatch):
        context = Context("manifoldkv", quiet=True, out=tmp_path)
        with JsonlStore(tmp_path / "kept.jsonl", key=("claim", "key")) as kept:
            ctx = shared.ClaimContext(context, kept, CLAIMS[0])
            with claims._store(ctx, "answers.jsonl") as store:
                store.append({"task": "t", "index": 0, "config": "c"})
            with claims._store(ctx, "answers.jsonl") as store:
                assert len(store) == 1
            monkeypatch.setattr(claims, "source_digest", lambda name: "another")
            with claims._store(ctx, "answers.jsonl") as store:
                assert len(store) == 0


class TestBuiltModels:
    """Models whose cached keys are given: the answers follow from what a metric keeps."""

    @pytest.mark.parametrize("kind", ["collision", "mirrored", "aligned", "constant_norm"])
    def test_keys_answers_and_choice(self, kind):
        import torch

        from manifoldkv import synthetic
        from manifoldkv.claims_geometry import build
        from manifoldkv.config import KVConfig
        from manifoldkv.scoring import score_keys
        from manifoldkv.selection import select

        keys, needles = getattr(synthetic, kind)(3, background=300, needles=8, dim=16)
        built = build(keys, needles)
        with torch.no_grad():
            cached = built.model(built.context, use_cache=True).past_key_values.layers[0].keys
        torch.testing.assert_close(cached, keys, rtol=1e-5, atol=1e-5)
        assert built.accuracy(None) == 1.0
        for metric in ("l2", "cosine", "random"):
            cfg = KVConfig(metric=metric, compression_ratio=0.9, n_sink=0, n_recent=0)
            kept = select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2]))
            assert built.accuracy(cfg) == pytest.approx(synthetic.recall(kept, needles))

    def test_more_needles_than_values(self):
        from manifoldkv import synthetic
        from manifoldkv.claims_geometry import build

        with pytest.raises(ValueError, match="9 needles were given for values of 8 dimensions"):
            build(*synthetic.collision(0, background=20, needles=9, dim=8))


class TestRecallModel:
    """The small model that is trained for the guideline."""

    def test_interrupted_training_ends_with_the_same_weights(self, tmp_path, monkeypatch):
        import torch

        from manifoldkv import claims_recall as recall

        monkeypatch.setattr(recall, "_SAVE_EVERY", 2)
        whole = recall.train(True, 0, 5, tmp_path / "whole.safetensors")

        def stop(count, seen=[]):  # noqa: B006
            seen.append(count)
            if len(seen) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            recall.train(True, 0, 5, tmp_path / "broken.safetensors", advance=stop)
        advanced = []
        again = recall.train(True, 0, 5, tmp_path / "broken.safetensors", advance=advanced.append)
        assert sum(advanced) == 5
        assert advanced[0] == 2
        for name, weight in whole.state_dict().items():
            assert torch.equal(weight, again.state_dict()[name]), name
