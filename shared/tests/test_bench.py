import json
import sys

import numpy as np
import pytest

from icml26_shared import memory, timing
from icml26_shared.bench import (
    Bench,
    BenchReport,
    BenchRow,
    Comparison,
    Growth,
    Measured,
    PeakMemory,
    Rule,
    compare,
    growth,
    peak_memory,
)
from icml26_shared.bench_report import format_bytes, format_seconds
from icml26_shared.cli import App
from icml26_shared.console import Context

MIB = 2**20


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told to."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

        def work(self, seconds):
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", made)
    return made


# --- time -------------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_order_swaps_with_each_pair(clock):
    calls = []

    def side(name):
        def call():
            calls.append(name)
            clock.work(1.0)

        return call

    compare(side("a"), side("b"), pairs=3, warmup=0)
    assert "".join(calls[-6:]) == "abbaab"


def test_a_drift_of_the_machine_cancels_in_the_ratio(clock):
    slow = [1.0]

    def work(seconds):
        clock.work(seconds * slow[0])
        slow[0] *= 1.2  # the machine gets slower and slower

    result = compare(lambda: work(1.0), lambda: work(2.0), pairs=20, warmup=0)
    # In turns, a pair's ratio is 2 times or through 1.2, by who goes first; the times themselves grow a thousandfold.
    assert set(np.round(result.ratios, 6)) == {2.4, round(2 / 1.2, 6)}
    assert result.ratio == pytest.approx((2.4 + 2 / 1.2) / 2)
    assert max(result.ours) / min(result.ours) > 1000


def test_ratio_and_spread_are_median_and_quartiles():
    result = Comparison(ours=(1.0, 2.0, 1.0, 1.0, 1.0), peer=(1.0, 4.0, 3.0, 4.0, 5.0))
    assert result.ratios == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert result.ratio == 3.0
    assert result.spread == (2.0, 4.0)
    assert (result.ours_s, result.peer_s) == (1.0, 4.0)
    assert Comparison.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_short_calls_are_repeated_until_the_clock_can_tell(clock):
    result = compare(lambda: clock.work(1e-5), lambda: clock.work(3e-5), pairs=2, warmup=1)
    assert result.calls * 1e-5 >= 2e-3
    assert result.ours_s == pytest.approx(1e-5)
    assert result.ratio == pytest.approx(3.0)


def test_setup_runs_outside_the_clock_before_every_call(clock):
    made, seen = [], []

    def setup():
        clock.work(100.0)
        made.append(len(made))
        return made[-1]

    def ours(value):
        seen.append(value)
        clock.work(1.0)

    result = compare(ours, ours, pairs=2, warmup=1, setup=setup)
    assert result.ours == result.peer == (1.0, 1.0)
    assert result.calls == 1
    assert seen == made == list(range(6))


def test_garbage_is_not_collected_under_the_clock():
    import gc

    states = []
    compare(lambda: states.append(gc.isenabled()), lambda: None, pairs=1, warmup=0, setup=None)
    assert not any(states)
    assert gc.isenabled()


@pytest.mark.parametrize("options", [{"pairs": 0}, {"warmup": -1}])
def test_wrong_numbers_of_runs(options):
    with pytest.raises(ValueError, match="pairs must be at least 1 and warmup at least 0"):
        compare(print, print, **options)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_finds_the_exponent(clock, power):
    result = growth(lambda n: clock.work(1e-3 * n**power), [100, 200, 400])
    assert result.exponent == pytest.approx(power)
    assert result.ratios == (None, pytest.approx(2**power), pytest.approx(2**power))
    assert result.rows()[0] == (100, pytest.approx(1e-3 * 100**power), None)
    assert Growth.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_growth_goes_over_the_sizes_in_rounds_and_prepares_outside_the_clock(clock):
    order = []

    def setup(size):
        clock.work(1000.0)
        return [size]

    def work(value):
        order.append(value[0])
        clock.work(value[0])

    result = growth(work, [1, 2], repeats=2, setup=setup)
    assert order == [1, 2] * 3
    assert result.seconds == (1.0, 2.0)


