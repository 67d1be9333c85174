"""Side-by-side measurements: time in turns, peak memory, cost against size.

A package's bench module measures rows against its peers and returns a report::

    def run(ctx, args):
        bench = Bench(ctx, libraries=["kvpress"])
        bench.row("score 16,384 keys", goal=Rule("ratio", ">=", 1.0), peer="kvpress KeyDiffPress",
                  measure=lambda: Measured(compare(ours, theirs), peak=peak_memory(ours)))
        bench.row("growth", goal=Rule("exponent", "<=", 1.1), measure=lambda: growth(score, [4096, 8192, 16384]))
        return bench.report()
"""

from icml26_shared.bench_report import Bench, BenchReport, BenchRow, Measured, run_command
from icml26_shared.measurements import Rule
from icml26_shared.memory import PeakMemory, peak_memory
from icml26_shared.timing import Comparison, Growth, compare, growth

__all__ = [
    "Bench",
    "BenchReport",
    "BenchRow",
    "Comparison",
    "Growth",
    "Measured",
    "PeakMemory",
    "Rule",
    "compare",
    "growth",
    "peak_memory",
    "run_command",
]
