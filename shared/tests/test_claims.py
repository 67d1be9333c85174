import json
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml26_shared import measurements
from icml26_shared._remembered import method_digest
from icml26_shared.claims import (
    Claim,
    Measurement,
    Needs,
    Result,
    Rule,
    holds_if,
    needs_gpu,
    paired,
    run,
    write_between_markers,
)
from icml26_shared.cli import App
from icml26_shared.console import Context
from icml26_shared.environment import environment, source_digest
from icml26_shared.reports import MarkersError, find_readme, markdown_table

# --- measurements -----------------------------------------------------------------------------------------------------


def test_mean_is_the_exact_sum_over_the_count():
    assert Measurement([0.1] * 10).mean == 0.1
    assert Measurement(2.5).values == (2.5,)
    assert math.isnan(Measurement([1.0, math.inf]).mean)
    with pytest.raises(ValueError, match="at least one value"):
        Measurement([])


def test_bootstrap_interval_of_shares_is_the_binomial_one():
    # The mean of a resample of 10 ones and 10 zeros is Binomial(20, 1/2)/20. By its distribution function
    # P(X <= 5) = 0.0207, P(X <= 6) = 0.0577, so the quantiles 0.025 and 0.975 are 6 and 14.
    half = Measurement([0.0] * 10 + [1.0] * 10)
    assert half.interval() == (0.3, 0.7)
    # Two values: the mean is 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    two = Measurement([0.0, 1.0])
    assert two.interval(level=0.95) == (0.0, 1.0)
    assert two.interval(level=0.4) == (0.5, 0.5)


def test_interval_is_the_same_in_parts_and_depends_on_its_seed(monkeypatch):
    values = Measurement(np.random.default_rng(3).normal(size=50))
    whole = values.interval(n=2000)
    assert values.interval(n=2000) == whole
    assert values.interval(n=2000, seed=1) != whole
    monkeypatch.setattr("icml26_shared.measurements._CHUNK", 50 * 7)
    measurements._bootstrap.cache_clear()
    low, high = values.interval(n=2000)
    assert low == pytest.approx(whole[0], abs=0.05)
    assert high == pytest.approx(whole[1], abs=0.05)


def test_interval_of_other_statistics_and_of_one_value():
    # Any resample's median of three values is one of them; of (0, 0, 9) it is 9 when two or three draws are: 7/27.
    low, high = Measurement([0.0, 0.0, 9.0]).interval(level=0.4, statistic=np.median)
    assert (low, high) == (0.0, 0.0)
    assert Measurement([0.0, 0.0, 9.0]).interval(level=0.6, statistic=np.median) == (0.0, 9.0)
    assert Measurement([4.0]).interval() == (4.0, 4.0)
    assert all(math.isnan(end) for end in Measurement([1.0, math.nan]).interval())
    for bad in (0, 1, -0.5):
        with pytest.raises(ValueError, match="level must be between 0 and 1"):
            Measurement([1.0]).interval(level=bad)


def test_interval_covers_the_mean_as_often_as_it_should():
    # 400 samples of 40 normal values: the percentile interval covers a little less than its 95 % at this size. With
    # p = 0.935, the count has a standard deviation of 4.9; 360 and 390 are about three of them away.
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = Measurement(rng.normal(2.0, 1.0, size=40)).interval(n=1000)
        covered += low <= 2.0 <= high
    assert 360 <= covered <= 390


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.floats(-1e3, 1e3))
def test_interval_holds_the_values_range_and_moves_with_them(values, shift):
    low, high = Measurement(values).interval(n=200)
    assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6
    moved = Measurement([value + shift for value in values]).interval(n=200)
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-6 * max(1.0, *map(abs, values)))


