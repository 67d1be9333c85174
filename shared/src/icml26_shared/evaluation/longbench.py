"""LongBench: its original files, its metric per data set, and its middle truncation.

    examples = load("data/hotpotqa.jsonl")
    text = middle_truncate(tokenizer, prompt(examples[0]), 3500)
    score(prediction, examples[0])                      # in [0, 1]

Bai et al., 2023, arXiv 2308.14508. Three things differ from its scripts and are said so that nobody compares blindly:
the prompts here are short ones of our own (give `template` to use others), Chinese text is compared character by
character instead of through a word segmenter, and ROUGE-L is the longest common subsequence over the whole text.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icml26_shared.data.jsonl import read_rows
from icml26_shared.errors import UserError

__all__ = ["DATASETS", "Dataset", "Example", "load", "middle_truncate", "prompt", "score"]


@dataclass(frozen=True)
class Example:
    """One line of a LongBench file. `length` is the benchmark's own count: words, or characters of Chinese."""

    id: str
    dataset: str
    language: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int


def load(path: str | Path) -> list[Example]:
    """Read one original `*.jsonl` file, or all of a folder in the order of their names.

    Raises:
        UserError: no such path, no such files in the folder, or a line that is not an example (named with its number).
    """
    source = Path(path).expanduser()
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise UserError(f"{source} has no *.jsonl files")
    return [example for file in files for example in read_rows(file, _example, "a LongBench example")]


def _example(row: dict[str, Any]) -> Example:
    answers, classes = row["answers"], row["all_classes"] or []
    if isinstance(answers, str) or not answers:
        raise ValueError("answers must be a list with at least one string")
    return Example(
        id=str(row["_id"]),
        dataset=str(row["dataset"]),
        language=str(row["language"]),
        input=str(row["input"]),
        context=str(row["context"]),
        answers=tuple(map(str, answers)),
        all_classes=tuple(map(str, classes)),
        length=int(row["length"]),
    )


# ------------------------------------------------------------------------------------------------------- metrics


