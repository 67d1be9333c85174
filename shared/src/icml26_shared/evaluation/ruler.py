"""RULER-style long-context tasks: samples of an exact length, the benchmark's file format, and its score.

    samples = generate("niah_multikey_1", tokenizer, length=1024, num_samples=40, seed=0, haystack="essays.txt")
    write_jsonl("data/niah_multikey_1/validation.jsonl", samples)
    score = string_match_all(prediction, samples[0].outputs)

Tasks: the eight `niah_*` tasks of RULER (Hsieh et al., 2024, arXiv 2404.06654), `vt`, `cwe`, `fwe`, and `niah_3key`
(three keys in noise). A sample keeps its context and its question apart, so that a cache can be compressed before the
question is known (query-agnostic protocol); `sample.input` is both.

A sample depends on the task, the seed, its index, the length, the tokenizer, the haystack and the word lists of the
installed `wonderwords`; it does not depend on how many samples are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from icml26_shared.checkpoint import atomic_write_text
from icml26_shared.data import find
from icml26_shared.data.jsonl import read_rows
from icml26_shared.data.text import read_text
from icml26_shared.evaluation.ruler_tasks import (
    NIAH,
    Builder,
    CommonWords,
    Essay,
    FrequentWords,
    Layout,
    NiahBuilder,
    VariableTracking,
)

__all__ = [
    "MAX_NEW_TOKENS",
    "TASKS",
    "Sample",
    "generate",
    "mean_score",
    "read_jsonl",
    "string_match_all",
    "write_jsonl",
]

MAX_NEW_TOKENS: dict[str, int] = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50}
"""Tokens a model may generate, per task; they count towards the length of a sample."""

TASKS: tuple[str, ...] = tuple(MAX_NEW_TOKENS)


@dataclass(frozen=True)
class Sample:
    """One prompt of a task.

    `length` is the tokens of `input + answer_prefix` plus `max_new_tokens`. The model is to continue after
    `answer_prefix`; `outputs` are the references that its continuation must contain.
    """

    index: int
    task: str
    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    max_new_tokens: int

    @property
    def input(self) -> str:
        """The prompt without its answer prefix."""
        return self.context + self.question


def generate(
    task: str,
    tokenizer: Any,
    length: int,
    num_samples: int,
    seed: int = 0,
    haystack: str | Path | None = None,
    progress: Callable[[], None] | None = None,
) -> list[Sample]:
    """Generate samples that fill `length` tokens and never exceed it, generated tokens included.

    Args:
        task: one of `TASKS`.
        tokenizer: anything with `encode(text)` that returns token ids (transformers, tokenizers); special tokens that
            it adds by itself are counted.
        length: target in tokens: prompt, answer prefix and `MAX_NEW_TOKENS[task]`.
        num_samples: number of samples; sample `i` is the same whatever it is.
        seed: seed of all random choices.
        haystack: text file for the essay tasks. Default: `$ICML26_DATA/manifoldkv/emerson_essays.txt`. A text shorter
            than the target starts over at its end.
        progress: called after each sample.

    Returns:
        `num_samples` samples, index 0 first.

    Raises:
        ValueError: unknown task, a negative number of samples, or a target too short for the task (the message names
            the minimum).
        MissingData: an essay task without a haystack.
        MissingExtra: `wonderwords` is not installed.
    """
    if task not in MAX_NEW_TOKENS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    if num_samples < 0:
        raise ValueError(f"num_samples must not be negative, got {num_samples}")
    samples = []
    for index in range(num_samples):
        builder = _builder(task, f"{task}/{seed}/{index}", length, haystack)
        samples.append(_fill(builder, task, index, tokenizer, length))
        if progress is not None:
            progress()
    return samples


def _builder(task: str, stream: str, length: int, haystack: str | Path | None) -> Builder:
    if task in NIAH:
        return NiahBuilder(NIAH[task], stream, lambda: _essay(find("manifoldkv", "emerson_essays.txt", haystack)))
    if task == "vt":
        return VariableTracking(stream)
    if task == "cwe":
        return CommonWords(stream, length)
    return FrequentWords(stream, length)


def _essay(file: Path) -> Essay:
    file = file.resolve()
    return _read_essay(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _read_essay(file: Path, _modified: int) -> Essay:
    return Essay(read_text(file))


def _fill(builder: Builder, task: str, index: int, tokenizer: Any, length: int) -> Sample:
    """Lay the sample out at the largest size that fits."""
    new_tokens = MAX_NEW_TOKENS[task]
    built: dict[int, tuple[Layout, int]] = {}

    def tokens(size: int) -> int:
        if size not in built:
            layout = builder.lay_out(size)
            built[size] = layout, count_tokens(tokenizer, layout.context + layout.question + layout.answer_prefix)
        return built[size][1] + new_tokens

    shortest = tokens(builder.minimum)
    if shortest > length:
        raise ValueError(
            f"length {length} is too short for sample {index} of {task}: it needs at least {shortest} tokens with this "
            f"tokenizer, {new_tokens} of them generated"
        )
    size = largest_that_fits(tokens, length, builder.minimum)
    layout, _ = built[size]
    return Sample(
        index,
        task,
        layout.context,
        layout.question,
        layout.answer_prefix,
        layout.outputs,
        tokens(size),
        new_tokens,
    )


def largest_that_fits(tokens: Callable[[int], int], limit: int, minimum: int) -> int:
    """The largest size with `tokens(size) <= limit`, for counts that grow with size; `minimum` must fit.

    Binary search whose first guesses are interpolated, since a count of tokens is nearly linear in the size. Where the
    counts are not quite monotone, the answer still fits, and the next size does not.
    """
    low, high = minimum, None
    low_count = tokens(low)
    step = 1
    while high is None:  # gallop to a size that does not fit
        guess = low + step
        if guess > minimum + 4 * limit + 4:
            raise ValueError(f"the tokenizer counts {low_count} tokens at size {low}, fewer than one a word")
        count = tokens(guess)
        if count > limit:
            high = guess
        else:
            slope = (count - low_count) / step
            low, low_count = guess, count
            step = max(2 * step, int((limit - count) / slope)) if slope > 0 else 2 * step
    interpolate = True
    while high - low > 1:
        guess = (low + high) // 2
        if interpolate:
            share = (limit - tokens(low)) / (tokens(high) - tokens(low))
            guess = min(max(low + int((high - low) * share), low + 1), high - 1)
        interpolate = not interpolate
        if tokens(guess) > limit:
            high = guess
        else:
            low = guess
    return low


def count_tokens(tokenizer: Any, text: str) -> int:
    """Number of tokens of `text`, with the special tokens the tokenizer adds by itself."""
    encoded = tokenizer.encode(text)
    return len(getattr(encoded, "ids", encoded))


# --------------------------------------------------------------------------------------------------------- score


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, ignoring case: `mean_j [ref_j in prediction]`.

    RULER's score for all tasks here, as a number in [0, 1].

    Raises:
        TypeError: `references` is one string.
        ValueError: there are no references.
    """
    if isinstance(references, str):
        raise TypeError("references is one string; give a list of strings")
    if not references:
        raise ValueError("there are no references to look for")
    said = prediction.lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def mean_score(predictions: Sequence[str], samples: Sequence[Sample]) -> float:
    """Mean of `string_match_all` over samples, in [0, 1]; predictions in the order of the samples."""
    if len(predictions) != len(samples) or not samples:
        raise ValueError(f"{len(predictions)} predictions for {len(samples)} samples; give one each, at least one")
    pairs = zip(predictions, samples, strict=True)
    return sum(string_match_all(said, sample.outputs) for said, sample in pairs) / len(samples)


