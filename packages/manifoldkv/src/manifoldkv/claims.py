"""The paper's claims (arXiv 2602.08343) as checks; the thresholds are the specification's.

The set-up of the two trained recall models (length, ratio, steps, values nobody asks for) was chosen after trial runs.

Accuracy claims use SmolLM2-135M-Instruct on RULER-style tasks, 40 samples a cell, the context compressed before the
question is seen, no protected tokens. All accuracy claims share their answers: one prefill serves every setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from icml26_shared import models
from icml26_shared.checkpoint import JsonlStore, SettingsMismatch
from icml26_shared.claims import Claim, ClaimContext, Measurement, Needs, Result, Rule, paired
from icml26_shared.environment import source_digest
from manifoldkv import __version__, claims_vllm
from manifoldkv.baselines import keydiff
from manifoldkv.config import KVConfig

SAMPLES = 40
PROMPTS = (400, 1024)
SINGLE, MULTI = ("niah_single_1", "niah_single_2"), ("niah_3key",)
_ESSAY = ("niah_single_2",)  # its haystack comes with no package
_GENERATED = 128
_NEW_TOKENS = 16
_PLAIN: dict[str, Any] = {"n_sink": 0, "n_recent": 0}
_CALIBRATED: dict[str, Any] = {"metric": "decomposed", "rho0": "mean", "rho_x": "mean"}


def _rules_at(ratio: float) -> dict[str, KVConfig]:
    return {
        f"auto@{ratio}": KVConfig(metric="auto", compression_ratio=ratio, **_PLAIN),
        f"l2@{ratio}": KVConfig(metric="l2", compression_ratio=ratio, **_PLAIN),
        f"cosine@{ratio}": keydiff(ratio),
        f"calibrated@{ratio}": KVConfig(compression_ratio=ratio, **_CALIBRATED, **_PLAIN),
    }


# -- answers of SmolLM2, shared by the accuracy claims ----------------------------------------------------------------


def _answers(ctx: ClaimContext, tasks: Sequence[str], lengths: Sequence[int] = PROMPTS) -> list[dict[str, Any]]:
    """One row per (task and length, sample, setting), from disk where an earlier run got that far."""
    settings: dict[str, Any] = {"dense": None, **_rules_at(0.2), **_rules_at(0.5)}
    cells = [(task, length) for task in tasks for length in lengths]
    with _store(ctx, "claims-answers.jsonl", new_tokens=_NEW_TOKENS) as store:
        if any(task in _ESSAY and not _finished(store, task, length, settings) for task, length in cells):
            _require_essays()  # before the hours that the other tasks take
        return [row for task, length in cells for row in _cell(ctx, store, task, length, settings)]


def _require_essays() -> None:
    from icml26_shared.data import MissingData, find

    try:
        find("manifoldkv", "emerson_essays.txt")
    except MissingData as missing:
        raise Needs(f"the essay haystack ({missing})") from missing


def _finished(store: JsonlStore, task: str, length: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All answers of a task at a length, or none."""
    rows = [store.get((f"{task}@{length}", index, name)) for index in range(SAMPLES) for name in settings]
    found = [row for row in rows if row is not None]
    return found if len(found) == len(rows) else []


def _store(ctx: ClaimContext, name: str, **settings: Any) -> JsonlStore:
    """Answers of these very sources; those of other sources are not mixed in but made again."""
    settings |= {
        "dtype": models.faster_dtype(),
        "sources": source_digest("manifoldkv"),
        "version": __version__,
        "seed": ctx.seed,
    }
    path = ctx.out_file(name)
    try:
        return JsonlStore(path, settings=settings)
    except SettingsMismatch:
        ctx.note(f"{path}: made by other sources or settings, measured again")
        return JsonlStore(path, settings=settings, fresh=True)


