"""`dppo audit`: what pruning would save on a rollout log, and what the popular ways to prune would bias."""

from __future__ import annotations

import argparse
from typing import Any

from dppo.config import PruningConfig
from dppo.logs import read_groups, replay
from icml26_shared.console import Context


def run(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Handler of the command."""
    if args.batch_prompts < 1:
        raise ValueError(f"--batch-prompts {args.batch_prompts}: at least 1")
    cfg = PruningConfig(prompt_rate=args.prompt_rate, completion_rate=args.completion_rate)
    groups = read_groups(args.log)
    result = replay(groups, cfg, prompts=args.batch_prompts, seed=ctx.seed).summary()
    ctx.table(
        f"{args.log}: {result['completions']} completions in {result['groups']} groups",
        ["dynamic pruning would", "value"],
        [
            ["find dead groups (free)", result["dead_groups"]],
            ["generate, share of tokens", result["generated_share"]],
            ["update on, share of tokens", result["updated_share"]],
            ["speed up (generated + 3 × updated)", result["speedup_tokens"]],
            ["inflate the gradient's variance by", result["variance_inflation"]],
            ["keep of the effective sample size", result["ess_share"]],
        ],
    )
    ctx.table(
        "Bias of not re-weighting",
        ["method", "signal Σ |A|·tokens lost", "net push Σ A·tokens ÷ Σ |A|·tokens"],
        [[name, values["signal_lost"], values["drift"]] for name, values in result["bias"].items()],
    )
    ctx.say(_conclusion(result))
    return {"rates": [cfg.prompt_rate, cfg.completion_rate], **result}


def _conclusion(result: dict[str, Any]) -> str:
    if result["dead_groups"] == result["groups"]:
        return "All groups of this log are dead: nothing in it moves the policy, and all its updates are free to skip."
    if not result["signal"]:
        return "Every completion of this log with an advantage has length 0: there are no tokens to save or to lose."
    lost = {name: result["bias"][name]["signal_lost"] for name in ("cppo", "greso")}
    worst = max(lost, key=lambda name: (lost[name], name))
    return (
        f"Dynamic pruning would spend {1 / result['speedup_tokens']:.0%} of the tokens without bias; "
        f"{worst.upper()} would lose {lost[worst]:.1%} of this run's signal without making up for it."
    )
