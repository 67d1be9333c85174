"""``llr analyze``, ``llr plan`` and ``llr compare``."""

from __future__ import annotations

import argparse
import csv
import io
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.checkpoint import atomic_write_text
from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from icml26_shared.console import Context
    from layerwise_lr.measurement import LayerReport, Measure

_COLUMNS = ("name", "shape", "alpha", "sigma", "D", "xmin", "n_tail", "alphahat", "stable_rank", "entropy", "note")


def _measure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fit",
        choices=("median", "gof", "fix_finger"),
        default="median",
        help="where the tail starts (default median)",
    )
    parser.add_argument(
        "--method",
        choices=("auto", "svd", "gram", "lanczos"),
        default="auto",
        help="how eigenvalues are computed (default auto)",
    )
    parser.add_argument("--min-dim", type=int, default=50, help="fewest eigenvalues that are fitted (default 50)")
    parser.add_argument("--farms", action="store_true", help="average over square windows of each matrix")


def _measure(args: argparse.Namespace) -> Measure:
    from layerwise_lr.measurement import Measure

    return Measure(fit=args.fit, method=args.method, min_dim=args.min_dim, farms=args.farms)


def _source(name: str) -> str | Path:
    """A path, or one of the models that packages carry."""
    from icml26_shared import models

    return models.path(name) if name in models.MODELS else Path(name)


def analyze_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``analyze``."""
    parser.add_argument("model", help="folder with *.safetensors, a .safetensors or .gguf file, smollm2 or minilm")
    _measure_arguments(parser)
    parser.add_argument("--embeddings", action="store_true", help="fit embeddings and the head too")
    parser.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--png", metavar="DIR", help="draw the spectrum of each fitted matrix, with its tail, into DIR")


def analyze(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """One row a matrix."""
    from layerwise_lr.integrations.checkpoint import reports_of

    source, measure = _source(args.model), _measure(args)
    reports = list(reports_of(source, measure, args.embeddings))
    _show(ctx, f"{args.model}: {args.fit}", reports)
    fitted = sorted((r for r in reports if r.fitted), key=lambda r: r.alpha)
    if args.csv:
        atomic_write_text(Path(args.csv), to_csv(reports))
    plots = _draw(ctx, source, measure, fitted, Path(args.png)) if args.png else []
    if fitted:
        mean = sum(r.alpha for r in fitted) / len(fitted)
        ctx.say(
            f"{len(fitted)} of {len(reports)} matrices fitted; mean alpha {mean:.3f}, from {fitted[0].alpha:.3f} "
            f"({fitted[0].name}, heaviest tail) to {fitted[-1].alpha:.3f} ({fitted[-1].name})."
        )
    else:
        ctx.say(f"None of {len(reports)} matrices was fitted; the column 'note' says why.")
    return {"layers": [r.to_json() for r in reports], "csv": args.csv, "plots": plots}


def to_csv(reports: list[LayerReport]) -> str:
    """One line a matrix, all fields; the shape as 3x4."""
    names = [f.name for f in fields(reports[0])] if reports else []
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for report in reports:
        writer.writerow({**report.to_json(), "shape": _shape(report)})
    return text.getvalue()


def _shape(report: LayerReport) -> str:
    return "x".join(map(str, report.shape))


def _show(ctx: Context, title: str, reports: list[LayerReport]) -> None:
    columns = [c for c in _COLUMNS if c != "note" or any(r.note for r in reports)]
    rows = []
    for report in reports:
        row = {**report.to_json(), "shape": _shape(report)}
        rows.append(["" if isinstance(row[c], float) and math.isnan(row[c]) else row[c] for c in columns])
    ctx.table(title, columns, rows)


def _draw(ctx: Context, source: Any, measure: Measure, fitted: list[LayerReport], folder: Path) -> list[str]:
    """Histogram of ln lambda of each matrix with the threshold and the fitted power law."""
    from layerwise_lr.integrations.checkpoint import stored_matrices
    from layerwise_lr.layers import clean_name

    wanted = {report.name: report for report in fitted}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for tensor in ctx.track([t for t in stored_matrices(source) if clean_name(t.name) in wanted], "drawing"):
        report = wanted[clean_name(tensor.name)]
        paths.append(draw_spectrum(measure.eigenvalues(tensor.read()), report, folder / f"{report.name}.png"))
    return paths


def draw_spectrum(eigs: Any, report: LayerReport, path: Path) -> str:
    """The empirical spectral density on logarithmic axes, its threshold and the power law above it."""
    import numpy as np

    from icml26_shared import plots

    values = eigs.double().cpu().numpy()
    values = values[values > 1e-7 * values[-1]]
    edges = np.geomspace(values[0], values[-1], 61)
    density = np.histogram(values, edges)[0] / (np.diff(edges) * eigs.numel())
    centres = np.sqrt(edges[1:] * edges[:-1])
    seen = density > 0
    figure, ax = plots.figure()
    tail = np.geomspace(report.xmin, values[-1], 50)
    share = report.n_tail / eigs.numel()
    law = share * (report.alpha - 1) / report.xmin * (tail / report.xmin) ** -report.alpha
    plots.lines(
        {"eigenvalues": (centres[seen], density[seen]), f"power law, alpha = {report.alpha:.3f}": (tail, law)},
        xlabel="eigenvalue of W Wᵀ", ylabel="spectral density", title=report.name, ax=ax, xscale="log", yscale="log",
    )  # fmt: skip
    ax.lines[0].set_linestyle("")
    ax.lines[1].set_marker("")
    ax.axvline(report.xmin, color="0.5", linestyle="--", linewidth=1, label=f"threshold {report.xmin:.3g}")
    ax.legend()
    # a name may end like a file's (".1"), which is no suffix
    return str(plots.save(figure, path)[0])


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``plan``."""
    parser.add_argument("model", help="folder with *.safetensors, a .safetensors or .gguf file, smollm2 or minilm")
    _measure_arguments(parser)
    parser.add_argument("--s1", type=float, default=1.0, help="smallest ratio (default 1)")
    parser.add_argument("--s2", type=float, default=3.0, help="largest ratio (default 3)")
    parser.add_argument("--assign", choices=("linear", "sqrt", "log2", "sigmoid"), default="linear", help="the map")
    parser.add_argument("--lr", type=float, help="base rate; adds a column with rates")


