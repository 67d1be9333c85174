"""The ``robuq`` command line."""

from __future__ import annotations

from icml26_shared.cli import App

app = App(
    "robuq",
    distribution="robuq",
    summary="Ternary weights and 1 to 4 bit activations for transformers (RobuQ, arXiv 2509.23582).",
)
app.standard(
    demo="robuq.demo:run",
    claims="robuq.claims:CLAIMS",
    bench="robuq.bench:run",
    bench_arguments="robuq.bench:arguments",
)
_MODEL, _PLAN, _QAT, _FID = "robuq.cli_model", "robuq.cli_plan", "robuq.cli_qat", "robuq.cli_fid"
app.command(
    "quantize",
    f"{_MODEL}:quantize",
    help="quantise a checkpoint layer by layer and save it packed",
    arguments=f"{_MODEL}:quantize_arguments",
    resumable=False,
)
app.command(
    "export",
    f"{_MODEL}:export",
    help="write a packed model as safetensors, GGUF (TQ2_0, TQ1_0) or in BitNet's layout",
    arguments=f"{_MODEL}:export_arguments",
    resumable=False,
)
app.command(
    "inspect",
    f"{_MODEL}:inspect",
    help="what each layer of a packed model weighs, and how normal its tokens are",
    arguments=f"{_MODEL}:inspect_arguments",
    resumable=False,
)
app.command(
    "sensitivity",
    f"{_PLAN}:sensitivity",
    help="measure what few activation bits cost in each layer",
    arguments=f"{_PLAN}:sensitivity_arguments",
    resumable=False,
)
app.command(
    "allocate",
    f"{_PLAN}:allocate",
    help="choose bits for every layer within an average",
    arguments=f"{_PLAN}:allocate_arguments",
    resumable=False,
)
app.command("qat", f"{_QAT}:qat", help="train with quantisation, resumably", arguments=f"{_QAT}:qat_arguments")
app.command(
    "eval-fid",
    f"{_FID}:eval_fid",
    help="measure the Frechet distance between two sets of images or features",
    arguments=f"{_FID}:eval_fid_arguments",
    resumable=False,
)


def main() -> None:
    """Console script."""
    app.main()
