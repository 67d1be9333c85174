"""The ``dppo`` command line."""

from __future__ import annotations

import argparse

from icml26_shared.cli import App

app = App(
    "dppo",
    distribution="dppo",
    summary="Dynamic pruning for GRPO-type training: fewer rollouts, same expected gradient (arXiv 2603.04135).",
)
app.standard(
    demo="dppo.demo:run",
    demo_arguments="dppo.demo:arguments",
    claims="dppo.claims:CLAIMS",
    bench="dppo.bench:run",
)


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", help='JSONL, a row a completion: {"prompt_id", "reward", "length", ["advantage"], ["step"]}'
    )
    parser.add_argument("--prompt-rate", type=float, default=0.5, help="r_q (default 0.5)")
    parser.add_argument("--completion-rate", type=float, default=0.5, help="r_o (default 0.5)")
    parser.add_argument("--batch-prompts", type=int, default=32, help="groups a step, where rows have no step (32)")


def _pack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lengths", help='token counts: one a line, or JSONL rows with "length"')
    parser.add_argument("--capacity", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--window", type=int, default=64, help="look-ahead (default 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a padded batch (default 8)")
    parser.add_argument(
        "--overflow", default="error", choices=("error", "own_row", "truncate"), help="items longer than a row"
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="YAML file; see configs/ of the source distribution")
    parser.add_argument("--resume", default="auto", help="auto (default), no, or a checkpoint folder")


app.command(
    "audit", "dppo.cli_audit:run", help="what pruning would save on a rollout log, and what it would bias",
    arguments=_audit_arguments,
)  # fmt: skip
app.command(
    "pack", "dppo.cli_pack:run", help="compare packers on a list of sequence lengths", arguments=_pack_arguments
)
app.command(
    "train", "dppo.cli_train:run", help="train a model with TRL and dynamic pruning", arguments=_train_arguments
)


def main() -> None:
    """Console script."""
    app.main()