def lcs_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, bit-parallel (Hyyrö, 2004): one big-integer step per item of `b`."""
    masks: dict[Hashable, int] = {}
    for position, item in enumerate(a):
        masks[item] = masks.get(item, 0) | 1 << position
    row = full = (1 << len(a)) - 1
    for item in b:
        matches = row & masks.get(item, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(a) - row.bit_count()


def _f1(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected) if common else 0.0


_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _english_tokens(text: str) -> list[str]:
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def _chinese_tokens(text: str) -> list[str]:
    """The characters of a text, without white space, punctuation and symbols of any script."""
    return [char for char in text.lower() if unicodedata.category(char)[0] not in "PSZC"]


def token_f1(prediction: str, answer: str, tokens: Callable[[str], list[str]] = _english_tokens) -> float:
    """Harmonic mean of precision and recall over the multiset of normalised tokens (SQuAD's F1)."""
    said, wanted = tokens(prediction), tokens(answer)
    return _f1((Counter(said) & Counter(wanted)).total(), len(said), len(wanted))


def rouge_l(prediction: str, answer: str, tokens: Callable[[str], list[str]] = str.split) -> float:
    """ROUGE-L F1: `2 LCS / (|prediction| + |answer|)` over tokens (Lin, 2004, with beta = 1)."""
    said, wanted = tokens(prediction), tokens(answer)
    return _f1(lcs_length(said, wanted), len(said), len(wanted))


def edit_similarity(prediction: str, answer: str) -> float:
    """Similarity of the first line of code with the reference: `2 LCS / (|a| + |b|)` over characters (Indel ratio).

    The first line is the first that has no backtick, `#` or `//`, the marks of prose and comments around code.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return _f1(lcs_length(line, answer), len(line), len(answer))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """`1/m` if the answer is among the m classes that the prediction names, else 0.

    A class whose name is only a part of the answer's name does not count as named.
    """
    named = [name for name in classes if name in prediction and not (name in answer and name != answer)]
    return 1 / len(named) if answer in named else 0.0


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the paragraph's (`Paragraph 7`, or `段落7`)."""
    wanted = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if wanted is None:
        raise ValueError(f"the reference {answer!r} names no paragraph ('Paragraph N' or '段落N')")
    return _share_of_numbers(prediction, wanted[1])


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that equal the answer."""
    return _share_of_numbers(prediction, answer.strip())


Metric = Callable[[str, str, Sequence[str]], float]


def _without_classes(metric: Callable[[str, str], float]) -> Metric:
    return lambda prediction, answer, _classes: metric(prediction, answer)


_QA = _without_classes(token_f1)
_QA_ZH = _without_classes(lambda said, wanted: token_f1(said, wanted, _chinese_tokens))
_ROUGE = _without_classes(rouge_l)
_ROUGE_ZH = _without_classes(lambda said, wanted: rouge_l(said, wanted, _chinese_tokens))
_RETRIEVAL = _without_classes(retrieval)
_COUNT = _without_classes(count)
_CODE = _without_classes(edit_similarity)

_ANSWER = "Answer the question from the text, with nothing but the answer."
_ANSWER_ZH = "请根据文本回答问题，只给出答案。"
_SUMMARY = "Write a summary of the text."
_NEXT_LINE = "Write the next line of the code."


@dataclass(frozen=True)
class Dataset:
    """How a data set is prompted and scored.

    `first_line`: only the first line of a prediction counts. `chat`: a chat template fits the data set (not where the
    prompt is a pattern to continue).
    """

    metric: Metric
    max_new_tokens: int
    instruction: str
    first_line: bool = False
    chat: bool = True


DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(_QA, 128, _ANSWER),
    "qasper": Dataset(_QA, 128, _ANSWER),
    "multifieldqa_en": Dataset(_QA, 64, _ANSWER),
    "multifieldqa_zh": Dataset(_QA_ZH, 64, _ANSWER_ZH),
    "hotpotqa": Dataset(_QA, 32, _ANSWER),
    "2wikimqa": Dataset(_QA, 32, _ANSWER),
    "musique": Dataset(_QA, 32, _ANSWER),
    "dureader": Dataset(_ROUGE_ZH, 128, _ANSWER_ZH),
    "gov_report": Dataset(_ROUGE, 512, _SUMMARY),
    "qmsum": Dataset(_ROUGE, 512, "Answer the question about the meeting in a few sentences."),
    "multi_news": Dataset(_ROUGE, 512, _SUMMARY),
    "vcsum": Dataset(_ROUGE_ZH, 512, "请写出文本的摘要。"),
    "trec": Dataset(classification, 64, "Name the type of the last question.", first_line=True, chat=False),
    "triviaqa": Dataset(_QA, 32, _ANSWER, first_line=True, chat=False),
    "samsum": Dataset(_ROUGE, 128, "Summarize the last dialogue.", first_line=True, chat=False),
    "lsht": Dataset(classification, 64, "请给出最后一篇新闻的类别。", first_line=True, chat=False),
    "passage_retrieval_en": Dataset(_RETRIEVAL, 32, "Which paragraph does the abstract summarize? Say 'Paragraph N'."),
    "passage_count": Dataset(_COUNT, 32, "How many different paragraphs are there? Say only the number."),
    "passage_retrieval_zh": Dataset(_RETRIEVAL, 32, "摘要出自哪一段？请回答“段落N”。"),
    "lcc": Dataset(_CODE, 64, _NEXT_LINE, chat=False),
    "repobench-p": Dataset(_CODE, 64, _NEXT_LINE, chat=False),
}
"""The 21 data sets; the files of LongBench-E name the same ones."""


def _dataset(name: str) -> Dataset:
    try:
        return DATASETS[name]
    except KeyError:
        raise ValueError(f"unknown LongBench data set {name!r}; known are {', '.join(DATASETS)}") from None


def prompt(example: Example, template: str | None = None) -> str:
    """The prompt of an example: instruction, context, input; or `template` with `{context}` and `{input}` filled in."""
    if template is not None:
        fields = {"{context}": example.context, "{input}": example.input}
        return re.sub(r"\{context\}|\{input\}", lambda match: fields[match[0]], template)
    parts = (_dataset(example.dataset).instruction, example.context, example.input)
    return "\n\n".join(part for part in parts if part)


def score(prediction: str, example: Example) -> float:
    """The data set's metric in [0, 1], the best over the example's answers."""
    dataset = _dataset(example.dataset)
    if dataset.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max(dataset.metric(prediction, answer, example.all_classes) for answer in example.answers)


def middle_truncate(tokenizer: Any, text: str, max_tokens: int) -> str:
    """Cut tokens out of the middle so that at most `max_tokens` are left: instructions stand at the two ends.

    Args:
        tokenizer: with `encode(text, add_special_tokens=False)` and `decode(ids)`.
        text: the prompt; returned unchanged where it fits.
        max_tokens: tokens to keep, special tokens not counted; the first half may be one longer.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= max_tokens:
        return text
    keep = max_tokens
    while keep > 0:
        tail = keep // 2
        short = tokenizer.decode(ids[: keep - tail]) + (tokenizer.decode(ids[-tail:]) if tail else "")
        # The two ends may tokenise differently where they meet: keep fewer until the text itself fits.
        excess = len(tokenizer.encode(short, add_special_tokens=False)) - max_tokens
        if excess <= 0:
            return short
        keep -= excess
    return ""
