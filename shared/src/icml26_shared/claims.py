"""A paper's claims as checks that run, with verdicts computed from what was measured.

A package lists its claims; ``NAME claims`` runs them::

    CLAIMS = [
        Claim(
            id="collisions",
            statement="L2 finds needles that share a direction with the background",
            source="abstract",
            check=check_collisions,                     # returns {"l2 recall": Measurement([...]), ...}
            rule=[Rule("l2 recall", ">=", 0.95), Rule("cosine recall", "<=", 0.3)],
        ),
        Claim(id="ruler-64k", statement="...", source="section 5", rule=Rule("score", ">=", 92),
              needs="a GPU with 24 GB and Qwen3-8B", command="manifoldkv eval --model PATH ..."),
    ]

Verdicts: ``holds`` and ``fails`` are computed from the measurements by the claim's rules; ``needs: ...`` says what is
missing here, with the command for a machine that has it; ``error: ...`` is a check that crashed and counts as neither.
"""

from __future__ import annotations

import argparse
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from icml26_shared._remembered import method_digest, now, open_remembered
from icml26_shared.checkpoint import JsonlStore, atomic_write_json, atomic_write_text
from icml26_shared.claims_report import Report, Result, Verdict
from icml26_shared.console import Bar, Context
from icml26_shared.environment import environment
from icml26_shared.errors import UserError
from icml26_shared.measurements import Measurement, Rule, holds_if, paired
from icml26_shared.reports import check_markers, find_readme, write_between_markers

_RESULT = "(result)"

__all__ = [
    "Claim",
    "ClaimContext",
    "Measurement",
    "Needs",
    "Report",
    "Result",
    "Rule",
    "Verdict",
    "holds_if",
    "needs_gpu",
    "paired",
    "run",
    "run_command",
    "write_between_markers",
]


class Needs(Exception):
    """Raised by a check that finds it cannot run here; the message says what is missing."""


Check = Callable[["ClaimContext"], Result | Mapping[str, Measurement | Sequence[float] | float]]


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Args:
        id: short name for ``--only``: lower-case letters, digits, ``-``, ``_`` and ``.``.
        statement: the claim, in one sentence.
        source: where the paper makes it, e.g. ``"abstract"`` or ``"section 4.2"``.
        check: measures; returns a :class:`Result` or just its measurements (lists of numbers will do). None for a claim
            that cannot run here.
        rule: what must be true, set before the run: a :class:`Rule`, several that must all hold, or text with the
            threshold (then the check decides by ``Result.holds``).
        needs: what a run needs and this machine may lack: text (the check never runs here), or a function of the
            context that returns the text, or None when all is there, e.g. :func:`needs_gpu`.
        command: the command that runs the check where the needs are met.
        seeds: number of seeds; ``ctx.seeds`` are ``seed, seed + 1, ...``.
    """

    id: str
    statement: str
    source: str
    check: Check | None = None
    rule: Rule | Sequence[Rule] | str = ""
    needs: str | Callable[[ClaimContext], str | None] | None = None
    command: str | None = None
    seeds: int = 3

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.id):
            raise ValueError(f"claim id {self.id!r}: use lower-case letters, digits, '-', '_' and '.'")
        if not self.statement or not self.source or not self.rule_text:
            raise ValueError(f"claim {self.id!r} needs a statement, a source and a rule")
        if self.check is None and not self.needs:
            raise ValueError(f"claim {self.id!r} has no check; say what it needs")
        if self.needs and not self.command:
            raise ValueError(f"claim {self.id!r} has needs; give the command that checks it where they are met")
        if self.seeds < 1:
            raise ValueError(f"claim {self.id!r}: seeds must be at least 1, got {self.seeds}")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules as objects; empty when the rule is text."""
        if isinstance(self.rule, Rule):
            return (self.rule,)
        return () if isinstance(self.rule, str) else tuple(self.rule)

    @property
    def rule_text(self) -> str:
        """The rule in words."""
        return self.rule if isinstance(self.rule, str) else "; ".join(rule.text for rule in self.rules)


