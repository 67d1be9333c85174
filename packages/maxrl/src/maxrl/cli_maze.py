"""``maxrl maze make`` and ``maxrl maze play``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.checkpoint import atomic_write_text
from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from icml26_shared.console import Context


def make_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``maze make``."""
    parser.add_argument("--size", type=int, default=17, help="odd width of the grid (default 17)")
    parser.add_argument("--n", type=int, default=1000, help="number of mazes (default 1000)")
    parser.add_argument(
        "--file", default="maze.jsonl", help="where to write, in --out unless absolute (default maze.jsonl)"
    )


def make(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Write mazes in the public format, with ``prompt`` and ``answer`` for train and evaluate."""
    from maxrl.eval.maze import make_mazes

    if args.n < 1:
        raise UserError(f"--n {args.n} must be 1 or more")
    rows = list(ctx.track(make_mazes(args.n, args.size, ctx.seed), "mazes", args.n))
    path = ctx.out_file(args.file)
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    lengths = [int(str(row["optimal_path_length"])) for row in rows]
    ctx.say(
        f"{len(rows)} mazes of {args.size} x {args.size} in {path}; shortest paths {min(lengths)} to "
        f"{max(lengths)} steps."
    )
    return {"file": str(path), "mazes": len(rows), "shortest": min(lengths), "longest": max(lengths)}


def play_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``maze play``."""
    parser.add_argument("--size", type=int, default=9, help="odd width of the grid (default 9)")
    parser.add_argument("--file", help="take a maze of this file instead of a new one")
    parser.add_argument("--index", type=int, default=0, help="which maze of the file (default the first)")
    parser.add_argument("--actions", help='walk to judge, such as "DOWN DOWN RIGHT DONE"; default: the shortest path')


def play(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Draw a maze and a walk through it, and judge the walk."""
    import numpy as np

    from maxrl.eval.maze import ACTIONS, judge, load_mazes, make_maze

    if args.file is not None:
        if not Path(args.file).is_file():
            raise UserError(f"no file at {args.file}; maxrl maze make writes one")
        mazes = load_mazes(args.file)
        if not 0 <= args.index < len(mazes):
            raise UserError(f"--index {args.index}: {args.file} holds {len(mazes)} mazes, counted from 0")
        maze = mazes[args.index][0]
    else:
        maze = make_maze(args.size, np.random.default_rng(ctx.seed))
    best = maze.shortest_path()
    answer = args.actions if args.actions is not None else " ".join([*best, "DONE"])
    walk = [word for word in answer.split() if word in ACTIONS]
    passed = judge(answer, maze)
    ctx.say(maze.render(walk))
    ctx.say(f"{'passes' if passed else 'fails'}: {len(walk)} steps; the shortest path has {len(best)}.")
    return {"passed": passed, "steps": len(walk), "shortest": len(best), "prompt": maze.prompt}
