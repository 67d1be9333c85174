"""Verdicts on claims, as a table for people, JSON for programs and Markdown for a README."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from icml26_shared.checkpoint import to_jsonable
from icml26_shared.measurements import Measurement
from icml26_shared.reports import machine_line, markdown_table

if TYPE_CHECKING:
    from icml26_shared.claims import Claim

__all__ = ["Report", "Result", "Verdict"]


@dataclass(frozen=True)
class Result:
    """What a check found.

    Args:
        holds: only for a claim whose rule is text; a claim with :class:`Rule` objects leaves it None.
        figure: one line with the numbers; by default made from the measurements.
        measurements: what was measured, by name.
        details: anything else worth keeping, JSON-able.
    """

    holds: bool | None = None
    figure: str = ""
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def store(self) -> dict[str, Any]:
        """All of it as JSON keeps it, values that are not finite as text; :meth:`restore` is the way back."""
        kept = {
            name: {"values": [repr(value) for value in m.values], "unit": m.unit, "seeds": list(m.seeds)}
            for name, m in self.measurements.items()
        }
        return {"holds": self.holds, "figure": self.figure, "measurements": kept, "details": dict(self.details)}

    @classmethod
    def restore(cls, kept: Mapping[str, Any]) -> Result:
        """The result that :meth:`store` kept."""
        measurements = {
            name: Measurement([float(value) for value in m["values"]], m["unit"], m["seeds"])
            for name, m in kept["measurements"].items()
        }
        return cls(kept["holds"], kept["figure"], measurements, kept["details"])


@dataclass(frozen=True)
class Verdict:
    """A claim and what came of it.

    Attributes:
        verdict: ``"holds"``, ``"fails"``, ``"needs: ..."`` or ``"error: ..."``.
        seeds: the seeds it was measured with.
        seconds: how long the check took; None when an earlier run had measured it.
        measured: when it was measured (UTC, ISO 8601).
        traceback: of a check that crashed.
    """

    claim: Claim
    verdict: str
    result: Result = field(default_factory=Result)
    seeds: tuple[int, ...] = ()
    seconds: float | None = None
    measured: str | None = None
    traceback: str | None = None

    @property
    def kind(self) -> str:
        """``holds``, ``fails``, ``needs`` or ``error``."""
        return self.verdict.partition(":")[0]

    @property
    def figure(self) -> str:
        """The numbers, in one line."""
        if self.result.figure or not self.result.measurements:
            return self.result.figure
        return "; ".join(f"{name} {measurement}" for name, measurement in self.result.measurements.items())

    def to_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        measured = self.result.measurements
        rules = [
            {"text": rule.text, "holds": rule.holds(measured) if self.kind in ("holds", "fails") else None}
            for rule in self.claim.rules
        ]
        return {
            "id": self.claim.id,
            "statement": self.claim.statement,
            "source": self.claim.source,
            "rule": self.claim.rule_text,
            "rules": rules,
            "verdict": self.verdict,
            "holds": {"holds": True, "fails": False}.get(self.kind),
            "figure": self.figure,
            "seeds": list(self.seeds),
            "measurements": {name: value.to_json() for name, value in measured.items()},
            "details": dict(self.result.details),
            "needs": self.verdict.partition(": ")[2] if self.kind == "needs" else None,
            "command": self.claim.command,
            "seconds": self.seconds,
            "measured": self.measured,
            "traceback": self.traceback,
        }


@dataclass(frozen=True)
class Report:
    """Verdicts on a package's claims, with what they were measured on."""

    distribution: str
    verdicts: tuple[Verdict, ...]
    environment: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        """0 when every check ran or said what it needs; 1 when one crashed."""
        return int(any(verdict.kind == "error" for verdict in self.verdicts))

    @property
    def summary(self) -> dict[str, int]:
        """Number of verdicts of each kind."""
        kinds = [verdict.kind for verdict in self.verdicts]
        return {kind: kinds.count(kind) for kind in ("holds", "fails", "needs", "error")}

    @property
    def summary_line(self) -> str:
        """The numbers of verdicts in words, e.g. ``"3 hold, 1 fails"``."""
        words = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "needs": ("needs more", "need more")}
        words["error"] = ("crashed", "crashed")
        return ", ".join(f"{count} {words[kind][count > 1]}" for kind, count in self.summary.items() if count)

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program; numbers as numbers, NaN as null."""
        plain: dict[str, Any] = to_jsonable(
            {
                "package": self.distribution,
                "environment": self.environment,
                "summary": self.summary,
                "claims": [verdict.to_json() for verdict in self.verdicts],
            }
        )
        return plain

    def to_markdown(self) -> str:
        """The table for a README."""
        rows = []
        for verdict in self.verdicts:
            here = f"`{verdict.claim.command}`" if verdict.kind == "needs" else verdict.figure
            statement = f"{verdict.claim.statement} ({verdict.claim.source})"
            rows.append([f"`{verdict.claim.id}`", statement, verdict.claim.rule_text, here, f"**{verdict.verdict}**"])
        table = markdown_table(["Claim", "Statement", "Holds if", "Measured here", "Verdict"], rows)
        note = "Figures are means with 95 % percentile bootstrap intervals; rules are about means unless they say more."
        dates = [verdict.measured for verdict in self.verdicts if verdict.measured]
        return f"{table}\n\n{self.summary_line}. {note} {machine_line(self.environment, dates)}"