def test_paired_differences_see_what_the_two_intervals_hide():
    a = Measurement([1.1, 5.1, 9.1], seeds=(0, 1, 2))
    b = Measurement([1.0, 5.0, 9.0], seeds=(0, 1, 2))
    difference = paired(a, b)
    assert difference.values == pytest.approx([0.1, 0.1, 0.1])
    assert difference.interval() == pytest.approx((0.1, 0.1))
    assert difference.seeds == (0, 1, 2)
    for other, message in [
        (Measurement([1.0]), "in pairs, got 3 and 1"),
        (Measurement([1, 2, 3], seeds=(0, 1, 3)), "same seeds"),
        (Measurement([1, 2, 3], unit="s"), "one unit"),
    ]:
        with pytest.raises(ValueError, match=message):
            paired(a, other)


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("recall", ">=", 0.95), "recall ≥ 0.95"),
        (Rule("recall", "<", 0.3, on="every"), "recall < 0.3 (every value)"),
        (Rule("gain", ">", 0, on="interval"), "gain > 0 (with its whole 95 % interval)"),
        (Rule("auto", ">=", 0.95, times="dense"), "auto ≥ 0.95 × dense"),
        (Rule("l2 time", "<=", 1, times="cosine time"), "l2 time ≤ cosine time"),
        (Rule("l2", ">=", 0.05, plus="cosine"), "l2 ≥ cosine + 0.05"),
        (Rule("auto", ">=", -0.03, plus="cosine"), "auto ≥ cosine − 0.03"),
        (Rule("l2", ">", 0, plus="cosine"), "l2 > cosine"),
    ],
)
def test_a_rule_says_what_it_checks(rule, text):
    assert rule.text == text == str(rule)


def measured(**values):
    return {name: Measurement(value) for name, value in values.items()}


def test_rules_on_means_intervals_and_every_value():
    found = measured(a=[0.8, 1.0], b=[0.5, 0.5])
    assert Rule("a", ">=", 0.9).holds(found)
    assert not Rule("a", ">", 0.9).holds(found)
    assert not Rule("a", ">=", 0.9, on="interval").holds(found)
    assert Rule("a", ">=", 0.8, on="interval").holds(found)
    assert not Rule("a", ">=", 0.9, on="every").holds(found)
    assert Rule("a", "<=", 1.0, on="every").holds(found)
    assert Rule("a", "<=", 2, times="b").holds(found)
    assert not Rule("a", "<", 1.8, times="b").holds(found)
    assert Rule("a", "<=", 1.8, times="b").holds(found)
    assert Rule("a", ">=", 0.4, plus="b").holds(found)
    assert not Rule("a", ">=", 0.4, plus="b", on="every").holds(found)
    assert Rule("a", ">=", 0.3, plus="b", on="every").holds(found)


def test_rounding_decides_nothing():
    assert 0.9 + 0.05 > 0.95  # as floating point has it
    assert not Rule("x", ">", 0.95).holds(measured(x=[0.9 + 0.05]))
    assert Rule("x", "<=", 0.95).holds(measured(x=[0.9 + 0.05]))


def test_values_that_are_not_finite_never_hold():
    for value in (math.nan, math.inf, -math.inf):
        for op in (">=", ">", "<=", "<"):
            for on in ("mean", "interval", "every"):
                assert not holds_if(Measurement([1.0, value]), op, 1.0, on=on)


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=5),
    st.sampled_from([">=", ">", "<=", "<"]),
    st.integers(-3, 3),
)
def test_a_rule_on_every_value_agrees_with_plain_comparison(values, op, threshold):
    expected = all(eval(f"{value} {op} {threshold}") for value in values)  # noqa: S307 - numbers and a sign
    assert Rule("x", op, threshold, on="every").holds(measured(x=values)) == expected


def test_rules_that_cannot_be_checked_are_errors():
    with pytest.raises(ValueError, match="op must be one of"):
        Rule("a", "==", 1)
    with pytest.raises(ValueError, match="must be finite"):
        Rule("a", ">=", math.nan)
    with pytest.raises(ValueError, match="not both"):
        Rule("a", ">=", 1, times="b", plus="c")
    with pytest.raises(ValueError, match="on must be"):
        Rule("a", ">=", 1, on="median")
    with pytest.raises(ValueError, match=r"needs the measurement 'a'; measured: \['b'\]"):
        Rule("a", ">=", 1).holds(measured(b=[1]))


# --- claims -----------------------------------------------------------------------------------------------------------


def claim(check=None, rule=None, **options):
    options = {"id": "c", "statement": "It works", "source": "abstract", **options}
    return Claim(check=check, rule=rule or Rule("x", ">=", 1), **options)


def judge(*claims, tmp_path, **options):
    return run(claims, Context("tool", quiet=True, out=tmp_path), **options)


