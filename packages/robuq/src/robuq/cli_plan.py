"""``robuq sensitivity`` and ``robuq allocate``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.checkpoint import atomic_write_json
from icml26_shared.errors import UserError
from robuq.allocation import allocate_bits
from robuq.cli_model import batches_of, data_arguments, preset_arguments, resolve, settings_of
from robuq.integrations.pretrained import from_pretrained
from robuq.sensitivity import Sensitivity, measure_sensitivity
from robuq.surgery import macs_per_token

if TYPE_CHECKING:
    from icml26_shared.console import Context


def sensitivity_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sensitivity``."""
    preset_arguments(parser)
    data_arguments(parser)


def sensitivity(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and write ``sens.json``: sensitivities and MACs."""
    if args.text is None and args.data is None:
        raise UserError("sensitivity needs calibration data: --text FILE or --data FILE.safetensors")
    path, factory = resolve(args.checkpoint)
    batches, forward_fn = batches_of(args, path)
    model = from_pretrained(path, settings_of(args), model_factory=factory, batches=batches, forward_fn=forward_fn)
    measured = measure_sensitivity(model, batches, forward_fn)
    target = ctx.out_file("sens.json")
    macs = {name: count for name, count in macs_per_token(model).items() if name in measured.values}
    result = {"sensitivity": measured.to_json(), "macs": macs}
    atomic_write_json(target, result)
    rows = [[name, *(measured.values[name][b] for b in measured.bits)] for name in measured.layers]
    ctx.table("sensitivity", ["layer", *(f"{b} bit" for b in measured.bits)], rows)
    ctx.say(f"wrote {target}; next: robuq allocate --avg 2 {target}")
    return {**result, "path": target}


def allocate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``allocate``."""
    parser.add_argument("sensitivity", type=Path, help="sens.json of `robuq sensitivity`")
    parser.add_argument("--avg", type=float, required=True, help="average bits")
    parser.add_argument("--solver", choices=("dp", "greedy", "uniform"), default="dp")
    parser.add_argument("--weights", choices=("macs", "layers"), default="macs", help="what bits are averaged over")
    parser.add_argument("--costs", type=Path, help="JSON: layer to bits to measured cost, in place of MACs times bits")


def allocate(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Solve and write ``plan.json``."""
    try:
        kept = json.loads(args.sensitivity.read_text("utf-8"))
        sens, macs = Sensitivity.from_json(kept["sensitivity"]), kept["macs"]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{args.sensitivity} is not what robuq sensitivity writes ({type(error).__name__}: {error})"
        ) from None
    costs = None
    if args.costs is not None:
        plain = json.loads(args.costs.read_text("utf-8"))
        costs = {layer: {int(b): float(c) for b, c in row.items()} for layer, row in plain.items()}
    plan = allocate_bits(sens, macs, args.avg, args.solver, weights=args.weights, costs=costs)
    target = ctx.out_file("plan.json")
    plan.save(target)
    ctx.table("plan", ["layer", "bits", "sensitivity"], [[n, b, sens.values[n][b]] for n, b in plan.bits.items()])
    ctx.say(
        f"average {plan.avg:.3f} bits, objective {plan.objective:.4g} (no plan is below {plan.lower_bound:.4g}"
        f"{'' if plan.exact else '; the budget was rounded to a grid'}); wrote {target}"
    )
    return {**plan.to_json(), "path": target}