# --------------------------------------------------------------------------------------------------------- files


def write_jsonl(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write samples in the benchmark's own format, one JSON object a line; the file is whole or not there.

    RULER's fields `index, input, outputs, length, length_w_model_temp, answer_prefix` are joined by `task, context,
    question, max_new_tokens`. By RULER's custom the file is `TASK/validation.jsonl`.
    """
    lines = []
    for sample in samples:
        row = {
            "index": sample.index,
            "input": sample.input,
            "outputs": list(sample.outputs),
            "length": sample.length,
            # RULER adds the tokens of a chat template here; these prompts have none.
            "length_w_model_temp": sample.length,
            "answer_prefix": sample.answer_prefix,
            "task": sample.task,
            "context": sample.context,
            "question": sample.question,
            "max_new_tokens": sample.max_new_tokens,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    atomic_write_text(Path(path), "".join(lines))


def read_jsonl(path: str | Path, task: str | None = None) -> list[Sample]:
    """Read samples written by `write_jsonl` or by RULER itself.

    RULER's files hold `input` in one piece; its last line is the question, the rest the context. Their task is `task`,
    else the name of the folder (`.../niah_single_1/validation.jsonl`).

    Raises:
        UserError: no such file, a line that is not JSON, a missing field; the message names the line.
    """
    file = Path(path).expanduser()
    return read_rows(file, lambda row: _sample(row, task or file.parent.name), "a sample of a RULER task")


def _sample(row: dict[str, Any], folder: str) -> Sample:
    task = str(row.get("task", folder))
    context, question = row.get("context"), row.get("question")
    if context is None or question is None:
        head, newline, tail = row["input"].rpartition("\n")
        context, question = head + newline, tail
    outputs = row["outputs"]
    if isinstance(outputs, str) or not outputs:
        raise ValueError("outputs must be a list with at least one string")
    return Sample(
        index=int(row["index"]),
        task=task,
        context=context,
        question=question,
        answer_prefix=row.get("answer_prefix", ""),
        outputs=tuple(map(str, outputs)),
        length=int(row["length"]),
        max_new_tokens=int(row.get("max_new_tokens", MAX_NEW_TOKENS.get(task, 128))),
    )
