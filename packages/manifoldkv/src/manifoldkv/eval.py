"""Accuracy of a model on long-context tasks with a compressed cache, sample by sample and resumable.

``query-agnostic``: the context is compressed before the question is seen. ``query-aware``: after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from icml26_shared.checkpoint import JsonlStore
from icml26_shared.errors import UserError
from icml26_shared.evaluation import longbench, ruler
from manifoldkv.baselines import SNAPKV_WINDOW, snapkv_scores
from manifoldkv.config import KVConfig
from manifoldkv.integrations.transformers import ManifoldCache, MetricChoice, compress
from manifoldkv.integrations.transformers.queries import capture_queries
from manifoldkv.selection import select

Protocol = Literal["query-agnostic", "query-aware"]

__all__ = ["Answer", "Prompt", "SnapKV", "answer", "longbench", "ruler", "run_eval", "run_longbench"]


@dataclass(frozen=True)
class SnapKV:
    """Setting of the SnapKV baseline: like :class:`KVConfig`, but scored by the prompt's last queries."""

    compression_ratio: float
    window: int = SNAPKV_WINDOW


Setting = KVConfig | SnapKV | None  # None: the full cache


@dataclass(frozen=True)
class Prompt:
    """What is asked: a context, a question after it, and when to stop.

    ``satisfied(text)`` says that more text can't change the score any more.
    """

    context: str
    question: str
    max_new_tokens: int
    satisfied: Callable[[str], bool] = field(default=lambda text: False)


class Answer(NamedTuple):
    """A continuation, the tokens of the context that were kept per head and that there were, and the metric used."""

    text: str
    kept: int
    total: int
    metric: str