@pytest.mark.parametrize("sizes", [[1], [2, 1], [1, 1], [0, 1]])
def test_growth_wants_ascending_sizes(sizes):
    with pytest.raises(ValueError, match="ascending order"):
        growth(print, sizes)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        growth(print, [1, 2], repeats=0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_peak_counts_what_is_used_for_a_moment():
    def moment():
        block = np.ones(64 * MIB, dtype=np.uint8)
        del block
        return 1

    kept = peak_memory(lambda: np.ones(64 * MIB, dtype=np.uint8))
    for found in (kept, peak_memory(moment)):
        assert 62 * MIB <= found.rss_bytes <= 70 * MIB
    assert peak_memory(lambda: None).rss_bytes <= 2 * MIB


def test_peak_is_above_the_start_not_above_zero():
    held = np.ones(100 * MIB, dtype=np.uint8)
    found = peak_memory(lambda: np.ones(32 * MIB, dtype=np.uint8))
    assert 30 * MIB <= found.rss_bytes <= 38 * MIB
    assert held[0] == 1


def test_tensors_are_counted_to_the_byte():
    import torch

    base = torch.ones(1000)

    def work():
        a = torch.empty(1_000_000)  # 4,000,000 bytes, never touched
        b = a.to(torch.float64)  # 8,000,000 more
        del a
        return b.reshape(1000, 1000)[:, 0].clone() + base  # 8,000 for the clone, 8,000 for the sum

    found = peak_memory(work)
    assert found.torch_bytes == 12_000_000
    assert found.device_bytes is None
    assert peak_memory(lambda: base[:10]).torch_bytes == 0


def test_without_a_high_water_mark_memory_is_sampled(monkeypatch, tmp_path):
    import time

    def work():
        block = np.ones(64 * MIB, dtype=np.uint8)
        time.sleep(0.05)
        return block

    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    found = peak_memory(work)
    assert found.method == "sampled"
    assert 60 * MIB <= found.rss_bytes <= 72 * MIB


def test_warmup_calls_are_not_counted():
    calls = []

    def work():
        calls.append(np.ones(50 * MIB if len(calls) == 0 else 1, dtype=np.uint8).sum())

    assert peak_memory(work, warmup=1).rss_bytes < 20 * MIB
    with pytest.raises(ValueError, match="warmup must be at least 0"):
        peak_memory(work, warmup=-1)


# --- rows -------------------------------------------------------------------------------------------------------------

FAST = Comparison(ours=(1.0, 1.0), peer=(2.0, 2.0))


def test_whether_a_goal_is_met_follows_from_the_figures():
    peak = PeakMemory(3 * MIB, 2 * MIB, None, "kernel")
    measured = Measured(FAST, Growth((1, 2), (1.0, 4.0)), peak, {"tokens": 7.0})
    assert measured.figures() == {
        "ratio": 2.0, "ours": 1.0, "peer": 2.0, "exponent": pytest.approx(2.0), "growth": 4.0,
        "peak_mib": 3.0, "torch_peak_mib": 2.0, "tokens": 7.0,
    }  # fmt: skip
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert BenchRow("r", measured, (Rule("ratio", ">=", 2), Rule("exponent", "<=", 2.01))).met is True
    assert BenchRow("r", measured, (Rule("ratio", ">=", 2), Rule("peak_mib", "<", 3))).met is False
    assert BenchRow("r", measured).met is None


def make(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App("tool")

    def run(ctx, args):
        def measure():
            calls.append("score")
            return Measured(FAST, peak=PeakMemory(3 * MIB, None, None, "kernel"))

        bench = Bench(ctx, libraries=["pytest"])
        bench.row("score", measure, goal=[Rule("ratio", ">=", 1.5), Rule("peak_mib", "<=", 1)], peer="kvpress")
        bench.row("length", lambda: Growth((10, 20), (1e-3, 2e-3)), goal=Rule("exponent", "<=", 1.1))
        bench.row("speed", lambda: {"tokens a second": 12.5})
        return bench.report()

    app.standard(bench=run)
    return app


def test_bench_as_json_table_and_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)  # parallel workers have it at 80, where the table's cells wrap
    calls = []
    app = make(calls, tmp_path, monkeypatch)
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    assert app.run(["bench", "--json", "--write"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    score, length, speed = found["rows"]
    assert (score["met"], score["goal"], score["peer"]) == (False, "ratio ≥ 1.5; peak_mib ≤ 1", "kvpress")
    assert score["comparison"]["ratio"] == 2.0
    assert score["comparison"]["spread"] == [2.0, 2.0]
    assert (length["met"], length["growth"]["rows"][1]) == (True, {"size": 20, "seconds": 0.002, "ratio": 2.0})
    assert (speed["met"], speed["figures"]) == (None, {"tokens a second": 12.5})
    assert found["environment"]["libraries"]["pytest"] == pytest.__version__
    assert json.loads((tmp_path / "tool-out" / "bench.json").read_text()) == found
    for text in ("2.00 [2.00, 2.00]", "3.0 MiB", "no", "exponent 1.00"):
        assert text in err
    readme = (tmp_path / "README.md").read_text()
    line = "| score | kvpress | 1 s | 2 s | 2.00 [2.00, 2.00] | 3.0 MiB | ratio ≥ 1.5; peak_mib ≤ 1 | no |"
    assert line in readme
    assert "| 20 | 2 ms | 2.00 |" in readme


def test_a_stopped_bench_goes_on_and_fresh_starts_again(tmp_path, monkeypatch, capsys):
    calls = []
    app = make(calls, tmp_path, monkeypatch)
    results = []
    for arguments in ([], [], ["--fresh"]):
        assert app.run(["bench", "--json", *arguments]) == 0
        results.append([{**row, "measured": None} for row in json.loads(capsys.readouterr().out)["rows"]])
    assert calls == ["score", "score"]
    assert results[0] == results[1] == results[2]


def test_rows_that_make_no_sense_are_errors(tmp_path):
    bench = Bench(Context("tool", quiet=True, out=tmp_path))
    with pytest.raises(ValueError, match="needs the measurement 'ratio'"):
        bench.row("a", lambda: {"x": 1.0}, goal=Rule("ratio", ">=", 1))
    bench.row("b", lambda: {"x": 1.0})
    with pytest.raises(ValueError, match="a row 'b' already"):
        bench.row("b", lambda: {"x": 1.0})


def test_a_bench_may_return_its_own_mapping(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    app = App("tool")
    app.standard(bench=lambda ctx, args: {"n": args.n}, bench_arguments=lambda p: p.add_argument("--n", type=int))
    assert app.run(["bench", "--json", "--n", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"n": 3}
    assert app.run(["bench", "--write"]) == 2


def test_columns_that_no_row_uses_are_left_out(tmp_path):
    bench = Bench(Context("tool", quiet=True, out=tmp_path))
    bench.row("speed", lambda: {"x": 2.5})
    assert bench.report().to_markdown().startswith("| what | ratio [quartiles] |\n| --- | --- |\n| speed | x 2.5 |")


def test_units():
    assert [format_seconds(x) for x in (12.345, 0.0123, 4.5e-6)] == ["12.3 s", "12.3 ms", "4.5 µs"]
    assert [format_bytes(x) for x in (5, 2048, 3 * MIB, 5 * 2**30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_report_type_and_python_version_are_there():
    report = Bench(Context("tool", quiet=True)).report()
    assert isinstance(report, BenchReport)
    assert report.environment["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