def _cell(
    ctx: ClaimContext, store: JsonlStore, task: str, length: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    name = f"{task}@{length}"
    if done := _finished(store, task, length, settings):
        return done
    from icml26_shared.evaluation import ruler
    from manifoldkv.eval import run_eval

    model, tokenizer = models.load("smollm2", dtype=models.faster_dtype())
    samples = ruler.generate(task, tokenizer, length + _GENERATED, SAMPLES, seed=ctx.seed)
    samples = [replace(sample, task=name) for sample in samples]
    with ctx.progress(name, len(samples) * len(settings)) as bar:
        return run_eval(
            model, tokenizer, samples, settings, store=store, max_new_tokens=_NEW_TOKENS, advance=bar.advance
        )


def _scores(rows: Sequence[dict[str, Any]], setting: str, tasks: Sequence[str]) -> Measurement:
    """Scores of one setting over the samples of these tasks, in a fixed order, so that settings pair up."""
    chosen = [row for row in rows if row["config"] == setting and row["task"].partition("@")[0] in tasks]
    return Measurement([row["score"] for row in sorted(chosen, key=lambda row: (row["task"], row["index"]))])


def _by_cell(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean score by task@length and setting."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault(row["task"], {}).setdefault(row["config"], []).append(row["score"])
    return {task: {name: sum(v) / len(v) for name, v in by.items()} for task, by in cells.items()}


def check_light_compression(ctx: ClaimContext) -> Result:
    """At 20 % removed, ``auto`` against the full cache and against cosine.

    Where ``auto`` chooses cosine, as on SmolLM2, the last part of the rule compares like with like and cannot fail.
    """
    rows = _answers(ctx, [*SINGLE, *MULTI])
    everything = (*SINGLE, *MULTI)
    measured = {
        "auto, one key": _scores(rows, "auto@0.2", SINGLE),
        "full, one key": _scores(rows, "dense", SINGLE),
        "auto, three keys": _scores(rows, "auto@0.2", MULTI),
        "full, three keys": _scores(rows, "dense", MULTI),
        "auto": _scores(rows, "auto@0.2", everything),
        "cosine": _scores(rows, "cosine@0.2", everything),
        "l2": _scores(rows, "l2@0.2", everything),
        "calibrated": _scores(rows, "calibrated@0.2", everything),
    }
    return Result(measurements=measured, details={"cells": _by_cell(rows)})


def check_multi_key(ctx: ClaimContext) -> Result:
    """At 50 % removed and several keys, L2 against cosine, sample by sample."""
    rows = _answers(ctx, MULTI)
    l2, cosine, calibrated = (_scores(rows, f"{name}@0.5", MULTI) for name in ("l2", "cosine", "calibrated"))
    measured = {
        "l2 − cosine": paired(l2, cosine),
        "calibrated − cosine": paired(calibrated, cosine),
        "l2": l2,
        "cosine": cosine,
        "calibrated": calibrated,
        "full": _scores(rows, "dense", MULTI),
    }
    return Result(measurements=measured, details={"cells": _by_cell(rows), **_diagnosis(ctx)})


def _diagnosis(ctx: ClaimContext) -> dict[str, Any]:
    """What ``diagnose`` says of SmolLM2, to go with a result that depends on it."""

    def run() -> dict[str, Any]:
        from icml26_shared.evaluation import ruler
        from manifoldkv.geometry import diagnose

        model, tokenizer = models.load("smollm2", dtype=models.faster_dtype())
        (sample,) = ruler.generate("niah_3key", tokenizer, 400 + _GENERATED, 1, seed=ctx.seed)
        found = diagnose(model, tokenizer(sample.context, return_tensors="pt").input_ids)
        return {"metric": found.metric, "reason": found.model.reason}

    return {"diagnosis": ctx.cached("diagnosis", run)}


# -- the guideline ----------------------------------------------------------------------------------------------------


def check_guideline(ctx: ClaimContext) -> Result:
    """What the metric chosen by ``diagnose`` loses on each kind of model against the better of L2 and cosine.

    SmolLM2 at half the cache; built and trained models, whose needles are few, at a tenth. Where both metrics answer
    alike no choice can lose, so the rule also asks how many kinds tell them apart.
    """
    losses: dict[str, float] = {}
    details: dict[str, Any] = {}
    telling = 0
    for name, scores in {**_smollm2_case(ctx), **_geometry_cases(ctx), **_recall_cases(ctx)}.items():
        best = max(scores["l2"], scores["cosine"])
        chosen = scores["with the chosen"] if "with the chosen" in scores else scores[scores["chosen"]]
        losses[name] = best - chosen
        telling += abs(scores["l2"] - scores["cosine"]) > 0.03
        details[name] = scores
    measured = {f"loss on {name}": Measurement(value) for name, value in losses.items()}
    measured["models within 0.03 of the best"] = Measurement(
        sum(loss <= 0.03 + 1e-9 for loss in losses.values()) / len(losses)
    )
    measured["models that tell the metrics apart"] = Measurement(telling)
    return Result(measurements=measured, details=details)


def _smollm2_case(ctx: ClaimContext) -> dict[str, dict[str, Any]]:
    rows = _answers(ctx, MULTI)
    chosen = _diagnosis(ctx)["diagnosis"]["metric"]
    return {
        "SmolLM2": {
            "chosen": chosen,
            "l2": _scores(rows, "l2@0.5", MULTI).mean,
            "cosine": _scores(rows, "cosine@0.5", MULTI).mean,
        }
    }


def _geometry_cases(ctx: ClaimContext) -> dict[str, dict[str, Any]]:
    """Models built so that the winner is known; 40 of each geometry, each diagnosed alone, keeping 10 %."""

    def measure(kind: str, seed: int) -> dict[str, Any]:
        from manifoldkv import synthetic
        from manifoldkv.claims_geometry import build
        from manifoldkv.geometry import diagnose

        built = build(*getattr(synthetic, kind)(seed))
        found: dict[str, Any] = {"chosen": diagnose(built.model, built.context).metric, "full": built.accuracy(None)}
        for metric in ("l2", "cosine"):
            found[metric] = built.accuracy(KVConfig(metric=metric, compression_ratio=0.9, **_PLAIN))  # type: ignore[arg-type]
        return found

    cases = {}
    for kind in ("collision", "mirrored", "aligned", "constant_norm"):
        seeds = range(ctx.seed, ctx.seed + SAMPLES)
        runs = [ctx.cached(("built", kind, seed), partial(measure, kind, seed)) for seed in ctx.track(seeds, kind)]
        means = {name: sum(run[name] for run in runs) / SAMPLES for name in ("full", "l2", "cosine")}
        choices = Counter(run["chosen"] for run in runs)
        cases[f"{kind} models"] = {
            **means,
            "with the chosen": sum(run[run["chosen"]] for run in runs) / SAMPLES,
            "chosen": ", ".join(f"{metric} for {count}" for metric, count in choices.most_common()),
        }
    return cases


_STEPS = 1000
_CONTEXTS = 60


def _recall_cases(ctx: ClaimContext) -> dict[str, dict[str, Any]]:
    """Small models trained here to recall, with and without query-key normalisation."""
    cases = {}
    for qk_norm in (False, True):
        name = f"recall model {'with' if qk_norm else 'without'} QK-norm"
        key = ("recall", qk_norm)
        cases[name] = ctx.cached(key, partial(_recall_case, ctx, qk_norm, name))
    return cases


def _recall_case(ctx: ClaimContext, qk_norm: bool, name: str) -> dict[str, Any]:
    import torch

    from manifoldkv import claims_recall as recall
    from manifoldkv.geometry import diagnose_keys

    path = ctx.out_file(
        f"recall-{'qk-norm' if qk_norm else 'plain'}-{ctx.seed}-{source_digest('manifoldkv')}.safetensors"
    )
    with ctx.progress(f"training the {name}", _STEPS) as bar:
        model = recall.train(qk_norm, ctx.seed, _STEPS, path, advance=bar.advance)
    context, queries, answers = recall.sequences(_CONTEXTS, torch.Generator().manual_seed(10_000 + ctx.seed))
    found: dict[str, Any] = {"chosen": diagnose_keys(recall.keys_of(model, context[:16])).metric}
    found["full"] = recall.accuracy(model, context, queries, answers, None)
    for metric in ("l2", "cosine"):
        cfg = KVConfig(metric=metric, compression_ratio=0.9, **_PLAIN)  # type: ignore[arg-type]
        found[metric] = recall.accuracy(model, context, queries, answers, cfg)
    return found


# -- why: synthetic keys ----------------------------------------------------------------------------------------------


def _recalls(ctx: ClaimContext, kind: str, ratio: float, settings: dict[str, dict[str, Any]]) -> dict[str, Measurement]:
    def measure(seed: int) -> dict[str, float]:
        from manifoldkv import synthetic
        from manifoldkv.scoring import score_keys
        from manifoldkv.selection import select

        keys, needles = getattr(synthetic, kind)(seed)
        found = {}
        for name, setting in settings.items():
            cfg = KVConfig(compression_ratio=ratio, **setting, **_PLAIN)
            found[name] = synthetic.recall(select(score_keys(keys, cfg), cfg.keep_count(keys.shape[2])), needles)
        return found

    runs = [ctx.cached((kind, seed), partial(measure, seed)) for seed in ctx.track(ctx.seeds, kind)]
    return {name: Measurement([run[name] for run in runs], seeds=ctx.seeds) for name in settings}


_SCORERS: dict[str, dict[str, Any]] = {
    "l2": {"metric": "l2"},
    "cosine": {"metric": "cosine"},
    "knorm": {"metric": "knorm"},
    "calibrated": _CALIBRATED,
}


def check_collisions(ctx: ClaimContext) -> dict[str, Measurement]:
    """Recall of needles that share their directions with the background."""
    return _recalls(ctx, "collision", 0.9, _SCORERS)


def check_mirrored(ctx: ClaimContext) -> dict[str, Measurement]:
    """The opposite geometry, where only the angle tells needles apart."""
    return _recalls(ctx, "mirrored", 0.9, _SCORERS)


def check_dilution(ctx: ClaimContext) -> dict[str, Measurement]:
    """Recall over 65,536 keys in 16 regimes, with a centroid per window or one for all; and a real model."""
    settings: dict[str, dict[str, Any]] = {
        "windowed": {"metric": "l2", "window": 4096},
        "global": {"metric": "l2"},
        "cosine": {"metric": "cosine"},
    }
    return {**_recalls(ctx, "regimes", 0.75, settings), **_long_prompts(ctx)}


_LONG = 4096
_LONG_SAMPLES = 4


def _long_prompts(ctx: ClaimContext) -> dict[str, Measurement]:
    """SmolLM2 on 4096-token prompts; reported beside the rule, since the claim is about 64K."""
    from icml26_shared.evaluation import ruler
    from manifoldkv.eval import run_eval

    settings: dict[str, Any] = {
        "full": None,
        "global": KVConfig(metric="l2", compression_ratio=0.5, **_PLAIN),
        "windowed(1024)": KVConfig(metric="l2", compression_ratio=0.5, window=1024, **_PLAIN),
        "cosine": keydiff(0.5),
    }
    with _store(ctx, "claims-long.jsonl", length=_LONG) as store:
        model, tokenizer = models.load("smollm2", dtype=models.faster_dtype())
        samples = ruler.generate("niah_single_1", tokenizer, _LONG + _GENERATED, _LONG_SAMPLES, seed=ctx.seed)
        with ctx.progress("4096-token prompts", len(samples) * len(settings)) as bar:
            rows = run_eval(
                model, tokenizer, samples, settings, store=store, max_new_tokens=_NEW_TOKENS, advance=bar.advance
            )
    return {f"SmolLM2 at 4096 tokens, {name}": _scores(rows, name, ("niah_single_1",)) for name in settings}


# -- cost, and what needs other hardware ------------------------------------------------------------------------------


def check_cost(ctx: ClaimContext) -> dict[str, Measurement]:
    """Time of the L2 scores over that of the cosine scores, same keys, in turns."""

    def measure(seed: int) -> float:
        from manifoldkv.bench import metric_cost

        return metric_cost(seed)

    return {
        "time of L2 / time of cosine": Measurement([ctx.cached(seed, partial(measure, seed)) for seed in ctx.seeds])
    }


_GENERATE = "manifoldkv ruler generate --task {task} --length {length} --tokenizer PATH --haystack FILE -o DATA"
_EVAL = "manifoldkv eval --model PATH --data DATA --metric l2 cosine auto --ratio 0.2 0.5 -o results.jsonl"


def _elsewhere(identity: str, statement: str, source: str, rule: Rule, needs: str, command: str) -> Claim:
    return Claim(id=identity, statement=statement, source=source, rule=rule, needs=needs, command=command)


CLAIMS: list[Claim] = [
    Claim(
        id="guideline",
        statement="The best metric depends on key-norm geometry, and a guideline from it picks the right one",
        source="abstract",
        check=check_guideline,
        rule=[Rule("models within 0.03 of the best", ">=", 1.0), Rule("models that tell the metrics apart", ">=", 3)],
        seeds=1,
    ),
    Claim(
        id="light-compression",
        statement="At 20 % compression accuracy stays near the full cache's and matches the best geometric baseline",
        source="abstract",
        check=check_light_compression,
        rule=[
            Rule("auto, one key", ">=", 0.95, times="full, one key"),
            Rule("auto, three keys", ">=", 0.85, times="full, three keys"),
            Rule("auto", ">=", -0.03, plus="cosine"),
        ],
        seeds=1,
    ),
    Claim(
        id="multi-key",
        statement="With several keys at 50 % compression L2 beats KeyDiff by a wide margin (92.4 against 77.0)",
        source="abstract",
        check=check_multi_key,
        rule=Rule("l2 − cosine", ">=", 0.05),
        seeds=1,
    ),
    Claim(
        id="collisions",
        statement="L2 wins because keys collide in direction and differ in radius",
        source="abstract",
        check=check_collisions,
        rule=[Rule("l2", ">=", 0.95), Rule("cosine", "<=", 0.3), Rule("knorm", "<=", 0.05)],
        seeds=10,
    ),
    Claim(
        id="mirrored",
        statement="Where only the angle tells keys apart, cosine wins and L2 loses (the other side of the guideline)",
        source="specification of this package",
        check=check_mirrored,
        rule=[Rule("cosine", ">=", 0.95), Rule("l2", "<=", 0.1)],
        seeds=10,
    ),
    Claim(
        id="dilution",
        statement="One centroid dilutes over a long stream of topics; windowed centroids restore the recall",
        source="abstract",
        check=check_dilution,
        rule=[
            Rule("windowed", ">=", 0.95),
            Rule("global", "<=", -0.15, plus="windowed"),
            Rule("cosine", "<", 0.0, plus="global"),
        ],
        seeds=5,
    ),
    Claim(
        id="cost",
        statement="Same cost as cosine scoring, nothing to tune",
        source="abstract",
        check=check_cost,
        rule=Rule("time of L2 / time of cosine", "<=", 1.1),
        seeds=3,
    ),
    Claim(
        id="vllm-blocks",
        statement="In vLLM the blocks of evicted tokens are freed while a request runs, and nothing else changes",
        source="specification of this package",
        check=claims_vllm.check,
        rule=[
            Rule("answers equal to one at a time", ">=", 1.0),
            Rule("blocks not returned", "<=", 0.0, on="every"),
            Rule("times the free blocks rose during one request", ">=", 1.0),
            Rule("tokens of the long request / tokens in the pool", ">", 1.0),
            Rule("most blocks of a request / bound", "<=", 1.0),
        ],
        needs=claims_vllm.needs,
        command="make setup-vllm; manifoldkv claims --only vllm-blocks",
        seeds=1,
    ),
    _elsewhere(
        "ruler-64k",
        "WindowedManifoldKV restores 84.3 % at 64K where a global centroid collapses (+49 points)",
        "abstract",
        Rule("windowed − global", ">=", 0.3),
        "a GPU with 80 GiB and a 7-8B model with a 64K context",
        "; ".join(
            (
                _GENERATE.format(task="niah_multikey_1", length=65536),
                _EVAL.replace("results", "global"),
                _EVAL.replace("results", "windowed") + " --window 4096",
            )
        ),
    ),
    _elsewhere(
        "ruler-16k",
        "RULER from 4K to 16K: 95.7 % at 20 % compression, 92.4 against 77.0 on three keys at 50 %",
        "abstract",
        Rule("l2 − cosine", ">=", 0.05),
        "a GPU with 24 GiB and a 7-8B model",
        _GENERATE.format(task="niah_multikey_3", length=16384) + "; " + _EVAL,
    ),
    _elsewhere(
        "longbench",
        "LongBench: +2.80 on average over the best baseline with Qwen3-8B",
        "public summary of the paper",
        Rule("l2 − best baseline", ">", 0.0),
        "a GPU with 24 GiB, Qwen3-8B and the LongBench files",
        "manifoldkv longbench --model PATH --data DIR --metric l2 cosine knorm snapkv streaming --ratio 0.5 "
        "-o longbench.jsonl",
    ),
    _elsewhere(
        "helmet-infinitebench",
        "The ordering carries over to HELMET and InfiniteBench",
        "public summary of the paper",
        Rule("l2 − cosine", ">=", 0.0),
        "a GPU with 80 GiB, a 7-8B model and the two benchmarks' data in RULER's file format",
        _EVAL,
    ),
]