def run_eval(
    model: Any,
    tokenizer: Any,
    samples: Sequence[ruler.Sample],
    settings: Mapping[str, Setting],
    protocol: Protocol = "query-agnostic",
    store: JsonlStore | None = None,
    max_new_tokens: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Score every sample of RULER-style tasks under every setting.

    Args:
        model, tokenizer: a transformers causal language model.
        samples: of one or several tasks.
        settings: by name: a :class:`KVConfig`, a :class:`SnapKV`, or ``None`` for the full cache.
        protocol: whether the question is known when the context is compressed.
        store: results on disk with the key ``(task, index, config)``; finished ones are not computed again.
        max_new_tokens: cap on the generated tokens; default: what each task allows.
        advance: called with the number of (sample, setting) pairs that got done.

    Returns:
        One row a pair: task, index, config, length, prompt (a digest), score in [0, 1], output, kept and total tokens
        of the context, metric used (empty: the full cache).

    Raises:
        ValueError: an unknown protocol, or fewer than one new token.
        UserError: the store's results are of other prompts.
    """

    def prompt(sample: ruler.Sample) -> Prompt:
        limit = _new_tokens(sample.max_new_tokens, max_new_tokens)
        found = partial(_all_found, references=sample.outputs)
        return Prompt(sample.context, sample.question + sample.answer_prefix, limit, found)

    items = [
        _Item(sample.task, sample.index, sample.length, prompt(sample), partial(_match, references=sample.outputs))
        for sample in samples
    ]
    return _run(model, tokenizer, items, settings, protocol, store, advance)


def run_longbench(
    model: Any,
    tokenizer: Any,
    examples: Sequence[longbench.Example],
    settings: Mapping[str, Setting],
    protocol: Protocol = "query-agnostic",
    store: JsonlStore | None = None,
    max_length: int = 7500,
    max_new_tokens: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Score LongBench examples under every setting, each by its data set's own metric; arguments as :func:`run_eval`.

    Args:
        max_length: contexts longer than this many tokens lose their middle.
    """
    items: list[_Item] = []
    counts: Counter[str] = Counter()
    for example in examples:
        if example.dataset not in longbench.DATASETS:
            raise UserError(
                f"unknown LongBench data set {example.dataset!r}; known are {', '.join(longbench.DATASETS)}"
            )
        dataset = longbench.DATASETS[example.dataset]
        context = longbench.middle_truncate(tokenizer, example.context, max_length)
        limit = _new_tokens(dataset.max_new_tokens, max_new_tokens)
        prompt = Prompt(f"{dataset.instruction}\n\n{context}", f"\n\n{example.input}\n", limit)
        score = partial(longbench.score, example=example)
        items.append(_Item(example.dataset, counts[example.dataset], example.length, prompt, score))
        counts[example.dataset] += 1
    return _run(model, tokenizer, items, settings, protocol, store, advance)


def _new_tokens(own: int, cap: int | None) -> int:
    if cap is not None and cap < 1:
        raise ValueError(f"max_new_tokens={cap} must be 1 or more, or None for what each task allows")
    return own if cap is None else min(own, cap)


@dataclass(frozen=True)
class _Item:
    task: str
    index: int
    length: int
    prompt: Prompt
    score: Callable[[str], float]

    @property
    def digest(self) -> str:
        """Tells whether results on disk are of this prompt."""
        return sha256(f"{self.prompt.context}\0{self.prompt.question}".encode()).hexdigest()[:16]


def _match(text: str, references: Sequence[str]) -> float:
    return ruler.string_match_all(text, references)


def _all_found(text: str, references: Sequence[str]) -> bool:
    return ruler.string_match_all(text, references) == 1


def _run(
    model: Any,
    tokenizer: Any,
    items: Sequence[_Item],
    settings: Mapping[str, Setting],
    protocol: Protocol,
    store: JsonlStore | None,
    advance: Callable[[int], None] | None,
) -> list[dict[str, Any]]:
    if protocol not in get_args(Protocol):
        raise ValueError(f"protocol={protocol!r} is not one of {', '.join(get_args(Protocol))}")
    choices: dict[str, MetricChoice] = {}  # metric="auto" settles once per setting, as in one with-block
    rows = []
    for item in items:
        known = {} if store is None else _finished(store, item, settings, choices)
        todo = {name: setting for name, setting in settings.items() if name not in known}
        answers = answer(model, tokenizer, item.prompt, todo, protocol, choices) if todo else {}
        for name, found in answers.items():
            row = {"task": item.task, "index": item.index, "config": name, "length": item.length, "prompt": item.digest}
            row |= {"score": item.score(found.text), "output": found.text, "kept": found.kept, "total": found.total}
            known[name] = row | {"metric": found.metric}
            if store is not None:
                store.append(known[name])
        rows += [known[name] for name in settings]
        if advance is not None:
            advance(len(settings))
    return rows


def _finished(
    store: JsonlStore, item: _Item, settings: Mapping[str, Setting], choices: dict[str, MetricChoice]
) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run. They also settle ``"auto"``: a resumed run goes on with the metric it began with."""
    found = {}
    for name, setting in settings.items():
        row = store.get((item.task, item.index, name))
        if row is None:
            continue
        if row.get("prompt") != item.digest:
            raise UserError(
                f"{store.path} has results of another prompt for sample {item.index} of {item.task}; "
                "use another results file"
            )
        found[name] = row
        if isinstance(setting, KVConfig) and setting.metric == "auto" and not setting.per_layer:
            choice = choices.setdefault(name, MetricChoice(setting))
            if choice.settled is None and row["metric"] != "auto" and row["total"] >= choice.rule.min_tokens:
                choice.settled = row["metric"]
    return found


@torch.inference_mode()
def answer(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    settings: Mapping[str, Setting],
    protocol: Protocol = "query-agnostic",
    choices: dict[str, MetricChoice] | None = None,
) -> dict[str, Answer]:
    """Greedy continuations of one prompt under each setting, by name.

    The context is prefilled once; settings that keep the same number of tokens are decoded together as one batch.
    Decoding stops at the end-of-sequence token, or as soon as the prompt is satisfied.
    """
    context, rest = prompt.context, prompt.question
    if protocol == "query-aware":
        context, rest = context + rest, ""
    first = tokenizer(context, return_tensors="pt").input_ids.to(model.device)
    question = tokenizer(rest, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device).long()
    dense, last, queries = _prefill(model, first, settings)
    groups: dict[tuple[int, str], list[tuple[str, ManifoldCache]]] = {}
    results: dict[str, Answer] = {}
    for name, setting in settings.items():
        if isinstance(setting, KVConfig) and setting.head_budget == "adaptive":
            results[name] = _answer_per_head(model, tokenizer, first, question, setting, prompt)
            continue
        cache = _compressed(model, dense, setting, queries, (choices or {}).get(name))
        if choices is not None and name not in choices:
            choices[name] = cache.choice
        alone = "" if cache.cfg.phase == "prefill" else name  # evicts again, by a rule of its own
        groups.setdefault((cache.manifold_layers[0].stored, alone), []).append((name, cache))
    for (kept, _), members in groups.items():
        cache = ManifoldCache.stack([member for _, member in members])
        texts = _decode(model, tokenizer, cache, question, last, prompt, len(members))
        for (name, member), text in zip(members, texts, strict=True):
            metric = "" if settings[name] is None else member.manifold_layers[0].metric_used
            results[name] = Answer(text, kept, first.shape[1], metric)
    return {name: results[name] for name in settings}


def _prefill(
    model: Any, ids: Tensor, settings: Mapping[str, Setting]
) -> tuple[DynamicCache, Tensor, dict[int, Tensor]]:
    dense = DynamicCache(config=model.config)
    snap = [setting.window for setting in settings.values() if isinstance(setting, SnapKV)]
    if not snap:
        return dense, model(ids, past_key_values=dense, logits_to_keep=1).logits[:, -1], {}
    with capture_queries(model, max(snap)) as queries:
        last = model(ids, past_key_values=dense, logits_to_keep=1).logits[:, -1]
    return dense, last, queries


def _compressed(
    model: Any, dense: DynamicCache, setting: Setting, queries: dict[int, Tensor], choice: MetricChoice | None
) -> ManifoldCache:
    if isinstance(setting, SnapKV):
        length = dense.get_seq_length()
        cfg = KVConfig(metric="random", compression_ratio=setting.compression_ratio)
        window = min(setting.window, cfg.keep_count(length), length - 1)

        def choose(index: int, keys: Tensor) -> Tensor:
            return select(snapkv_scores(keys, queries[index][:, :, -window:]), cfg.keep_count(length))

        return ManifoldCache.from_dense(dense, model.config, cfg, choose=choose, label="snapkv")
    return ManifoldCache.from_dense(
        dense, model.config, setting or KVConfig(metric="l2", compression_ratio=0.0), choice=choice
    )


def _decode(
    model: Any,
    tokenizer: Any,
    cache: ManifoldCache,
    question: Tensor,
    last: Tensor,
    prompt: Prompt,
    rows: int,
) -> list[str]:
    if question.shape[1]:
        last = model(question.expand(rows, -1), past_key_values=cache, logits_to_keep=1).logits[:, -1]
    token = last.expand(rows, -1).argmax(-1, keepdim=True)
    tokens: list[list[int]] = [[] for _ in range(rows)]
    ends = _end_tokens(model)
    done = [False] * rows
    texts = [""] * rows
    while True:
        for row, value in enumerate(token[:, 0].tolist()):
            if done[row]:
                continue
            if value in ends:
                done[row] = True
                continue
            tokens[row].append(value)
            texts[row] = tokenizer.decode(tokens[row], skip_special_tokens=True)
            done[row] = len(tokens[row]) >= prompt.max_new_tokens or prompt.satisfied(texts[row])
        if all(done):
            return texts
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)


def _answer_per_head(
    model: Any, tokenizer: Any, first: Tensor, question: Tensor, cfg: KVConfig, prompt: Prompt
) -> Answer:
    """Budgets per head need the attention that ``compress`` installs, so this setting runs by itself."""
    with compress(model, cfg) as kv:
        last = model(first, use_cache=True, logits_to_keep=1).logits[:, -1]
        if kv.cache is None:
            raise RuntimeError("the prompt ran without a cache; is use_cache off in the model's config?")
        kept = kv.cache.manifold_layers[0].fill()
        (text,) = _decode(model, tokenizer, kv.cache, question, last, prompt, 1)
    return Answer(text, kept, first.shape[1], kv.cache.manifold_layers[0].metric_used)


def _end_tokens(model: Any) -> set[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return set()
    return set(found) if isinstance(found, Iterable) else {int(found)}
