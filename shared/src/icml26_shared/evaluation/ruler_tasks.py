"""What the RULER-style tasks say: the text of one sample at a given size of its haystack.

Written from the published definitions of RULER (Hsieh et al., 2024, arXiv 2404.06654). Every builder draws what a
sample is about (keys, values, chains, words) once from its own random stream, and lays it out in a haystack of any
size, so that the length can be searched while the sample stays the same one.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from icml26_shared.data.text import sentences
from icml26_shared.errors import require

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Layout:
    """The parts of one prompt: `context + question + answer_prefix`, and the answers looked for."""

    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]


class Builder(Protocol):
    """One sample, laid out at any size from `minimum` up."""

    minimum: int

    def lay_out(self, size: int) -> Layout: ...


Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Niah:
    """A needle-in-a-haystack task: which haystack, what keys and values look like, and how many of them.

    `keys` needles' keys are in the haystack, each with `values` values; `queries` of the keys are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    key_kind: Kind
    value_kind: Kind
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH: dict[str, Niah] = {
    "niah_single_1": Niah("noise", "words", "numbers"),
    "niah_single_2": Niah("essay", "words", "numbers"),
    "niah_single_3": Niah("essay", "words", "uuids"),
    "niah_multikey_1": Niah("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Niah("needle", "words", "numbers"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", "words", "numbers", values=4),
    "niah_multiquery": Niah("essay", "words", "numbers", keys=4, queries=4),
    # Not in RULER: three keys in noise, the other reading of "3-key NIAH".
    "niah_3key": Niah("noise", "words", "numbers", keys=3),
}

# ------------------------------------------------------------------------------------------------- words and values


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Nouns, adjectives and verbs of `wonderwords`, in its order: lower-case words, hyphens allowed."""
    words = require("wonderwords", "icml26-shared[tasks]").RandomWord()
    plain = re.compile(r"[a-z]+(?:-[a-z]+)*")
    kinds = (words.filter(include_categories=[kind]) for kind in ("noun", "adjective", "verb"))
    nouns, adjectives, verbs = (tuple(word for word in kind if plain.fullmatch(word)) for kind in kinds)
    return nouns, adjectives, verbs


def draw(kind: Kind, rng: random.Random) -> str:
    """One key or value: an adjective-noun pair, a number of 7 digits, or a version-4 UUID."""
    if kind == "words":
        nouns, adjectives, _ = _vocabulary()
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: Kind, rng: random.Random, taken: set[str]) -> Iterator[str]:
    """An endless stream of keys or values that are not in `taken`; each is added to it."""
    while True:
        item = draw(kind, rng)
        if item not in taken:
            taken.add(item)
            yield item


# ----------------------------------------------------------------------------------------------------- haystacks


class Essay:
    """Running text of any number of words; a short one starts over at its end."""

    def __init__(self, text: str) -> None:
        self.sentences = sentences(text)
        self.ends = list(itertools.accumulate(len(sentence.split(" ")) for sentence in self.sentences))

    def cut(self, words: int) -> list[str]:
        """The sentences of the first `words` words; the last one may be cut off."""
        rounds, rest = divmod(words, self.ends[-1])
        whole = bisect_right(self.ends, rest)
        taken = self.sentences * rounds + self.sentences[:whole]
        missing = rest - (self.ends[whole - 1] if whole else 0)
        if missing:
            taken.append(" ".join(self.sentences[whole].split(" ")[:missing]))
        return taken


DEPTHS: tuple[int, ...] = tuple(round(100 * step / 39) for step in range(40))
"""Forty evenly spaced depths, in per cent of the haystack's sentences."""


def scatter(items: Sequence[str], lines: list[str], rng: random.Random, *, in_order: bool = False) -> list[str]:
    """Insert `items` at random distinct positions among `lines`; `in_order` keeps their sequence."""
    gaps = rng.sample(range(len(lines) + 1), len(items))
    if in_order:
        gaps.sort()
    before: dict[int, str] = dict(zip(gaps, items, strict=True))
    merged: list[str] = []
    for position in range(len(lines) + 1):
        if position in before:
            merged.append(before[position])
        if position < len(lines):
            merged.append(lines[position])
    return merged


class NiahBuilder:
    """`Niah` laid out: `size` counts noise lines, other needles, or words of the essay."""

    def __init__(self, task: Niah, stream: str, essay: Callable[[], Essay]) -> None:
        self.task, self.stream = task, stream
        self.essay = essay() if task.haystack == "essay" else None
        rng = random.Random(stream)
        self._keys_taken: set[str] = set()
        values_taken: set[str] = set()
        key_stream = distinct(task.key_kind, rng, self._keys_taken)
        value_stream = distinct(task.value_kind, rng, values_taken)
        keys = list(itertools.islice(key_stream, task.keys))
        answers = {key: list(itertools.islice(value_stream, task.values)) for key in keys}
        self.needles = [self._needle(key, value) for key in keys for value in answers[key]]
        rng.shuffle(self.needles)
        queried = rng.sample(keys, task.queries)
        self.outputs = tuple(value for key in queried for value in answers[key])
        self.query = queried[0] if len(queried) == 1 else ", ".join(queried[:-1]) + ", and " + queried[-1]
        self.depths = sorted(rng.sample(DEPTHS, len(self.needles)))
        # Distractors come from a stream of their own, so a longer haystack only adds to a shorter one.
        filler = random.Random(f"{stream}/haystack")
        self._fillers = zip(
            distinct(task.key_kind, filler, self._keys_taken),
            distinct(task.value_kind, filler, values_taken),
            strict=True,
        )
        self._lines: list[str] = []
        self.minimum = len(self.needles)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.task.value_kind} for {key} is: {value}."

    def _haystack(self, size: int) -> str:
        if self.essay is not None:
            text = self.essay.cut(size)
            cuts = [int(len(text) * depth / 100) for depth in self.depths]
            parts: list[str] = []
            for start, end, needle in zip([0, *cuts], cuts, self.needles, strict=False):
                parts += [*text[start:end], needle]
            return " ".join(parts + text[cuts[-1] :])
        if self.task.haystack == "needle":
            missing = max(0, size - len(self._lines))
            self._lines += [self._needle(*pair) for pair in itertools.islice(self._fillers, missing)]
            lines = self._lines[:size]
        else:
            lines = [NOISE] * size
        return "\n".join(scatter(self.needles, lines, random.Random(f"{self.stream}/positions/{size}")))

    def lay_out(self, size: int) -> Layout:
        if len(self.outputs) == 1:
            some, are, what, values = "A", "is", "is", self.task.value_kind[:-1]
        else:
            some, are, what, values = "Some", "are", "are all", self.task.value_kind
        return Layout(
            f"{some} special magic {values} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {values} afterwards.\n{self._haystack(size)}\n",
            f"What {what} the special magic {values} for {self.query} mentioned in the provided text?",
            f" The special magic {values} for {self.query} mentioned in the provided text {are}",
            self.outputs,
        )


