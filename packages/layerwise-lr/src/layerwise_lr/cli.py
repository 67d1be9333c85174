"""The ``layerwise-lr`` command line, also called ``llr``."""

from __future__ import annotations

from icml26_shared.cli import App

app = App(
    "layerwise-lr",
    distribution="layerwise-lr",
    summary="Heavy-tail exponents of every weight matrix, and a learning rate for each (LLR, ICML 2026).",
)
app.standard(
    demo="layerwise_lr.demo:run",
    claims="layerwise_lr.claims:CLAIMS",
    bench="layerwise_lr.bench:run",
    demo_arguments="layerwise_lr.demo:arguments",
    bench_arguments="layerwise_lr.bench:arguments",
)
_ANALYZE = "layerwise_lr.cli_analyze"
app.command(
    "analyze",
    f"{_ANALYZE}:analyze",
    help="exponent, distance, stable rank, ... of every matrix of a checkpoint",
    arguments=f"{_ANALYZE}:analyze_arguments",
    resumable=False,
)
app.command(
    "plan",
    f"{_ANALYZE}:plan",
    help="the ratio of each matrix's learning rate that its exponent gives",
    arguments=f"{_ANALYZE}:plan_arguments",
    resumable=False,
)
app.command(
    "compare",
    f"{_ANALYZE}:compare",
    help="which layers moved between two checkpoints of one model",
    arguments=f"{_ANALYZE}:compare_arguments",
    resumable=False,
)
app.command(
    "pretrain",
    "layerwise_lr.cli_pretrain:pretrain",
    help="the paper's pre-training runs on FineWeb, resumably (needs GPUs)",
    arguments="layerwise_lr.cli_pretrain:arguments",
)


def main() -> None:
    """Console script."""
    app.main()
