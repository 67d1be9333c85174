"""Rows of a bench with their goals; public names are also in :mod:`icml26_shared.bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icml26_shared._remembered import now, open_remembered
from icml26_shared.checkpoint import atomic_write_json, atomic_write_text, to_jsonable
from icml26_shared.console import Context, format_number
from icml26_shared.environment import environment
from icml26_shared.errors import UserError
from icml26_shared.measurements import Measurement, Rule
from icml26_shared.memory import PeakMemory
from icml26_shared.reports import check_markers, find_readme, machine_line, markdown_table, write_between_markers
from icml26_shared.timing import Comparison, Growth

__all__ = ["Bench", "BenchReport", "BenchRow", "Measured", "format_bytes", "format_seconds", "run_command"]

_COLUMNS = ["what", "against", "ours", "peer", "ratio [quartiles]", "peak memory", "goal", "met"]


@dataclass(frozen=True)
class Measured:
    """What one row measured.

    Args:
        comparison: times against a peer.
        growth: cost against size.
        peak: peak memory.
        extra: further figures by name.
    """

    comparison: Comparison | None = None
    growth: Growth | None = None
    peak: PeakMemory | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """The numbers a goal may speak of.

        ``ratio`` (peer's time over ours), ``ours`` and ``peer`` (seconds), ``exponent`` and ``growth`` (time at the
        largest size over time at the smallest), ``peak_mib`` (resident memory, MiB), ``torch_peak_mib`` (tensors, MiB),
        and the extra ones.
        """
        found: dict[str, float] = {}
        if self.comparison is not None:
            found |= {"ratio": self.comparison.ratio, "ours": self.comparison.ours_s, "peer": self.comparison.peer_s}
        if self.growth is not None:
            found["exponent"] = self.growth.exponent
            found["growth"] = self.growth.seconds[-1] / self.growth.seconds[0]
        if self.peak is not None:
            found["peak_mib"] = self.peak.rss_bytes / 2**20
            if self.peak.torch_bytes is not None:
                found["torch_peak_mib"] = self.peak.torch_bytes / 2**20
        return found | dict(self.extra)

    @classmethod
    def of(cls, found: Measured | Comparison | Growth | PeakMemory | Mapping[str, float]) -> Measured:
        """One of the parts as a whole."""
        if isinstance(found, Measured):
            return found
        if isinstance(found, Comparison):
            return cls(comparison=found)
        if isinstance(found, Growth):
            return cls(growth=found)
        if isinstance(found, PeakMemory):
            return cls(peak=found)
        return cls(extra=dict(found))

    def to_json(self) -> dict[str, Any]:
        """The parts."""
        return {
            "comparison": self.comparison and self.comparison.to_json(),
            "growth": self.growth and self.growth.to_json(),
            "peak": self.peak and self.peak.to_json(),
            "extra": dict(self.extra),
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Measured:
        """What :meth:`to_json` wrote."""
        return cls(
            kept["comparison"] and Comparison.from_json(kept["comparison"]),
            kept["growth"] and Growth.from_json(kept["growth"]),
            kept["peak"] and PeakMemory.from_json(kept["peak"]),
            kept["extra"],
        )


@dataclass(frozen=True)
class BenchRow:
    """One row of a bench.

    Args:
        name: what was measured.
        measured: the figures.
        goal: rules about them (see :meth:`Measured.figures` for the names); empty for a row that only informs.
        peer: what it was compared with.
        date: when it was measured (UTC, ISO 8601).
    """

    name: str
    measured: Measured
    goal: tuple[Rule, ...] = ()
    peer: str = ""
    date: str = ""

    @property
    def met(self) -> bool | None:
        """Whether all rules hold; None without a goal."""
        figures = {name: Measurement([value]) for name, value in self.measured.figures().items()}
        return all(rule.holds(figures) for rule in self.goal) if self.goal else None

    @property
    def goal_text(self) -> str:
        """The goal in words."""
        return "; ".join(rule.text for rule in self.goal)

    def cells(self) -> list[str]:
        """The row as text, in the order of the report's columns."""
        measured, ratio = self.measured, self.measured.comparison
        told = [f"{name} {format_number(value)}" for name, value in measured.extra.items()]
        if ratio is not None:
            low, high = ratio.spread
            told.insert(0, f"{ratio.ratio:.2f} [{low:.2f}, {high:.2f}]")
        if measured.growth is not None:
            told.append(f"exponent {measured.growth.exponent:.2f}")
        return [
            self.name,
            self.peer,
            format_seconds(ratio.ours_s) if ratio else "",
            format_seconds(ratio.peer_s) if ratio else "",
            "; ".join(told),
            _peak_text(measured.peak),
            self.goal_text,
            {True: "yes", False: "no", None: ""}[self.met],
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        return {
            "name": self.name,
            "peer": self.peer,
            "goal": self.goal_text,
            "met": self.met,
            "measured": self.date or None,
            "figures": self.measured.figures(),
            **self.measured.to_json(),
        }


@dataclass(frozen=True)
class BenchReport:
    """Rows of a bench, with what they were measured on."""

    distribution: str
    rows: tuple[BenchRow, ...]
    environment: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        plain: dict[str, Any] = to_jsonable(
            {
                "package": self.distribution,
                "environment": self.environment,
                "rows": [row.to_json() for row in self.rows],
            }
        )
        return plain

    def to_markdown(self) -> str:
        """The tables for a README."""
        parts = [markdown_table(*self._table())]
        for row in self.rows:
            if row.measured.growth is not None:
                columns, cells = _growth_table(row.measured.growth)
                parts.append(f"{row.name}:\n\n{markdown_table(columns, cells)}")
        note = "Ratio: the peer's time over ours, median of pairs measured in turns; above 1, ours is faster."
        dates = [row.date for row in self.rows if row.date]
        return "\n\n".join([*parts, f"{note} {machine_line(self.environment, dates)}"])

    def show(self, context: Context) -> None:
        """Print the tables."""
        context.table(f"{context.name}: bench", *self._table())
        for row in self.rows:
            if row.measured.growth is not None:
                context.table(row.name, *_growth_table(row.measured.growth))

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and cells, without the columns in which no row has anything."""
        cells = [row.cells() for row in self.rows]
        used = [index for index in range(len(_COLUMNS)) if index == 0 or any(row[index] for row in cells)]
        return [_COLUMNS[index] for index in used], [[row[index] for index in used] for row in cells]


class Bench:
    """Collects rows; each is remembered in the output folder when it is measured, so a stopped bench resumes.

    Args:
        context: of the command line.
        libraries: distributions whose versions belong in the report, e.g. the peers.
        fresh: measure again what an earlier run left; set by ``--fresh`` of the command line.
    """

    def __init__(self, context: Context, *, libraries: Sequence[str] = (), fresh: bool = False) -> None:
        self._context = context
        self._libraries = libraries
        self._fresh = fresh or context.fresh
        self._rows: list[BenchRow] = []

    def row(
        self,
        name: str,
        measure: Callable[[], Measured | Comparison | Growth | PeakMemory | Mapping[str, float]],
        *,
        goal: Rule | Sequence[Rule] = (),
        peer: str = "",
    ) -> BenchRow:
        """Measure a row, or take it from the interrupted run before this one.

        Raises:
            ValueError: two rows of one name, or a goal about a figure that was not measured.
        """
        if any(row.name == name for row in self._rows):
            raise ValueError(f"the bench has a row {name!r} already")
        rules = (goal,) if isinstance(goal, Rule) else tuple(goal)
        forget = (lambda row: row["name"] == name) if self._fresh else None
        with open_remembered(self._context, "bench.jsonl", ("name",), forget=forget) as store:
            if store.done(name):
                self._context.note(f"{name}: as measured before, from {store.path}; --fresh measures again")
            with self._context.progress(f"bench: {name}"):
                kept = store.remember({"name": name}, lambda: {**Measured.of(measure()).to_json(), "measured": now()})
        row = BenchRow(name, Measured.from_json(kept), rules, peer, kept["measured"])
        _ = row.met  # a goal about a figure that is not there is said now, not at the end of the bench
        self._rows.append(row)
        return row

    def report(self) -> BenchReport:
        """All rows so far."""
        distribution = self._context.distribution
        return BenchReport(distribution, tuple(self._rows), environment(distribution, self._libraries))


def run_command(context: Context, args: argparse.Namespace, run: Callable[[Context, argparse.Namespace], Any]) -> int:
    """The ``bench`` command of every package."""
    readme = None
    if args.write is not None:
        readme = find_readme(context.distribution, args.write)
        check_markers(readme, "bench")
    context.fresh = args.fresh
    report = run(context, args)
    if not isinstance(report, BenchReport):
        if readme is not None:
            raise UserError("--write: this bench gives no table to write")
        context.finish(report if report is not None else {})
        return 0
    report.show(context)
    atomic_write_json(context.out_file("bench.json"), report)
    atomic_write_text(context.out_file("bench.md"), report.to_markdown() + "\n")
    if readme is not None:
        write_between_markers(readme, "bench", report.to_markdown())
        context.note(f"wrote the table into {readme}")
    context.finish(report.to_json())
    return 0


def format_seconds(value: float) -> str:
    """Seconds with three digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def format_bytes(value: float) -> str:
    """Bytes in GiB, MiB, KiB or B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _peak_text(peak: PeakMemory | None) -> str:
    if peak is None:
        return ""
    tensors = "" if peak.torch_bytes is None else f" (tensors {format_bytes(peak.torch_bytes)})"
    return f"{format_bytes(peak.rss_bytes)}{tensors}"


def _growth_table(growth: Growth) -> tuple[list[str], list[list[str]]]:
    rows = [
        [format_number(size), format_seconds(seconds), "" if ratio is None else f"{ratio:.2f}"]
        for size, seconds, ratio in growth.rows()
    ]
    return ["size", "time", "times the row before"], rows