class VariableTracking:
    """`vt`: one chain of assignments, 4 hops long, in order among `size` lines of noise; all 5 names are asked for."""

    hops = 4

    def __init__(self, stream: str) -> None:
        self.stream = stream
        rng = random.Random(stream)
        taken: set[str] = set()
        while len(taken) <= self.hops:
            taken.add("".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
        self.names = rng.sample(sorted(taken), len(taken))
        self.value = rng.randint(10_000, 99_999)
        self.minimum = self.hops + 1

    def lay_out(self, size: int) -> Layout:
        chain = [f"VAR {self.names[0]} = {self.value}"]
        chain += [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(self.names)]
        lines = scatter(chain, [NOISE] * size, random.Random(f"{self.stream}/positions/{size}"), in_order=True)
        return Layout(
            "Variables are assigned to one another somewhere in the following text. Keep track of them.\n"
            + "\n".join(lines)
            + "\n",
            f"Question: Find all variables that are assigned the value {self.value} in the text above.",
            f" Answer: The {len(self.names)} variables that are assigned the value {self.value} are:",
            tuple(self.names),
        )


class CommonWords:
    """`cwe`: a numbered list of `size` different words, 10 of them far more frequent, after one worked example."""

    common = 10

    def __init__(self, stream: str, length: int) -> None:
        self.stream = stream
        short = length < 4096
        self.counts = (6, 1) if short else (30, 3)
        self.example_size, self.example_counts = (20, (3, 1)) if short else (40, (10, 3))
        nouns, adjectives, verbs = _vocabulary()
        pool = sorted({*nouns, *adjectives, *verbs})
        rng = random.Random(stream)
        rng.shuffle(pool)
        self._example = self._ask(pool[: self.example_size], self.example_counts, random.Random(f"{stream}/example"))
        self._words = pool[self.example_size :]
        # Beyond the dictionary (a list of some 100,000 tokens) pairs of words carry on.
        self._more = distinct("words", random.Random(f"{stream}/haystack"), set(pool))
        self.minimum = self.common + 1

    def _ask(self, words: Sequence[str], counts: tuple[int, int], rng: random.Random) -> Layout:
        frequent = words[: self.common]
        entries = [*frequent] * counts[0] + [*words[self.common :]] * counts[1]
        rng.shuffle(entries)
        numbered = " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
        return Layout(
            "Here is a numbered list of words. Some of them appear more often than the others; memorize those.\n"
            + numbered
            + "\n",
            f"Question: What are the {self.common} most common words in the list?",
            f" Answer: The {self.common} words that appear most often in the list are:",
            tuple(frequent),
        )

    def lay_out(self, size: int) -> Layout:
        missing = max(0, size - len(self._words))
        self._words += itertools.islice(self._more, missing)
        shown = self._example
        solved = " ".join(f"{number}. {word}" for number, word in enumerate(shown.outputs, start=1))
        task = self._ask(self._words[:size], self.counts, random.Random(f"{self.stream}/positions/{size}"))
        example = f"{shown.context}{shown.question}{shown.answer_prefix} {solved}\n"
        return Layout(example + task.context, task.question, task.answer_prefix, task.outputs)


class FrequentWords:
    """`fwe`: `size` coded words whose counts fall as k^-2 / zeta(2); rank 1 is dots, ranks 2 to 4 are asked for."""

    # From here on the expected counts of ranks 4 and 5 differ by a whole word, so that the answer is unambiguous.
    minimum = math.ceil((math.pi**2 / 6) / (1 / 4**2 - 1 / 5**2))

    def __init__(self, stream: str, length: int) -> None:
        self.stream = stream
        rng = random.Random(stream)
        taken: set[str] = set()
        self.words = ["..."]
        while len(self.words) < max(length // 50, 5):
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
            if word not in taken:
                taken.add(word)
                self.words.append(word)

    def lay_out(self, size: int) -> Layout:
        counts = [int(size * rank**-2 / (math.pi**2 / 6)) for rank in range(1, len(self.words) + 1)]
        text = [word for word, count in zip(self.words, counts, strict=True) for _ in range(count)]
        random.Random(f"{self.stream}/positions/{size}").shuffle(text)
        return Layout(
            f"Count how often each coded word appears in the following text.\n{' '.join(text)}\n",
            "Question: Leaving out the dots '...', which three coded words appear most often in the text above? "
            "Give no explanation.",
            " Answer: The three coded words that appear most often in the text above are:",
            tuple(self.words[1:4]),
        )
