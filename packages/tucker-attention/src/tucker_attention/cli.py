"""The ``tucker-attention`` command line, ``tucker`` for short."""

from __future__ import annotations

from icml26_shared.cli import App

app = App(
    "tucker-attention",
    distribution="tucker-attention",
    summary="One low-rank attention that contains MHA, MQA, GQA and MLA (Tucker Attention, arXiv 2603.30033).",
)
app.standard(
    demo="tucker_attention.demo:run",
    claims="tucker_attention.claims:CLAIMS",
    bench="tucker_attention.bench:run",
    bench_arguments="tucker_attention.bench:arguments",
)
_MODEL = "tucker_attention.cli_model"
app.command(
    "spectra",
    f"{_MODEL}:spectra",
    help="how low-rank a model's attention is, in every mode and layer",
    arguments=f"{_MODEL}:spectra_arguments",
    resumable=False,
)
app.command(
    "convert",
    f"{_MODEL}:convert",
    help="replace a model's attention by Tucker attention and save it",
    arguments=f"{_MODEL}:convert_arguments",
    resumable=False,
)
app.command(
    "count",
    f"{_MODEL}:count",
    help="attention parameters and cache of MHA, GQA, MLA and Tucker at a model's shapes",
    arguments=f"{_MODEL}:count_arguments",
    resumable=False,
)


def main() -> None:
    """Console script."""
    app.main()
