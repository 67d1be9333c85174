"""The ``maxrl`` command line."""

from __future__ import annotations

from icml26_shared.cli import App

app = App(
    "maxrl",
    distribution="maxrl",
    summary="Maximum-likelihood reinforcement learning from pass/fail rewards (arXiv 2602.02710).",
)
app.standard(
    demo="maxrl.demo:run",
    claims="maxrl.claims:CLAIMS",
    bench="maxrl.bench:run",
    bench_arguments="maxrl.bench:arguments",
)
_ROLLOUTS, _TRAIN, _MAZE = "maxrl.cli_rollouts", "maxrl.cli_train", "maxrl.cli_maze"
app.command(
    "score",
    f"{_ROLLOUTS}:score",
    help="read any trainer's rollouts: what your group size optimises, and which prompts are dead",
    arguments=f"{_ROLLOUTS}:score_arguments",
)
app.command(
    "compare",
    f"{_ROLLOUTS}:compare",
    help="two coverage curves: plot, test-time efficiency and its interval",
    arguments=f"{_ROLLOUTS}:compare_arguments",
)
app.command("train", f"{_TRAIN}:train", help="train a model with MaxRL in TRL", arguments=f"{_TRAIN}:train_arguments")
app.command(
    "evaluate",
    f"{_TRAIN}:evaluate",
    help="pass@k of a model on prompts with a verifier",
    arguments=f"{_TRAIN}:evaluate_arguments",
)
app.command("maze make", f"{_MAZE}:make", help="write mazes as prompts", arguments=f"{_MAZE}:make_arguments")
app.command("maze play", f"{_MAZE}:play", help="show a maze and judge a walk", arguments=f"{_MAZE}:play_arguments")


def main() -> None:
    """Console script."""
    app.main()