class ClaimContext:
    """What a check works with.

    Attributes:
        claim_id: id of the claim.
        seeds: the seeds of this claim.
        seed: the first of them.
        out: folder for files.
        console: rich console.
    """

    def __init__(self, context: Context, store: JsonlStore, claim: Claim, runs: JsonlStore | None = None) -> None:
        self._context, self._store, self._claim, self._runs = context, store, claim, runs
        self.claim_id = claim.id
        self.seeds = tuple(range(context.seed, context.seed + claim.seeds))
        self.seed = context.seed
        self.out = context.out

    @property
    def console(self) -> Any:
        return self._context.console

    def out_file(self, name: str | Path) -> Path:
        """Path of a file in the output folder."""
        return self._context.out_file(name)

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        self._context.note(text)

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Bar]:
        """A progress bar, see :meth:`icml26_shared.console.Context.progress`."""
        return self._context.progress(description, total)

    def track(self, items: Iterable[Any], description: str, total: float | None = None) -> Iterable[Any]:
        """Iterate with a progress bar."""
        return self._context.track(items, description, total)

    def cached(self, key: Any, fn: Callable[[], Any]) -> Any:
        """``fn()``, computed once and remembered in the output folder, so an interrupted run resumes after it.

        Args:
            key: names the value within this claim; JSON-able, e.g. ``("l2", seed)``.
            fn: returns something JSON-able; the caller gets the value as JSON keeps it (tuples as lists, NaN as None),
                the same in the first run and in a resumed one.
        """
        return self._store.remember({"claim": self._claim.id, "key": key}, fn)

    def shared(self, key: Any, fn: Callable[[], Any]) -> Any:
        """``fn()``, computed once for all claims: those that look at one training run from several sides train it once.

        Kept in ``runs.jsonl`` of the output folder under the key and a hash of the sources that decide what the method
        gives, so a run outlives changes of commands, plug-ins and checks, and is made again after others.

        Args:
            key: names the value within the package and holds whatever it depends on (method, rate, seed); JSON-able.
            fn: as for :meth:`cached`.
        """
        if self._runs is None:
            return self.cached(key, fn)
        return self._runs.remember({"run": key, "sources": self.sources}, fn)

    @property
    def sources(self) -> str:
        """The hash of the method's sources: names files that outlive a run, such as trained weights."""
        return method_digest(self._context.distribution)


def needs_gpu(gib: float = 0.0) -> Callable[[ClaimContext], str | None]:
    """For ``Claim.needs``: a CUDA or ROCm device with at least ``gib`` GiB of memory."""

    def check(ctx: ClaimContext) -> str | None:
        import torch

        found = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(torch.cuda.device_count())]
        if any(memory >= gib for memory in found):
            return None
        return f"a GPU with {gib:g} GiB" if gib else "a GPU"

    return check


def run(
    claims: Sequence[Claim], context: Context | None = None, *, only: Sequence[str] = (), fresh: bool = False
) -> Report:
    """Check claims and report.

    Every finished measurement is kept in ``claims.jsonl`` of the output folder: an interrupted run resumes, a repeated
    one reports without measuring again. A file made by other sources of the package, another version or another seed is
    refused. Training runs that claims share are kept in ``runs.jsonl``. ``claims.json`` and ``claims.md`` are written
    at the end.

    Args:
        claims: what to check.
        context: of the command line; default: a silent one, writing to ``icml26-out``.
        only: ids of the claims to check; default all.
        fresh: forget what an earlier run measured for these claims, and all training runs that claims share.

    Raises:
        UserError: an unknown id.
        SettingsMismatch: the output folder has measurements made with other settings.
    """
    context = context or Context(quiet=True)
    chosen = _choose(claims, only)
    ids = {claim.id for claim in chosen}

    def forget(row: Mapping[str, Any]) -> bool:
        return row["claim"] in ids

    verdicts = []
    with (
        open_remembered(context, "claims.jsonl", ("claim", "key"), forget=forget if fresh else None) as store,
        open_remembered(
            context, "runs.jsonl", ("run", "sources"), forget=(lambda row: True) if fresh else None, any_sources=True
        ) as runs,
        context.progress("claims", len(chosen)) as bar,
    ):
        if len(store):
            context.note(f"going on from {len(store)} measurement(s) in {store.path}; --fresh measures again")
        for claim in chosen:
            bar.update(f"claims: {claim.id}")
            verdicts.append(_judge(claim, ClaimContext(context, store, claim, runs), store))
            bar.advance()
    report = Report(context.distribution, tuple(verdicts), environment(context.distribution))
    atomic_write_json(context.out_file("claims.json"), report)
    atomic_write_text(context.out_file("claims.md"), report.to_markdown() + "\n")
    return report