def test_verdicts_are_computed_from_what_was_measured(tmp_path):
    report = judge(
        claim(lambda ctx: {"x": [1, 2, 3]}, id="good"),
        claim(lambda ctx: {"x": [0, 1]}, id="bad"),
        claim(lambda ctx: {"x": 2}, [Rule("x", ">=", 1), Rule("x", "<=", 1.5)], id="both"),
        claim(lambda ctx: Result(holds=False, figure="n = 3"), "n is even", id="words"),
        claim(id="far", needs="a GPU", command="tool eval"),
        claim(lambda ctx: {"x": 1}, id="near", needs=lambda ctx: None, command="tool eval"),
        tmp_path=tmp_path,
    )
    assert [v.verdict for v in report.verdicts] == ["holds", "fails", "fails", "fails", "needs: a GPU", "holds"]
    assert report.summary == {"holds": 2, "fails": 3, "needs": 1, "error": 0}
    assert report.summary_line == "2 hold, 3 fail, 1 needs more"
    assert report.exit_code == 0
    both = report.to_json()["claims"][2]
    assert both["rules"] == [{"text": "x ≥ 1", "holds": True}, {"text": "x ≤ 1.5", "holds": False}]


def test_a_check_that_crashes_is_an_error_and_the_others_go_on(tmp_path):
    def crash(ctx):
        raise ZeroDivisionError("by | zero")

    report = judge(claim(crash), claim(lambda ctx: {"x": 1}, id="d"), tmp_path=tmp_path)
    first, second = report.verdicts
    assert first.verdict == "error: ZeroDivisionError: by | zero"
    assert "in crash" in first.traceback
    assert second.verdict == "holds"
    assert report.exit_code == 1
    assert report.to_json()["claims"][0]["holds"] is None
    assert "error: ZeroDivisionError: by \\| zero" in report.to_markdown()


@pytest.mark.parametrize(
    ("check", "rule", "said"),
    [
        (lambda ctx: None, None, "TypeError: the check of 'c' returned None"),
        (lambda ctx: {"y": 1}, None, "ValueError: the rule 'x ≥ 1' needs the measurement 'x'"),
        (lambda ctx: {"x": []}, None, "ValueError: a measurement needs at least one value"),
        (lambda ctx: Result(figure="?"), "some text", "TypeError: the rule of 'c' is text"),
        (
            lambda ctx: Result(holds=True, measurements=measured(x=0)),
            None,
            "ValueError: the check of 'c' says holds=True",
        ),
    ],
)
def test_a_check_that_decides_nothing_is_an_error_not_a_verdict(tmp_path, check, rule, said):
    (verdict,) = judge(claim(check, rule), tmp_path=tmp_path).verdicts
    assert verdict.verdict.startswith(f"error: {said}")


def test_a_check_may_find_that_it_cannot_run_here(tmp_path):
    def check(ctx):
        raise Needs("the LongBench files")

    (verdict,) = judge(claim(check, command="tool eval"), tmp_path=tmp_path).verdicts
    assert verdict.verdict == "needs: the LongBench files"