def plan(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """The ratios that a refresh at this checkpoint would aim for."""
    from layerwise_lr.config import LLRConfig
    from layerwise_lr.integrations.checkpoint import reports_of
    from layerwise_lr.targets import embedding_ratio, fitted_ratios

    if args.lr is not None and not args.lr > 0:
        raise UserError(f"--lr {args.lr} must be positive")
    reports = list(reports_of(_source(args.model), _measure(args)))
    config = LLRConfig(s1=args.s1, s2=args.s2, assign=args.assign, active_fraction=1)
    ratios = fitted_ratios({r.name: r for r in reports}, config)
    largest = embedding_ratio(ratios, config)
    rows = []
    for report in reports:
        ratio = ratios.get(report.name, largest if report.role != "matrix" else 1.0)
        row: dict[str, Any] = {"name": report.name, "alpha": report.alpha if report.fitted else None, "ratio": ratio}
        rows.append({**row, "lr": ratio * args.lr} if args.lr else row)
    columns = list(rows[0]) if rows else ["name", "alpha", "ratio"]
    cells = [["" if row[c] is None else row[c] for c in columns] for row in rows]
    ctx.table(f"{args.model}: learning rate ratios", columns, cells)
    if ratios:
        mean = sum(row["ratio"] for row in rows) / len(rows)
        ctx.say(
            f"{len(ratios)} matrices fitted; ratios from {min(ratios.values()):.3f} to {largest:.3f}, mean {mean:.3f}."
        )
    else:
        ctx.say("No matrix could be fitted, so all keep the base rate.")
    return {"ratios": rows, "s1": args.s1, "s2": args.s2, "assign": args.assign}


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``."""
    parser.add_argument("a", help="the earlier checkpoint")
    parser.add_argument("b", help="the later checkpoint")
    _measure_arguments(parser)


def compare(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Alpha before and after, and how far the weights went: ``||B - A|| / ||A||``."""
    from layerwise_lr.integrations.checkpoint import stored_matrices
    from layerwise_lr.layers import clean_name, stored_roles

    measure = _measure(args)
    first, second = ({clean_name(t.name): t for t in stored_matrices(_source(s))} for s in (args.a, args.b))
    roles = stored_roles({name: t.shape for name, t in first.items()})
    both = [name for name in first if name in second and roles[name] == "matrix"]
    if not both:
        raise UserError(f"{args.a} and {args.b} have no matrix of the same name: they are not of one model")
    rows: list[dict[str, Any]] = []
    for name in ctx.track(both, "comparing"):
        if first[name].shape != second[name].shape:
            raise UserError(f"{name} is {first[name].shape} in {args.a} and {second[name].shape} in {args.b}")
        a, b = first[name].read().float(), second[name].read().float()
        before, after = measure(name, a), measure(name, b)
        size = float(a.norm())
        moved = float((b - a).norm()) / size if size else math.nan
        rows.append({"name": name, "alpha a": before.alpha, "alpha b": after.alpha,
                     "change": after.alpha - before.alpha, "moved": moved})  # fmt: skip
    rows.sort(key=lambda row: -row["moved"] if row["moved"] == row["moved"] else math.inf)
    columns = list(rows[0])
    ctx.table(f"{args.a} to {args.b}", columns, [list(row.values()) for row in rows])
    top = rows[0]
    ctx.say(f"{len(rows)} matrices in both; {top['name']} moved most, by {100 * top['moved']:.3g} % of its norm.")
    only = sorted(set(first) ^ set(second))
    if only:
        ctx.note(f"{len(only)} tensor(s) in only one of them: {', '.join(only[:3])}{', ...' if len(only) > 3 else ''}")
    return {"layers": rows, "only in one": only}