def run_command(context: Context, args: argparse.Namespace, claims: Sequence[Claim]) -> int:
    """The ``claims`` command of every package."""
    if args.list:
        return _list(context, _choose(claims, args.only or ()))
    readme = None
    if args.write is not None:
        if args.only:
            raise UserError("--write replaces the whole table, so it needs every claim; leave out --only")
        readme = find_readme(context.distribution, args.write)
        check_markers(readme, "claims")
    report = run(claims, context, only=args.only or (), fresh=args.fresh)
    rows = [[verdict.claim.id, verdict.verdict, verdict.figure, verdict.claim.rule_text] for verdict in report.verdicts]
    context.table(f"{context.name}: claims", ["claim", "verdict", "measured", "holds if"], rows)
    for verdict in report.verdicts:
        if verdict.kind == "needs":
            context.say(f"{verdict.claim.id}: where that is at hand, run: {verdict.claim.command}")
    context.say(report.summary_line)
    if readme is not None:
        write_between_markers(readme, "claims", report.to_markdown())
        context.note(f"wrote the table into {readme}")
    context.finish(report.to_json())
    return report.exit_code


def _choose(claims: Sequence[Claim], only: Sequence[str]) -> list[Claim]:
    ids = [claim.id for claim in claims]
    doubled = sorted({name for name in ids if ids.count(name) > 1})
    if doubled:
        raise ValueError(f"claim id(s) used twice: {', '.join(doubled)}")
    for name in only:
        if name not in ids:
            raise UserError(f"unknown claim {name!r}; choose from {', '.join(ids)}")
    return [claim for claim in claims if not only or claim.id in only]


def _list(context: Context, claims: Sequence[Claim]) -> int:
    rows = []
    for claim in claims:
        needs = claim.needs if isinstance(claim.needs, str) else ("see its command" if claim.needs else "")
        rows.append([claim.id, claim.statement, claim.source, claim.rule_text, needs])
    context.table(f"{context.name}: claims", ["claim", "statement", "source", "holds if", "needs"], rows)
    names = ("id", "statement", "source", "rule", "needs")
    context.finish([dict(zip(names, row, strict=True)) for row in rows])
    return 0


def _judge(claim: Claim, ctx: ClaimContext, store: JsonlStore) -> Verdict:
    start, seconds = time.perf_counter(), None
    try:
        missing = claim.needs(ctx) if callable(claim.needs) else claim.needs
        if missing:
            raise Needs(missing)
        kept = store.get((claim.id, _RESULT))
        result = _measure(claim, ctx) if kept is None else Result.restore(kept["value"])
        holds = _holds(claim, result)
        if kept is None:
            kept = {"claim": claim.id, "key": _RESULT, "value": result.store(), "measured": now()}
            store.append(kept)
            seconds = round(time.perf_counter() - start, 3)
    except Needs as needs:
        return Verdict(claim, f"needs: {needs}")
    except Exception as error:  # noqa: BLE001 - a check that crashes must not take the others with it
        ctx.note(f"{claim.id} crashed:\n{traceback.format_exc()}")
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Verdict(claim, f"error: {said}", traceback=traceback.format_exc())
    return Verdict(claim, "holds" if holds else "fails", result, ctx.seeds, seconds, kept["measured"])


def _measure(claim: Claim, ctx: ClaimContext) -> Result:
    if claim.check is None:
        raise Needs("a check of its own")
    found = claim.check(ctx)
    if found is None:
        raise TypeError(f"the check of {claim.id!r} returned None; return a Result, or raise Needs")
    result = found if isinstance(found, Result) else Result(measurements=found)  # type: ignore[arg-type]
    return replace(result, measurements={name: _measurement(m, ctx.seeds) for name, m in result.measurements.items()})


def _measurement(value: Any, seeds: tuple[int, ...]) -> Measurement:
    if isinstance(value, Measurement):
        return value
    plain = Measurement(value)
    return replace(plain, seeds=seeds) if len(plain.values) == len(seeds) else plain


def _holds(claim: Claim, result: Result) -> bool:
    if not claim.rules:
        if result.holds is None:
            raise TypeError(f"the rule of {claim.id!r} is text, so its Result must say holds=True or False")
        return bool(result.holds)
    holds = all(rule.holds(result.measurements) for rule in claim.rules)
    if result.holds is not None and result.holds != holds:
        raise ValueError(f"the check of {claim.id!r} says holds={result.holds}, its rules say {holds}")
    return holds