def test_needs_gpu_asks_torch(tmp_path, monkeypatch):
    import torch

    class Device:
        total_memory = 10 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert needs_gpu(24)(None) == "a GPU with 24 GiB"
    assert needs_gpu()(None) == "a GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
    assert needs_gpu(8)(None) is None
    assert needs_gpu(24)(None) == "a GPU with 24 GiB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Bad Id"}, "lower-case letters"),
        ({"statement": ""}, "needs a statement, a source and a rule"),
        ({"check": None}, "has no check; say what it needs"),
        ({"needs": "a GPU"}, "give the command"),
        ({"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_incomplete_claims_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        claim(**{"check": lambda ctx: {}, **options})
    with pytest.raises(ValueError, match="a rule"):
        Claim("c", "s", "abstract", lambda ctx: {}, rule="")


def test_a_check_gets_its_seeds_and_they_are_reported(tmp_path):
    check = claim(lambda ctx: {"x": list(ctx.seeds)}, seeds=4)
    report = run([check], Context("tool", quiet=True, out=tmp_path, seed=10))
    (verdict,) = report.verdicts
    assert verdict.result.measurements["x"] == Measurement([10, 11, 12, 13], seeds=(10, 11, 12, 13))
    assert report.to_json()["claims"][0]["seeds"] == [10, 11, 12, 13]


def test_a_second_run_measures_nothing_again_and_says_the_same(tmp_path):
    calls = []

    def check(ctx):
        calls.append("check")
        return Result(measurements={"x": Measurement([1.5, math.inf], "s", (0, 1))}, details={"note": [1]})

    first = judge(claim(check), tmp_path=tmp_path)
    second = judge(claim(check), tmp_path=tmp_path)
    assert calls == ["check"]
    assert second.verdicts[0].verdict == first.verdicts[0].verdict == "fails"
    assert second.verdicts[0].result == first.verdicts[0].result
    assert second.verdicts[0].seconds is None
    judge(claim(check), tmp_path=tmp_path, fresh=True)
    assert calls == ["check", "check"]


def test_what_was_measured_before_a_crash_is_kept(tmp_path):
    calls, broken = [], [True]

    def check(ctx):
        values = [ctx.cached(("score", seed), lambda seed=seed: calls.append(seed) or seed + 1) for seed in ctx.seeds]
        if broken:
            raise RuntimeError("later")
        return {"x": values}

    assert judge(claim(check), tmp_path=tmp_path).verdicts[0].kind == "error"
    broken.clear()
    (verdict,) = judge(claim(check), tmp_path=tmp_path).verdicts
    assert verdict.verdict == "holds"
    assert verdict.result.measurements["x"].values == (1.0, 2.0, 3.0)
    assert calls == [0, 1, 2]


def test_a_run_that_claims_share_is_made_once(tmp_path, monkeypatch):
    calls, digest = [], ["one"]
    monkeypatch.setattr("icml26_shared.claims.method_digest", lambda package: digest[0])

    def check(ctx):
        return {"x": [ctx.shared(["train", seed], lambda seed=seed: calls.append(seed) or seed) for seed in ctx.seeds]}

    claims = [claim(check, id="a", seeds=2), claim(check, id="b", seeds=3)]
    judge(*claims, tmp_path=tmp_path)
    assert calls == [0, 1, 2]
    (tmp_path / "claims.jsonl").unlink()  # as after a change of the checks
    report = judge(*claims, tmp_path=tmp_path)
    assert calls == [0, 1, 2]
    assert report.verdicts[1].result.measurements["x"].values == (0.0, 1.0, 2.0)
    digest[0] = "another"
    judge(*claims, tmp_path=tmp_path, fresh=True)
    assert calls == [0, 1, 2] * 2
    (tmp_path / "claims.jsonl").unlink()
    digest[0] = "a third"
    judge(claims[0], tmp_path=tmp_path)
    assert calls == [0, 1, 2] * 2 + [0, 1]


def test_the_methods_sources_are_told_from_its_commands(tmp_path, monkeypatch):
    sources = tmp_path / "tool"
    (sources / "integrations").mkdir(parents=True)
    for name in ("method", "cli_train", "claims", "claims_runs", "bench", "demo", "integrations/trl"):
        (sources / f"{name}.py").write_text("x = 1\n")
    monkeypatch.setattr("icml26_shared.environment.package_folder", lambda name: sources if name == "tool" else None)
    first = method_digest("tool")
    for name in ("cli_train", "claims", "bench", "demo", "integrations/trl"):
        (sources / f"{name}.py").write_text("x = 2\n")
    assert method_digest("tool") == first
    (sources / "claims_runs.py").write_text("x = 2\n")
    second = method_digest("tool")
    (sources / "method.py").write_text("x = 2\n")
    assert len({first, second, method_digest("tool")}) == 3


def test_fresh_and_only_keep_what_the_other_claims_measured(tmp_path):
    calls = []

    def check(ctx):
        calls.append(ctx.claim_id)
        return {"x": 1}

    claims = [claim(check, id="a"), claim(check, id="b")]
    judge(*claims, tmp_path=tmp_path)
    judge(*claims, tmp_path=tmp_path, only=["b"], fresh=True)
    judge(*claims, tmp_path=tmp_path)
    assert calls == ["a", "b", "b"]


def test_a_report_says_when_its_figures_were_measured(tmp_path):
    judge(claim(lambda ctx: {"x": 1}), tmp_path=tmp_path)
    path = tmp_path / "claims.jsonl"
    path.write_text(re.sub(r'"measured": "[^"T]*T', '"measured": "2001-02-03T', path.read_text()))
    report = judge(claim(lambda ctx: {"x": 1}), tmp_path=tmp_path)
    assert report.verdicts[0].measured.startswith("2001-02-03T")
    assert "Measured on 2001-02-03 with tool, Python" in report.to_markdown()


def test_measurements_of_another_seed_are_not_mixed_in(tmp_path):
    check = claim(lambda ctx: {"x": list(ctx.seeds)})
    judge(check, tmp_path=tmp_path)
    with pytest.raises(ValueError, match=r"seed: 0 there, 5 now.*--fresh"):
        run([check], Context("tool", quiet=True, out=tmp_path, seed=5))


def test_only_and_wrong_ids(tmp_path):
    claims = [claim(lambda ctx: {"x": 1}, id=name) for name in ("a", "b")]
    assert [v.claim.id for v in judge(*claims, tmp_path=tmp_path, only=["b"]).verdicts] == ["b"]
    with pytest.raises(Exception, match="unknown claim 'z'; choose from a, b"):
        judge(*claims, tmp_path=tmp_path, only=["z"])
    with pytest.raises(ValueError, match="used twice: a"):
        judge(claims[0], claims[0], tmp_path=tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App("tool")
    app.standard(
        claims=[
            claim(lambda ctx: {"x": [1.0, 2.0]}, id="good", source="section 2"),
            claim(id="far", statement="It scales | well", needs="a GPU", command="tool eval --big"),
        ]
    )
    return app


def test_claims_as_json(app, capsys, tmp_path):
    assert app.run(["claims", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    good, far = found["claims"]
    assert good["verdict"] == "holds"
    assert good["holds"] is True
    assert good["measurements"]["x"] == {
        "mean": 1.5, "interval": [1.0, 2.0], "level": 0.95, "values": [1.0, 2.0], "unit": "", "seeds": [],
    }  # fmt: skip
    assert (far["verdict"], far["holds"], far["command"]) == ("needs: a GPU", None, "tool eval --big")
    assert found["summary"] == {"holds": 1, "fails": 0, "needs": 1, "error": 0}
    machine = found["environment"]
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("date", "platform", "processor", "torch", "commit"):
        assert name in machine
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0
    kept = json.loads((tmp_path / "tool-out" / "claims.json").read_text())
    assert kept["claims"] == found["claims"]


def test_claims_as_a_table(app, capsys):
    assert app.run(["claims"]) == 0
    out = capsys.readouterr().out
    for text in ("good", "holds", "x 1.500 [1.000, 2.000]", "x ≥ 1", "needs: a GPU", "run: tool eval --big"):
        assert text in out
    assert out.rstrip().endswith("1 holds, 1 needs more")


def test_claims_list_measures_nothing(app, capsys, tmp_path):
    assert app.run(["claims", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in listed] == ["good", "far"]
    assert listed[1]["needs"] == "a GPU"
    assert not (tmp_path / "tool-out").exists()


def test_claims_written_into_a_readme(app, capsys, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# Tool\n\n<!-- claims:begin -->\nstale text\n<!-- claims:end -->\n\nEnd.\n")
    assert app.run(["claims", "--write"]) == 0
    text = readme.read_text()
    assert text.startswith("# Tool\n\n<!-- claims:begin -->\n\n| Claim |")
    assert text.endswith("\n\n<!-- claims:end -->\n\nEnd.\n")
    assert "| `good` | It works (section 2) | x ≥ 1 | x 1.500 [1.000, 2.000] | **holds** |" in text
    assert "| `far` | It scales \\| well (abstract) | x ≥ 1 | `tool eval --big` | **needs: a GPU** |" in text
    assert "stale text" not in text
    assert "Python" in text
    assert app.run(["claims", "--write", str(readme), "--only", "good"]) == 2
    assert "needs every claim" in capsys.readouterr().err


def test_a_readme_without_markers_is_refused_before_anything_runs(app, capsys, tmp_path):
    (tmp_path / "README.md").write_text("# Tool\n")
    assert app.run(["claims", "--write"]) == 2
    assert "lacks the line '<!-- claims:begin -->'" in capsys.readouterr().err
    assert not (tmp_path / "tool-out").exists()
    assert app.run(["claims", "--write", "none.md"]) == 2
    assert "none.md" in capsys.readouterr().err


def test_an_unknown_claim_on_the_command_line(app, capsys):
    assert app.run(["claims", "--only", "zzz"]) == 2
    assert capsys.readouterr().err == "error: unknown claim 'zzz'; choose from good, far\n"


KILLED = """
import sys, time
from icml26_shared.claims import Claim, Rule
from icml26_shared.cli import App

def check(ctx):
    def measure(seed):
        time.sleep(0.02)
        return seed * 0.5
    return {"x": [ctx.cached(seed, lambda seed=seed: measure(seed)) for seed in ctx.seeds]}

app = App("tool")
rule = Rule("x", ">=", 1)
app.standard(claims=[Claim(name, "s", "abstract", check, rule, seeds=10) for name in ("one", "two", "three")])
app.main()
"""


@pytest.mark.filterwarnings("ignore:.*half-written")
def test_claims_killed_at_random_moments_end_with_the_verdicts_of_one_run(tmp_path):
    (tmp_path / "tool.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "tool.py"), "claims", "--json", "--out"]
    store = tmp_path / "killed" / "claims.jsonl"
    killed = 0
    for rows in (2, 9, 17):
        process = subprocess.Popen([*command, str(store.parent)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not store.exists() or store.read_bytes().count(b"\n") < rows):
            time.sleep(0.005)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed == 3
    done = [
        json.loads(subprocess.run([*command, str(out)], capture_output=True, check=True).stdout)["claims"]
        for out in (store.parent, tmp_path / "whole")
    ]
    for row in (*done[0], *done[1]):
        for name in ("seconds", "measured"):
            row.pop(name)
    assert done[0] == done[1]
    assert [row["verdict"] for row in done[0]] == ["holds"] * 3


# --- environment and README -------------------------------------------------------------------------------------------


def test_environment_names_a_commit_only_of_tracked_sources(tmp_path, monkeypatch):
    package = tmp_path / "one_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def git(*arguments):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert environment("one-package")["commit"] is None
    git("init", "-q")
    assert environment("one-package")["commit"] is None, "in a checkout, but not tracked"
    git("add", ".")
    git("commit", "-q", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert environment("one-package")["commit"] == head[:12]
    (package / "__init__.py").write_text("# changed\n")
    assert environment("one-package")["commit"] == head[:12] + "-dirty"


def test_source_digest_sees_every_change(tmp_path, monkeypatch):
    package = tmp_path / "digested"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    first = source_digest("digested")
    (package / "more.py").write_text("x = 1\n")
    second = source_digest("digested")
    (package / "more.py").write_text("x = 2\n")
    assert len({first, second, source_digest("digested")}) == 3
    assert source_digest("no-such-package-anywhere") is None


def test_writing_between_markers_changes_nothing_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(b"a\r\n<!-- t:begin -->\r\nold\r\n<!-- t:end -->\r\nb, see `<!-- t:begin -->`")
    write_between_markers(path, "t", "new\nlines\n")
    whole = b"a\r\n<!-- t:begin -->\r\n\r\nnew\r\nlines\r\n\r\n<!-- t:end -->\r\nb, see `<!-- t:begin -->`"
    assert path.read_bytes() == whole
    write_between_markers(path, "t", "new\nlines\n")
    assert path.read_bytes() == whole
    write_between_markers(path, "t", "")
    assert b"<!-- t:begin -->\r\n<!-- t:end -->" in path.read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x\n", "lacks the line '<!-- t:begin -->'"),
        ("<!-- t:begin -->\n", "lacks the line '<!-- t:end -->'"),
        ("<!-- t:begin -->\n<!-- t:begin -->\n<!-- t:end -->\n", r"2 times \(lines 1, 2\)"),
        ("<!-- t:end -->\n<!-- t:begin -->\n", "swap them"),
    ],
)
def test_wrong_markers_are_errors_and_the_file_stays(tmp_path, text, said):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(MarkersError, match=said):
        write_between_markers(path, "t", "new")
    assert path.read_text() == text


def test_the_readme_of_a_source_tree_is_found_from_anywhere(tmp_path, monkeypatch):
    package = tmp_path / "tree" / "src" / "found_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "tree" / "pyproject.toml").write_text("")
    (tmp_path / "tree" / "README.md").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    assert find_readme("found-here") == tmp_path / "tree" / "README.md"
    assert str(find_readme("found-here", "other.md")) == "other.md"
    with pytest.raises(Exception, match=r"name the file: --write PATH"):
        find_readme("not-installed-anywhere")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_markdown_cells_are_escaped():
    assert markdown_table(["a|b", "c"], [["x\ny", None]]) == "| a\\|b | c |\n| --- | --- |\n| x y |  |"
