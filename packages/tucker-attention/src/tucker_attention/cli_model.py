"""``tucker spectra``, ``tucker convert`` and ``tucker count``."""

from __future__ import annotations

import argparse
import csv
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.errors import UserError
from tucker_attention.counts import cache_width, param_count

if TYPE_CHECKING:
    from icml26_shared.console import Context

# width, heads, layers
SHAPES = {"gpt2": (768, 12, 12), "vit-b": (768, 12, 12), "llama3-1b": (2048, 32, 16), "smollm2": (576, 9, 30)}
GPT2_RANKS = ("8,128,128", "8,128,64", "8,64,64")


def ranks_argument(text: str) -> tuple[int, int, int]:
    """``8,128,64``."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != 3 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"ranks are three whole numbers such as 8,128,64, got {text!r}")
    return found[0], found[1], found[2]


# -- spectra -----------------------------------------------------------------------------------------------------------


def spectra_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``spectra``."""
    parser.add_argument("model", help="smollm2, minilm, or a local folder of a transformers model")
    parser.add_argument(
        "--energy", type=float, default=0.9, help="share of the energy that the table shows (default 0.9)"
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        default="spectra.html",
        help="report in --out: .html, .csv or .png (default spectra.html)",
    )


def spectra(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Table, report, plot."""
    from icml26_shared.checkpoint import atomic_write_text
    from tucker_attention.decomposition import ranks_for_energy
    from tucker_attention.spectra import TENSORS, attention_spectra

    suffix = Path(args.report).suffix
    if suffix not in (".html", ".csv", ".png"):
        raise UserError(f"--report {args.report!r} must end in .html, .csv or .png")
    if not 0 < args.energy <= 1:
        raise UserError(f"--energy must be in (0, 1], got {args.energy}")
    report = attention_spectra(load_model(args.model))
    energies = (args.energy, 0.99, 1.0)
    columns = ["layer", "tensor", *(f"ranks at {energy:g}" for energy in energies)]
    rows = report.rows(energies)
    ctx.table(f"{args.model}: mode ranks (head, query, key) of W and (head, output, value) of Wt", columns, rows)
    for name, why in report.refused.items():
        ctx.warn(f"{name} was left out: {why}")
    path = ctx.out_file(args.report)
    if suffix == ".png":
        path = plot_spectra(report, path)
    elif suffix == ".csv":
        text = io.StringIO()
        csv.writer(text).writerows([columns, *rows])
        atomic_write_text(path, text.getvalue())
    else:
        atomic_write_text(path, to_html(args.model, columns, rows))
    shares = [
        sum(ranks_for_energy(layer.squared[t], args.energy)) / sum(len(m) for m in layer.squared[t])
        for layer in report.layers
        for t in TENSORS
    ]
    said = (
        f"{args.energy:.0%} of the energy of each mode stands in {sum(shares) / len(shares):.0%} of its dimensions, on "
        f"average over {len(report.layers)} layers; report in {path}"
    )
    ctx.say(said)
    return {**report.to_json(), "report": path, "conclusion": said}


def to_html(model: str, columns: list[str], rows: list[list[Any]]) -> str:
    """A page with the table."""

    def line(cells: list[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    title = f"Attention spectra of {html.escape(model)}"
    body = "\n".join([line(columns, "th"), *(line(row, "td") for row in rows)])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font-family:sans-serif}td,th{padding:.2em .8em;text-align:left}</style></head>\n"
        f"<body><h1>{title}</h1>\n<table>\n{body}\n</table></body></html>\n"
    )


def plot_spectra(report: Any, path: Path) -> Path:
    """Energy kept against rank, a panel a mode of each tensor, a line a layer."""
    from icml26_shared import plots
    from tucker_attention.spectra import TENSORS

    figure, axes = plots.figure(2, 3, size=(12, 7))
    for row, (tensor, modes) in enumerate(TENSORS.items()):
        for column, mode in enumerate(modes):
            ax = axes[row][column]
            for index, layer in enumerate(report.layers):
                squared = layer.squared[tensor][column]
                kept = (squared.cumsum(0) / squared.sum()).tolist()
                shade = index / max(1, len(report.layers) - 1)
                ax.plot(range(1, len(kept) + 1), kept, color=(0.1, 0.35 + 0.4 * shade, 0.7 - 0.5 * shade), alpha=0.8)
            ax.set(
                xlabel=f"rank of the {mode} mode",
                ylabel="share of the energy",
                ylim=(0, 1.02),
                title=f"{tensor}, {mode}",
            )
    figure.tight_layout()
    return plots.save(figure, path)[0]


# -- convert -----------------------------------------------------------------------------------------------------------


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``convert``."""
    parser.add_argument("model", help="smollm2, minilm, or a local folder of a transformers model")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--energy", type=float, help="share of each mode's energy to keep; 1.0 keeps the model")
    size.add_argument("--ranks", type=ranks_argument, metavar="R1,R2,R3", help="ranks of both tensors")
    size.add_argument("--budget", type=int, help="attention parameters in all")
    parser.add_argument("--text", type=Path, help="text file: fit what the layers see of it (calibration)")
    parser.add_argument("--layers", help="regular expression over module names (default: all)")
    parser.add_argument("--rope", choices=("latent", "head"), help="for models with RoPE; head keeps it exactly")


def convert(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Convert, save, say what it weighs."""
    from icml26_shared import models
    from tucker_attention.integrations.models import convert_model
    from tucker_attention.integrations.transformers import register
    from tucker_attention.spectra import attention_layers

    register()
    model, tokenizer = models.load(args.model)
    before = sum(p.numel() for _, module in attention_layers(model) for p in module.parameters())
    whole = sum(p.numel() for p in model.parameters())
    calibration = None if args.text is None else text_batches(tokenizer, args.text)
    convert_model(
        model, ranks=args.ranks, energy=args.energy, budget=args.budget, calibration=calibration, layers=args.layers,
        rope=args.rope,
    )  # fmt: skip
    ctx.out_file(".")
    model.save_pretrained(ctx.out)
    tokenizer.save_pretrained(ctx.out)
    after = sum(p.numel() for p in model.parameters())
    shapes = {name: (plain["ranks"], plain["post_ranks"]) for name, plain in model.config.tucker.items()}
    ctx.table(
        "Converted", ["layer", "ranks of W", "ranks of Wt"], [[n, str(a), str(b)] for n, (a, b) in shapes.items()]
    )
    kept = before - whole + after
    ctx.say(f"attention parameters: {before:,} before, {kept:,} after ({kept / before:.1%}); saved in {ctx.out}")
    return {"before": before, "after": kept, "layers": shapes, "folder": ctx.out}


def text_batches(tokenizer: Any, path: Path, length: int = 256, rows: int = 16) -> list[dict[str, Any]]:
    """Rows of tokens of a text."""
    from icml26_shared.data.text import read_text

    ids = tokenizer(read_text(path), return_tensors="pt").input_ids[0]
    width = min(length, len(ids))
    return [{"input_ids": ids[i * width : (i + 1) * width][None]} for i in range(min(rows, len(ids) // width))]


def load_model(name: str) -> Any:
    """A transformers model in float32, for looking at."""
    from icml26_shared import models

    return models.load(name, dtype="float32")[0]


# -- count -------------------------------------------------------------------------------------------------------------


def count_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``count``."""
    parser.add_argument(
        "--config", choices=sorted(SHAPES), default="gpt2", help="shapes of a known model (default gpt2)"
    )
    parser.add_argument("--d-model", type=int, help="width, instead of --config's")
    parser.add_argument("--heads", type=int, help="heads, instead of --config's")
    parser.add_argument("--depth", type=int, help="layers, instead of --config's")
    parser.add_argument(
        "--ranks", type=ranks_argument, action="append", metavar="R1,R2,R3",
        help=f"ranks of a Tucker row; may be repeated (default {', '.join(GPT2_RANKS)})",
    )  # fmt: skip


def count(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """The table."""
    width, heads, layers = SHAPES[args.config]
    width, heads, layers = args.d_model or width, args.heads or heads, args.depth or layers
    if min(width, heads, layers) < 1 or width % heads:
        raise UserError(f"a width of {width} does not divide among {heads} heads; give --d-model and --heads that fit")
    shape: dict[str, Any] = {"d_model": width, "n_heads": heads}
    kinds: list[tuple[str, str, dict[str, Any]]] = [("MHA", "mha", {})]
    kinds += [
        (f"GQA-{g}", "gqa", {"n_kv_heads": g}) for g in (heads // 2, heads // 3, heads // 6, 1) if g and heads % g == 0
    ]
    kinds += [(f"MLA-{c}", "mla", {"latent": c}) for c in (width // 6, width // 12) if c]
    for ranks in args.ranks or [ranks_argument(text) for text in GPT2_RANKS]:
        if ranks[0] > heads or max(ranks[1:]) > width:
            raise UserError(f"ranks {ranks} are above the modes ({heads}, {width}, {width})")
        kinds.append((f"Tucker {list(ranks)}", "tucker", {"ranks": ranks}))
    whole = param_count("mha", **shape)
    rows: list[list[Any]] = []
    for label, kind, options in kinds:
        held = param_count(kind, **shape, **options)  # type: ignore[arg-type]
        cached = cache_width(kind, **shape, **options)  # type: ignore[arg-type]
        rows.append([label, held, 2 * held * layers / 1e6, 100 * held / whole, cached])
    columns = [
        "attention",
        "parameters a layer",
        "MB in bf16, all layers",
        "% of MHA",
        "cache: numbers a token and layer",
    ]
    ctx.table(f"width {width}, {heads} heads, {layers} layers", columns, rows)
    least: list[Any] = min(rows, key=lambda row: int(row[1]))
    ctx.say(
        f"{least[0]} has the fewest attention parameters: {least[3]:.1f} % of MHA's, {whole / least[1]:.2f}x fewer."
    )
    return {
        "rows": [dict(zip(("attention", "parameters", "megabytes", "percent", "cache"), r, strict=True)) for r in rows]
    }
