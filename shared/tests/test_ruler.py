"""RULER-style tasks: wording, structure, exact length, determinism, score and files."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml26_shared.data import MissingData
from icml26_shared.errors import UserError
from icml26_shared.evaluation import ruler
from icml26_shared.evaluation.ruler_tasks import DEPTHS, NIAH, NOISE, Essay

pytest.importorskip("wonderwords")

WORD = r"[a-z]+(?:-[a-z]+)+"
NUMBER = r"\d{7}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
PATTERN = {"words": WORD, "numbers": NUMBER, "uuids": UUID}


class Tokenizer:
    """Words and punctuation marks, and one special token in front, as many tokenizers add."""

    def encode(self, text):
        return ["<s>", *re.findall(r"\w+|[^\w\s]", text)]


TOKENIZER = Tokenizer()


@pytest.fixture(scope="module")
def essay(tmp_path_factory):
    file = tmp_path_factory.mktemp("essay") / "essay.txt"
    file.write_text(" ".join(f"Sentence {number} says that all is well, more or less." for number in range(97)))
    return file


def sample(task, essay, length=1500, index=0, seed=0):
    return ruler.generate(task, TOKENIZER, length, index + 1, seed, essay)[index]


def needles(sample):
    pattern = r"One of the special magic (\w+) for (\S+) is: (\S+)\."
    return re.findall(pattern, sample.context)


# ---------------------------------------------------------------------------------------------------- wording


def test_the_wording_with_one_answer(essay):
    one = sample("niah_single_1", essay, 260)
    (_, key, value), *others = needles(one)
    assert others == []
    lines = one.context.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert set(lines[1:-1]) == {NOISE, f"One of the special magic numbers for {key} is: {value}."}
    assert lines[-1] == ""
    assert one.question == f"What is the special magic number for {key} mentioned in the provided text?"
    assert one.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert one.outputs == (value,)
    assert one.input == one.context + one.question


def test_the_wording_with_several_answers(essay):
    many = sample("niah_multiquery", essay)
    keys = {key: value for _, key, value in needles(many)}
    query = re.fullmatch(
        r"What are all the special magic numbers for (\S+), (\S+), (\S+), and (\S+) mentioned in the provided text\?",
        many.question,
    )
    assert many.outputs == tuple(keys[key] for key in query.groups())
    assert many.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    names = ", ".join(query.groups()[:3]) + f", and {query[4]}"
    assert many.answer_prefix == f" The special magic numbers for {names} mentioned in the provided text are"


def test_uuids_are_singular_too(essay):
    one = sample("niah_single_3", essay)
    assert one.context.startswith("A special magic uuid is hidden")
    assert one.question.startswith("What is the special magic uuid for ")
    assert uuid.UUID(one.outputs[0]).version == 4


# ------------------------------------------------------------------------------------------------------ structure

# haystack, kind of key, kind of value, keys, values per key, keys asked for: the table of the benchmark
TABLE = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
    "niah_3key": ("noise", "words", "numbers", 3, 1, 1),
}


def test_the_tasks_are_the_tables():
    assert set(NIAH) == set(TABLE)
    assert set(ruler.TASKS) == {*TABLE, "vt", "cwe", "fwe"}
    assert {**dict.fromkeys(TABLE, 128), "vt": 30, "cwe": 120, "fwe": 50} == ruler.MAX_NEW_TOKENS


@pytest.mark.parametrize("task", TABLE)
@pytest.mark.parametrize("index", [0, 3])
def test_needles_are_as_many_and_of_the_kind_the_table_says(task, index, essay):
    haystack, key_kind, value_kind, keys, values, queries = TABLE[task]
    one = sample(task, essay, index=index)
    found = needles(one)
    by_key = {}
    for kind, key, value in found:
        assert kind == value_kind
        assert re.fullmatch(PATTERN[key_kind], key)
        assert re.fullmatch(PATTERN[value_kind], value)
        by_key.setdefault(key, set()).add(value)
    assert len({value for _, _, value in found}) == len(found)
    asked = [key for key in by_key if re.search(rf"(?<!\S){key}(?=[,\s])", one.question)]
    assert len(asked) == queries
    assert sorted(one.outputs) == sorted(value for key in asked for value in by_key[key])
    assert len(one.outputs) == queries * values
    if haystack == "needle":
        assert len(found) > 20
        assert len(by_key) == len(found)
        assert len(one.context.strip().split("\n")) == 1 + len(found)
    else:
        assert len(by_key) == keys
        assert all(len(group) == values for group in by_key.values())


def test_noise_needles_stand_at_distinct_random_lines(essay):
    places = set()
    for one in ruler.generate("niah_single_1", TOKENIZER, 800, 30, 0):
        lines = one.context.split("\n")[1:-1]
        (place,) = [number for number, line in enumerate(lines) if line != NOISE]
        places.add(place / (len(lines) - 1))
    assert len(places) > 10
    assert min(places) < 0.25
    assert max(places) > 0.75


def test_depths_are_forty_even_percentages():
    assert len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[20], DEPTHS[39]) == (0, 3, 51, 100)


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multivalue", "niah_multiquery"])
def test_essay_needles_stand_at_sentence_boundaries_at_distinct_depths(task, essay):
    one = sample(task, essay, 2000)
    body = one.context.split("\n")[1]
    pieces = re.split(r"One of the special magic numbers for \S+ is: \d+\.", body)
    assert len(pieces) == 5
    prose = [piece.strip() for piece in pieces]
    for piece in prose[:-1]:
        assert piece == "" or piece.endswith("less.")
    for piece in prose[1:]:
        assert piece == "" or piece.startswith("Sentence")
    rest = " ".join(piece for piece in prose if piece)
    whole = essay.read_text()
    assert (whole + " " + whole).startswith(rest)
    counts = [len(Essay(piece).sentences) if piece else 0 for piece in prose]
    depths, total = [], sum(counts)
    for number in range(4):
        depths.append(sum(counts[: number + 1]))
    allowed = {int(total * depth / 100) for depth in DEPTHS}
    assert set(depths) <= allowed
    assert depths == sorted(depths)


def test_a_short_haystack_starts_over(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("Only one sentence here.\n")
    one = sample("niah_single_2", file, 600)
    assert 595 <= one.length <= 600
    before, after = re.split(r"One of the special magic .*\d{7}\.", one.context.split("\n")[1])
    words = (before + after).split()
    assert words == ("Only one sentence here. " * 200).split()[: len(words)]
    assert len(words) > 300


@given(st.integers(0, 60))
def test_an_essay_is_cut_to_the_word(words):
    text = "One two three. Four five. Six seven eight nine! Ten."
    cut = " ".join(Essay(text).cut(words))
    assert cut.split() == (text.split() * 7)[:words]


def test_variables_form_one_chain_in_order(essay):
    one = sample("vt", essay, 700)
    statements = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w{5})$", one.context, flags=re.M)
    assert len(statements) == 5
    names = [name for name, _ in statements]
    assert [source for _, source in statements[1:]] == names[:-1]
    assert re.fullmatch(r"\d{5}", statements[0][1])
    assert one.outputs == tuple(names)
    assert len(set(names)) == 5
    assert f"Find all variables that are assigned the value {statements[0][1]}" in one.question
    others = [line for line in one.context.split("\n")[1:-1] if not line.startswith("VAR")]
    assert set(others) == {NOISE}


@pytest.mark.parametrize(("length", "counts", "example"), [(4000, (6, 1), (3, 1)), (4096, (30, 3), (10, 3))])
def test_common_words_have_the_published_counts(length, counts, example, essay):
    one = sample("cwe", essay, length)
    first, second = re.findall(r"^1\. .*$", one.context, flags=re.M)
    shown, asked = (Counter(re.findall(r"\d+\. (\S+)", text)) for text in (first, second))
    assert Counter(asked.values())[counts[0]] == 10
    assert set(asked.values()) == set(counts)
    assert {word for word, count in asked.items() if count == counts[0]} == set(one.outputs)
    assert set(shown.values()) == set(example)
    assert not set(shown) & set(asked)
    solution = re.search(r"list are: (.*)$", one.context, flags=re.M)[1]
    assert set(re.findall(r"\d+\. (\S+)", solution)) == {word for word, count in shown.items() if count == example[0]}
    assert re.findall(r"(\d+)\. ", second) == [str(number) for number in range(1, asked.total() + 1)]
    assert one.context.endswith("\n")
    assert one.question.startswith("Question: What are the 10 most common words")


@pytest.mark.parametrize("length", [600, 2000, 6000])
def test_frequent_words_follow_zeta_of_two(length, essay):
    one = sample("fwe", essay, length)
    words = Counter(one.context.split("\n")[1].split())
    assert all(word == "..." or re.fullmatch("[a-z]{6}", word) for word in words)
    ranked = [word for word, _ in words.most_common()]
    assert ranked[0] == "..."
    assert set(one.outputs) == set(ranked[1:4])
    second, third, fourth, fifth = (words[word] for word in ranked[1:5])
    assert second > third > fourth > fifth
    # 1/4, 1/9 and 1/16 of the first, each rounded down by less than one word
    for rank, count in ((2, second), (3, third), (4, fourth)):
        assert abs(count - words["..."] / rank**2) < 1 + 1 / rank**2


# --------------------------------------------------------------------------------------------------------- length


def unit(task):
    """Most tokens by which one more line, needle, word or coded word lengthens a prompt of `Tokenizer`."""
    if task in NIAH:
        return {"noise": 25, "needle": 30, "essay": 3}[NIAH[task].haystack]
    return {"vt": 25, "cwe": 30, "fwe": 20}[task]


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("length", [777, 1024, 5000])
def test_samples_fill_the_length_and_never_exceed_it(task, length, essay):
    for one in ruler.generate(task, TOKENIZER, length, 2, 7, essay):
        count = len(TOKENIZER.encode(one.input + one.answer_prefix)) + ruler.MAX_NEW_TOKENS[task]
        assert one.length == count
        assert one.max_new_tokens == ruler.MAX_NEW_TOKENS[task]
        assert length - unit(task) < count <= length
        assert all(answer in one.context for answer in one.outputs)
        assert not any(answer in one.question + one.answer_prefix for answer in one.outputs)


def test_an_encoding_object_is_counted_too(essay):
    class Fast:
        def encode(self, text):
            return type("Encoding", (), {"ids": TOKENIZER.encode(text), "__len__": lambda self: -1})()

    assert ruler.generate("niah_3key", Fast(), 500, 2) == ruler.generate("niah_3key", TOKENIZER, 500, 2)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_too_short_a_target_names_the_exact_minimum(task, essay):
    with pytest.raises(ValueError, match=r"length 40 is too short for sample 0 of .* at least \d+ tokens") as caught:
        ruler.generate(task, TOKENIZER, 40, 1, 0, essay)
    minimum = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert ruler.generate(task, TOKENIZER, minimum, 1, 0, essay)[0].length == minimum
    with pytest.raises(ValueError, match=f"at least {minimum} tokens"):
        ruler.generate(task, TOKENIZER, minimum - 1, 1, 0, essay)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(0, 400), st.integers(0, 20))
def test_the_search_finds_the_largest_size_that_fits(steps, room, minimum):
    def tokens(size):  # grows by the steps, then by one a size
        return 5 + sum(steps[:size]) + max(0, size - len(steps))

    limit = tokens(minimum) + room
    size = ruler.largest_that_fits(tokens, limit, minimum)
    assert tokens(size) <= limit < tokens(size + 1)


def test_a_tokenizer_that_counts_nothing_is_an_error(essay):
    class Blind:
        def encode(self, text):
            return [1]

    with pytest.raises(ValueError, match="fewer than one a word"):
        ruler.generate("niah_single_1", Blind(), 200, 1)


# ------------------------------------------------------------------------------------------------- repeatability


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_sample_depends_on_task_seed_and_index_only(task, essay):
    five = ruler.generate(task, TOKENIZER, 1200, 5, 11, essay)
    assert ruler.generate(task, TOKENIZER, 1200, 2, 11, essay) == five[:2]
    assert [one.index for one in five] == [0, 1, 2, 3, 4]
    assert len({one.context for one in five}) == 5
    assert ruler.generate(task, TOKENIZER, 1200, 1, 12, essay)[0].context != five[0].context


def test_a_longer_sample_asks_the_same_thing(essay):
    short, long = sample("niah_multikey_1", essay, 700), sample("niah_multikey_1", essay, 3000)
    assert (short.question, short.outputs) == (long.question, long.outputs)


def test_a_draw_is_pinned(essay):
    """Random streams are seeded by text and must not change between versions: data sets would."""
    assert sample("vt", essay, 400).outputs == ("FYHUF", "UTJAC", "HWLMY", "XFSWM", "JXWIY")


def test_progress_is_called_once_a_sample(essay):
    calls = []
    ruler.generate("vt", TOKENIZER, 400, 3, progress=lambda: calls.append(1))
    assert len(calls) == 3


# ---------------------------------------------------------------------------------------------------- bad input


def test_unknown_tasks_and_counts_are_refused():
    with pytest.raises(ValueError, match="unknown task 'niah'; the tasks are niah_single_1, "):
        ruler.generate("niah", TOKENIZER, 400, 1)
    with pytest.raises(ValueError, match="num_samples must not be negative, got -1"):
        ruler.generate("vt", TOKENIZER, 400, -1)
    assert ruler.generate("vt", TOKENIZER, 400, 0) == []


def test_a_missing_essay_names_both_ways(monkeypatch, tmp_path):
    monkeypatch.delenv("ICML26_DATA", raising=False)
    with pytest.raises(MissingData, match="give its path as an argument, or set ICML26_DATA"):
        ruler.generate("niah_single_2", TOKENIZER, 400, 1)
    with pytest.raises(MissingData, match=r"no manifoldkv/emerson_essays\.txt at"):
        ruler.generate("niah_single_2", TOKENIZER, 400, 1, haystack=tmp_path / "none.txt")


def test_the_essay_is_found_by_the_environment(monkeypatch, tmp_path):
    (tmp_path / "manifoldkv").mkdir()
    (tmp_path / "manifoldkv" / "emerson_essays.txt").write_text("A sentence of my own. " * 9)
    monkeypatch.setenv("ICML26_DATA", str(tmp_path))
    assert "A sentence of my own." in ruler.generate("niah_single_2", TOKENIZER, 400, 1)[0].context


# -------------------------------------------------------------------------------------------------------- score


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("It is 1234567.", ["1234567"], 1.0),
        ("It is 123456.", ["1234567"], 0.0),
        ("abcde, FGHIJ", ["ABCDE", "fghij", "KLMNO", "PQRST"], 0.5),
        ("", ["x"], 0.0),
        ("a b c", ["a", "b", "z"], 2 / 3),
    ],
)
def test_string_match_all(prediction, references, expected):
    assert ruler.string_match_all(prediction, references) == pytest.approx(expected)


def test_scores_of_bad_input():
    with pytest.raises(TypeError, match="give a list of strings"):
        ruler.string_match_all("a", "a")
    with pytest.raises(ValueError, match="no references"):
        ruler.string_match_all("a", [])
    with pytest.raises(ValueError, match="1 predictions for 0 samples"):
        ruler.mean_score(["a"], [])


def test_the_mean_score_is_over_samples(essay):
    samples = [replace(sample("vt", essay), outputs=("AAAAA", "BBBBB")), replace(sample("vt", essay), outputs=("C",))]
    assert ruler.mean_score(["aaaaa", "c"], samples) == 0.75


# -------------------------------------------------------------------------------------------------------- files


def test_files_have_the_benchmarks_fields_and_come_back_equal(tmp_path, essay):
    for task in ("niah_multivalue", "vt", "cwe", "fwe"):
        samples = ruler.generate(task, TOKENIZER, 1500, 3, 0, essay)
        file = tmp_path / task / "validation.jsonl"
        ruler.write_jsonl(file, samples)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert [row["index"] for row in rows] == [0, 1, 2]
        for row, one in zip(rows, samples, strict=True):
            assert row["input"] == one.input
            assert row["outputs"] == list(one.outputs)
            assert row["length"] == row["length_w_model_temp"] == one.length
            assert row["answer_prefix"] == one.answer_prefix
        assert ruler.read_jsonl(file) == samples
        assert [path.name for path in file.parent.iterdir()] == ["validation.jsonl"]


def test_the_benchmarks_own_files_are_read(tmp_path, essay):
    samples = ruler.generate("niah_multikey_1", TOKENIZER, 900, 2, 0, essay)
    file = tmp_path / "niah_multikey_1" / "validation.jsonl"
    file.parent.mkdir()
    fields = ("index", "input", "outputs", "length", "answer_prefix")
    lines = [{name: getattr(one, name) for name in fields} | {"length_w_model_temp": one.length} for one in samples]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert ruler.read_jsonl(file) == samples
    assert ruler.read_jsonl(file, task="vt")[0].max_new_tokens == 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: not a sample of a RULER task, it has no field 'input'"),
        ('{"index": 0, "input": "a", "outputs": [], "length": 3}', "outputs must be a list with at least one string"),
        ('{"index": 0, "input": "a", "outputs": "x", "length": 3}', "outputs must be a list"),
        ("not json", "line 1: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "validation.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        ruler.read_jsonl(file)
