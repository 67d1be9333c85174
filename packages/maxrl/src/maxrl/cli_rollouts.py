"""``maxrl score`` and ``maxrl compare``: what can be learnt from rollouts and curves that are there already."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from icml26_shared.console import Context


def score_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``score``."""
    parser.add_argument("file", help='JSON lines with a prompt id and a reward each: {"prompt_id": "a", "reward": 1}')
    parser.add_argument("--prompt-field", default="prompt_id", help="name of the prompt's id (default prompt_id)")
    parser.add_argument("--reward-field", default="reward", help="name of the reward (default reward)")
    parser.add_argument("--threshold", type=float, help="a reward of at least this is a success")
    parser.add_argument("--order", type=int, help="order T for the estimators that take one")


def score(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Histogram of successes, dead prompts, and what each estimator would ascend and weigh."""
    import torch

    from maxrl.advantages import group_statistics
    from maxrl.estimators import ESTIMATORS

    ids, rewards = [], []
    for prompt, reward in _rollouts(Path(args.file), args.prompt_field, args.reward_field):
        ids.append(prompt)
        rewards.append(reward)
    if not ids:
        raise UserError(f"{args.file} holds no rollouts")
    values = torch.tensor(rewards, dtype=torch.float64)
    valid = ~values.isnan()
    stats = group_statistics(values, group_ids=ids, threshold=args.threshold, valid=valid)
    sizes, successes = stats.size.tolist(), stats.successes.tolist()
    histogram = sorted(Counter(zip(sizes, successes, strict=True)).items())
    dead = stats.share_without_success + stats.share_all_success
    # Statistics give every group its size; from here on a rollout is a success or it is not.
    binary = (values >= args.threshold).double() if args.threshold is not None else values
    table = [_estimator_row(name, binary, ids, valid, sizes, args.order) for name in ESTIMATORS]
    ctx.table(
        f"{args.file}: {len(ids)} rollouts of {len(sizes)} prompts",
        ["rollouts N", "successes K", "prompts", "share [%]"],
        [[n, k, count, 100 * count / len(sizes)] for (n, k), count in histogram],
    )
    ctx.table(
        "what an estimator would do with them",
        ["estimator", "order of the objective", "live rollouts [%]", "largest", "smallest", "note"],
        [[r["estimator"], r["order"], r["live_percent"], r["largest"], r["smallest"], r["note"]] for r in table],
    )
    unscored = int((~valid).sum())
    ctx.say(
        f"{100 * stats.share_without_success:.1f} % of the prompts have no success and "
        f"{100 * stats.share_all_success:.1f} % only successes: {100 * dead:.1f} % give maxrl no gradient."
        + (f" {unscored} rollouts have no reward and were left out." if unscored else "")
    )
    return {
        "rollouts": len(ids),
        "prompts": len(sizes),
        "unscored": unscored,
        "share_without_success": stats.share_without_success,
        "share_all_success": stats.share_all_success,
        "histogram": [{"n": n, "k": k, "prompts": count} for (n, k), count in histogram],
        "estimators": table,
    }


def _estimator_row(
    name: str, values: Any, ids: list[Any], valid: Any, sizes: list[int], order: int | None
) -> dict[str, Any]:
    from maxrl.advantages import maxrl_advantages
    from maxrl.estimators import effective_order, get_estimator

    known = get_estimator(name)
    t = order if known.takes_order else None
    orders: list[int | None] = [effective_order(name, n, min(t, n) if t is not None else None) for n in set(sizes) if n]
    row: dict[str, Any] = {"estimator": name, "order": _range(orders), "live_percent": None, "largest": None}
    row |= {"smallest": None, "note": ""}
    try:
        a = maxrl_advantages(values, group_ids=ids, estimator=name, order=t, valid=valid)
    except ValueError as error:
        row["note"] = str(error).split(":")[0]
        return row
    row["live_percent"] = 100 * float((a != 0).float().mean())
    row["largest"], row["smallest"] = float(a.max()), float(a.min())
    if name == "maxrl" and set(sizes) == {2}:
        row["note"] = "with two rollouts this is RLOO"
    return row


def _range(orders: list[int | None]) -> str:
    known = sorted(t for t in orders if t is not None)
    if not known:
        return "none"
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _rollouts(file: Path, prompt_field: str, reward_field: str) -> Iterator[tuple[Any, float]]:
    if not file.is_file():
        raise UserError(f"no file at {file}: give a file with one rollout a line")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: an object with {prompt_field!r} and {reward_field!r} is needed")
            for name in (prompt_field, reward_field):
                if name not in row:
                    raise UserError(
                        f"{where} lacks {name!r}; it has {sorted(row)}; --prompt-field and --reward-field rename"
                    )
            yield from _row_rollouts(row[prompt_field], row[reward_field], where)


def _row_rollouts(prompt: Any, reward: Any, where: str) -> Iterator[tuple[Any, float]]:
    """One rollout, or several of a prompt when the reward is a list."""
    if isinstance(prompt, (list, dict)):
        prompt = json.dumps(prompt, sort_keys=True)
    for value in reward if isinstance(reward, list) else [reward]:
        if value is None:
            yield prompt, math.nan
            continue
        if not isinstance(value, (bool, int, float)):
            raise UserError(f"{where}: reward {value!r} is no number")
        yield prompt, float(value)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``."""
    parser.add_argument("a", help="curve of maxrl evaluate")
    parser.add_argument("b", help="curve to compare with")


def compare(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Coverage of both, and how many times fewer attempts a needs for what b reaches."""
    from icml26_shared import plots
    from maxrl.coverage import PassAtKCurve

    a, b = _curve(args.a), _curve(args.b)
    names = [Path(args.a).stem, Path(args.b).stem]
    if names[0] == names[1]:
        names = [args.a, args.b]
    ratio = PassAtKCurve.speedup(a, b)
    interval = PassAtKCurve.speedup_interval(a, b, seed=ctx.seed)
    rows, series = [], {}
    for name, curve in zip(names, (a, b), strict=True):
        low, high = curve.interval(seed=ctx.seed)
        series[name] = (curve.ks, curve.values, low, high)
        rows += [[name, k, v, lo, hi] for k, v, lo, hi in zip(curve.ks, curve.values, low, high, strict=True)]
    ctx.table("coverage", ["curve", "k", "pass@k", "95 % low", "high"], rows)
    figure = plots.lines(
        series, xlabel="attempts k", ylabel="share of prompts solved (pass@k)", title="Coverage", xscale="log"
    )
    png, _ = plots.save(figure, ctx.out_file("coverage.png"))
    if ratio is None:
        said = f"{names[0]} never reaches the coverage that {names[1]} has at k = {b.ks[-1]} ({b.values[-1]:.3f})."
    else:
        low_high = f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        goal = f"{names[1]}'s coverage of {b.values[-1]:.3f}"
        said = f"{names[0]} reaches {goal} with {ratio:.2f} times fewer attempts{low_high}."
    ctx.say(said)
    return {
        "speedup": ratio,
        "interval": interval,
        "a": a.to_dict(),
        "b": b.to_dict(),
        "plot": str(png),
        "conclusion": said,
    }


def _curve(path: str) -> Any:
    from maxrl.coverage import PassAtKCurve

    file = Path(path)
    if not file.is_file():
        raise UserError(f"no file at {path}: give a curve that maxrl evaluate wrote")
    try:
        return PassAtKCurve.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
