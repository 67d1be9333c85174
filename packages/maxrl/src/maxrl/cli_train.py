"""``maxrl train`` and ``maxrl evaluate``: a model, a file of prompts, a verifier."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from icml26_shared import models
from icml26_shared.errors import UserError

if TYPE_CHECKING:
    from icml26_shared.console import Context


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="local Hugging Face folder, a .gguf file, or smollm2")
    parser.add_argument(
        "--data", required=True, help='.jsonl, .json or .parquet with rows {"prompt": ..., "answer": ...}'
    )
    parser.add_argument(
        "--verifier", default="exact", help="exact, boxed, regex, maze, or module:function (default exact)"
    )
    parser.add_argument(
        "--sandbox", action="store_true", help="run the verifier in a process of its own, with a time limit"
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a sandboxed verdict may take (default 10)")
    parser.add_argument(
        "--max-verifier-failures",
        type=int,
        default=100,
        help="stop after this many failures of the verifier (default 100)",
    )
    parser.add_argument("--chat", action="store_true", help="ask through the tokenizer's chat template")
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    models.dtype_argument(parser, "bfloat16", "float32")


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``train``."""
    _common(parser)
    parser.add_argument("--config", help="YAML file with fields of MaxRLConfig")
    parser.add_argument("--resume", default="auto", help="auto (default), no, or a checkpoint folder")
    parser.add_argument("--steps", type=int, help="max_steps, over the config's")


def train(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train in TRL; ``metrics.jsonl``, checkpoints and ``report.md`` go to ``--out``."""
    from maxrl.integrations.trl_run import run_training

    return run_training(ctx, args)


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``evaluate``."""
    _common(parser)
    parser.add_argument("-n", type=int, default=64, help="rollouts of each prompt (default 64)")
    parser.add_argument("--k", default="1,8,64", help="numbers of attempts, each at most n (default 1,8,64)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of a rollout (default 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="sampling temperature (default 0.6, the paper's)"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus (default 0.95, the paper's)")
    parser.add_argument("--batch", type=int, default=16, help="rollouts generated at once (default 16)")
    parser.add_argument("--file", default="curve.json", help="where the curve goes, in --out unless absolute")


def evaluate(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Sample, verify, and write the coverage curve; every finished prompt is kept, so a stopped run goes on."""
    import torch

    from icml26_shared.checkpoint import JsonlStore, atomic_write_json
    from maxrl.coverage import PassAtKCurve
    from maxrl.eval.loading import load_model
    from maxrl.eval.prompts import load_prompts
    from maxrl.eval.verifiers import Scorer

    ks = _ks(args.k, args.n)
    prompts = load_prompts(args.data, args.limit)
    scorer = Scorer(args.verifier, sandbox=args.sandbox, timeout=args.timeout, max_failures=args.max_verifier_failures)
    args.dtype = models.chosen_dtype(args.dtype)
    model, tokenizer = load_model(args.model, args.dtype)
    settings = {
        name: getattr(args, name)
        for name in ("model", "data", "verifier", "chat", "n", "new_tokens", "temperature", "top_p", "dtype", "batch")
    }
    try:
        with (
            JsonlStore(
                ctx.out_file("evaluate.jsonl"), key=("prompt",), settings={**settings, "seed": ctx.seed}
            ) as store,
            ctx.progress("evaluate", len(prompts)) as bar,
        ):
            for i, prompt in enumerate(prompts):
                if not store.done((i,)):
                    # Its own seed for every prompt: the result does not depend on where a run was stopped.
                    torch.manual_seed(ctx.seed * 1_000_003 + i)
                    texts = _sample(model, tokenizer, prompt.prompt, args)
                    rewards = scorer(texts, [prompt.answer] * len(texts))
                    scored = [r for r in rewards if r == r]
                    store.append({"prompt": i, "n": len(scored), "passed": int(sum(r >= 0.5 for r in scored))})
                bar.advance()
            rows = sorted(store.rows(), key=lambda row: row["prompt"])[: len(prompts)]
    finally:
        scorer.close()
    usable = [row for row in rows if row["n"] >= max(ks)]
    if not usable:
        raise UserError(
            f"no prompt has {max(ks)} rollouts with a verdict: look at the verifier, or ask for smaller --k"
        )
    curve = PassAtKCurve.from_counts([r["n"] for r in usable], [r["passed"] for r in usable], ks)
    low, high = curve.interval(seed=ctx.seed)
    ctx.table(
        f"{args.model} on {args.data}: {len(usable)} prompts, {args.n} rollouts each",
        ["k", "pass@k", "95 % low", "high"],
        [[k, v, lo, hi] for k, v, lo, hi in zip(curve.ks, curve.values, low, high, strict=True)],
    )
    skipped = len(rows) - len(usable)
    if skipped:
        ctx.warn(f"{skipped} prompts have fewer than {max(ks)} rollouts with a verdict and were left out")
    result = {**curve.to_dict(), "passed": [r["passed"] for r in usable], "n": args.n, "settings": settings}
    path = ctx.out_file(args.file)
    atomic_write_json(path, result)
    ctx.say(f"curve: {path}")
    return {**result, "file": str(path), "verifier_failures": scorer.failures}


def _ks(text: str, n: int) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--k {text!r}: whole numbers separated by commas, such as 1,8,64") from None
    if n < 1 or not ks or ks[0] < 1 or ks[-1] > n:
        raise UserError(f"--k {text} with -n {n}: every k must lie in 1..n; draw more rollouts or lower k")
    return ks


def _sample(model: Any, tokenizer: Any, prompt: str, args: argparse.Namespace) -> list[str]:
    import torch

    if args.chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not args.chat).to(model.device)
    texts: list[str] = []
    while len(texts) < args.n:
        with torch.inference_mode():
            out = model.generate(
                **inputs,
                do_sample=True,
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=0,
                max_new_tokens=args.new_tokens,
                num_return_sequences=min(args.batch, args.n - len(texts)),
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            )
        texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
