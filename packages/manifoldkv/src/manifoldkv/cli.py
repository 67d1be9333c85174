"""The ``manifoldkv`` command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared import models
from icml26_shared.cli import App
from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from icml26_shared.console import Context

app = App(
    "manifoldkv",
    distribution="manifoldkv",
    summary="Training-free KV-cache compression by distance to the key centroid (arXiv 2602.08343).",
)
app.standard(
    demo="manifoldkv.demo:run",
    demo_arguments="manifoldkv.demo:arguments",
    claims="manifoldkv.claims:CLAIMS",
    bench="manifoldkv.bench:run",
    bench_arguments="manifoldkv.bench:arguments",
)
_EVAL = "manifoldkv.cli_eval"
app.command(
    "ruler generate",
    f"{_EVAL}:ruler_generate",
    help="write samples of a RULER-style long-context task",
    arguments=f"{_EVAL}:ruler_arguments",
)
app.command(
    "eval",
    f"{_EVAL}:evaluate",
    help="accuracy on RULER-style samples under several settings",
    arguments=f"{_EVAL}:eval_arguments",
)
app.command(
    "longbench",
    f"{_EVAL}:longbench",
    help="LongBench scores under several settings",
    arguments=f"{_EVAL}:longbench_arguments",
)
_VLLM_CHECK = "manifoldkv.integrations.vllm.check"
app.command(
    "vllm-check",
    f"{_VLLM_CHECK}:run",
    help="show the free blocks of a vLLM engine with the plug-in off and on",
    arguments=f"{_VLLM_CHECK}:arguments",
    resumable=False,
)


def main() -> None:
    """Console script."""
    app.main()


def _compression_arguments(parser: argparse.ArgumentParser) -> None:
    from manifoldkv.config import KVConfig

    parser.add_argument("--ratio", type=float, help="share of the tokens removed, in [0, 1) (default 0.5)")
    parser.add_argument("--budget", type=int, help="tokens kept per head, instead of --ratio")
    parser.add_argument(
        "--metric", default="auto", help="auto, l2, cosine, cosine_mean, knorm, decomposed, random, streaming"
    )
    parser.add_argument(
        "--window", type=int, help="tokens per window for local centroids (default: one global centroid)"
    )
    parser.add_argument("--phase", default="prefill", help="prefill, chunked, decode or both")
    parser.add_argument("--n-sink", type=int, default=KVConfig.n_sink, help="first tokens always kept")
    parser.add_argument("--n-recent", type=int, default=KVConfig.n_recent, help="last tokens always kept")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    models.dtype_argument(parser, "bfloat16", "float16", "float32")


def _read(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no file at {path}; give the path of a text file")
    text = file.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise UserError(f"{path} is empty; give a file with some text")
    return text


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2 or a local Hugging Face folder")
    parser.add_argument("--prompt", required=True, help="text file with the prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate (default 128)")
    parser.add_argument(
        "--explain",
        nargs=2,
        type=int,
        metavar=("LAYER", "HEAD"),
        help="show what this head kept of the prompt, and why",
    )
    _model_arguments(parser)
    _compression_arguments(parser)


@app.command(
    "generate", help="generate from a prompt file on a compressed cache", arguments=_generate_arguments, resumable=False
)
def generate(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Prefill, compress, generate; print the text and what the cache came to."""
    from manifoldkv.config import KVConfig

    cfg = KVConfig(
        metric=args.metric,
        compression_ratio=0.5 if args.ratio is None and args.budget is None else args.ratio,
        budget=args.budget,
        window=args.window,
        phase=args.phase,
        n_sink=args.n_sink,
        n_recent=args.n_recent,
        seed=ctx.seed,
    )
    text = _read(args.prompt)
    if args.new_tokens < 1:
        raise UserError(f"--new-tokens {args.new_tokens} must be 1 or more")
    model, tokenizer = models.load(
        args.model, dtype=models.chosen_dtype(args.dtype)
    )  # first: it names a wrong model at once
    if args.explain is not None:
        _check_explained(model, *args.explain)
    if args.ratio is None and args.budget is None:
        ctx.note("neither --ratio nor --budget given: half of the prompt's tokens are removed (--ratio 0.5)")
    from manifoldkv import compress

    inputs = tokenizer(text, return_tensors="pt")
    with compress(model, cfg, trace=args.explain is not None) as kv:
        out = model.generate(
            **inputs, max_new_tokens=args.new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    answer = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    stats = kv.stats()
    stored, dense = sum(s.stored_bytes for s in stats), sum(s.dense_bytes for s in stats)
    explained = None
    if args.explain is not None and any(layer.evictions for layer in stats):
        explained = kv.explain(*args.explain, tokenizer)
        ctx.say(f"{explained}\n")
    elif args.explain is not None:
        ctx.note("nothing was evicted, so there is nothing to explain")
    ctx.say(answer)
    ctx.note(
        f"{stats[0].metric}: {stats[0].stored_length} of {stats[0].logical_length} tokens stored per head, "
        f"{stored / 1e6:.2f} of {dense / 1e6:.2f} MB of keys and values"
    )
    result = {"text": answer, "stored_bytes": stored, "dense_bytes": dense, "layers": [vars(s) for s in stats]}
    return result if explained is None else result | {"explain": vars(explained)}


def _check_explained(model: Any, layer: int, head: int) -> None:
    """Refuse a layer or a head that the model hasn't, before minutes of generating."""
    config = model.config.get_text_config(decoder=True)
    layers, heads = config.num_hidden_layers, getattr(config, "num_key_value_heads", config.num_attention_heads)
    if not 0 <= layer < layers:
        raise UserError(
            f"--explain: layer={layer} is not a compressed layer; those are {', '.join(map(str, range(layers)))}"
        )
    if not 0 <= head < heads:
        raise UserError(f"--explain: head={head} is not one of the {heads} key-value heads (0 ... {heads - 1})")


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="smollm2 or a local Hugging Face folder")
    parser.add_argument(
        "--text", help="text file to calibrate on, like what the model will see (default: a built-in noise text)"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="calibration tokens at most (default 1024)")
    _model_arguments(parser)


@app.command("diagnose", help="say which metric fits a model, and why", arguments=_diagnose_arguments, resumable=False)
def diagnose(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Run calibration text through the model and apply the rule of key geometry."""
    if args.tokens < 12:
        raise UserError(f"--tokens {args.tokens} is too few to diagnose; give 256 or more")
    text = _read(args.text) if args.text else None
    from manifoldkv.geometry import diagnose as run

    model, tokenizer = models.load(args.model, dtype=models.chosen_dtype(args.dtype))
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = args.tokens
    if isinstance(context, int) and tokens > context:
        ctx.note(f"--tokens {tokens} is beyond the model's context; calibrating on {context} tokens")
        tokens = context
    ids = tokenizer(text or _NOISE * (tokens // 20 + 1), return_tensors="pt").input_ids[:, :tokens]
    found = run(model, ids)
    columns = ["layer", "cv", "agree", "upper", "lower", "top-50 % overlap", "metric"]
    rows = [[index, *_numbers(layer)] for index, layer in enumerate(found.layers)]
    ctx.table(
        f"Key geometry of {args.model} over {found.tokens} tokens", columns, [*rows, ["model", *_numbers(found.model)]]
    )
    ctx.say(f"metric: {found.metric}, because {found.model.reason}")
    return found.to_dict()


def _numbers(geometry: Any) -> list[Any]:
    return [geometry.cv, geometry.agree, geometry.upper, geometry.lower, geometry.overlap, geometry.metric]


_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
