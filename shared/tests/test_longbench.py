"""LongBench: the file format, each metric by hand, and middle truncation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml26_shared.errors import UserError
from icml26_shared.evaluation import longbench
from icml26_shared.evaluation.longbench import Example, score

ROWS = [
    {
        "input": "Who wrote it?",
        "context": "Passage 1: It was written by Ada.\u2028Passage 2: no.",
        "answers": ["Ada Lovelace", "Ada"],
        "length": 9,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    },
    {
        "input": "Question: How tall is it?\nType:",
        "context": "Question: ...",
        "answers": ["Number"],
        "length": 2,
        "dataset": "trec",
        "language": "en",
        "all_classes": ["Number", "Number of days", "Place"],
        "_id": "b2",
    },
    {
        "input": "",
        "context": "会议开始。",
        "answers": ["会议很长"],
        "length": 5,
        "dataset": "vcsum",
        "language": "zh",
        "all_classes": None,
        "_id": "c3",
    },
]


def example(dataset, *answers, classes=()):
    return Example("x", dataset, "en", "", "", answers, tuple(classes), 1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_the_original_format_is_read(file):
    first, second, third = longbench.load(file)
    assert first == Example("a1", "hotpotqa", "en", "Who wrote it?", ROWS[0]["context"], ("Ada Lovelace", "Ada"), (), 9)
    assert second.all_classes == ("Number", "Number of days", "Place")
    assert (third.language, third.answers) == ("zh", ("会议很长",))
    assert longbench.load(file.parent) == [first, second, third]


def test_bad_files_are_named(tmp_path, file):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \*\.jsonl files"):
        longbench.load(tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be read"):
        longbench.load(tmp_path / "none.jsonl")
    bad = {name: value for name, value in ROWS[0].items() if name != "answers"}
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(UserError, match="line 2: not a LongBench example, it has no field 'answers'"):
        longbench.load(file)


def test_there_are_twenty_one_data_sets():
    assert len(longbench.DATASETS) == 21
    assert {name for name, dataset in longbench.DATASETS.items() if dataset.first_line} == {
        "trec",
        "triviaqa",
        "samsum",
        "lsht",
    }
    with pytest.raises(ValueError, match="unknown LongBench data set 'nonesuch'; known are narrativeqa"):
        score("x", example("nonesuch", "x"))


def test_every_data_set_gives_its_own_answer_the_full_score():
    answers = {"passage_retrieval_en": "Paragraph 7", "passage_retrieval_zh": "段落7", "passage_count": "7"}
    for name in longbench.DATASETS:
        answer = answers.get(name, "返回 value")
        assert score(answer, example(name, answer, classes=[answer, "other"])) == pytest.approx(1.0), name
        assert score("", example(name, answer, classes=[answer, "other"])) == 0.0, name


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The Ada, Lovelace!", "ada lovelace", 1.0),  # case, punctuation and articles do not count
        ("it was Ada", "Ada Lovelace", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("no no yes", "no yes yes", 2 / 3),  # multiset overlap 2 of 3 and 3
        ("x", "y", 0.0),
        ("the", "a", 0.0),  # nothing left to compare
    ],
)
def test_token_f1(prediction, answer, expected):
    assert score(prediction, example("qasper", answer)) == pytest.approx(expected)


def test_the_best_answer_counts():
    assert score("Ada", example("hotpotqa", "Ada Lovelace", "Ada")) == 1.0


def test_chinese_is_compared_by_characters():
    # characters 会议很长 against 会议，很短: 3 in common of 4 and 4
    assert score("会议，很短", example("multifieldqa_zh", "会议很长")) == pytest.approx(0.75)
    # in order: 长会议 and 会议长 share the subsequence 会议
    assert score("长 会议。", example("dureader", "会议长")) == pytest.approx(2 / 3)


def test_rouge_l_is_the_longest_common_subsequence():
    # the cat on mat: 4 of 5 and 6 words
    expected = 2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6)
    assert score("the cat on red mat", example("gov_report", "the cat sat on the mat")) == pytest.approx(expected)


@given(st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", max_size=12))
def test_lcs_equals_the_textbook_table(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert longbench.lcs_length(a, b) == table[-1][-1]


def test_classification_shares_the_credit():
    classes = ["Number", "Number of days", "Place"]
    number = example("trec", "Number", classes=classes)
    assert score("Number", number) == 1.0
    assert score("Number or Place", number) == 0.5
    assert score("Place", number) == 0.0
    # a class that is only a part of the right one's name is not another guess
    assert score("Number of days", example("trec", "Number of days", classes=classes)) == 1.0
    # only the first line of the prediction counts
    assert score("\nNumber\nPlace", number) == 1.0


def test_retrieval_and_count_are_shares_of_the_numbers():
    assert score("Paragraph 3, or 4, or 3", example("passage_retrieval_en", "Paragraph 3")) == pytest.approx(2 / 3)
    assert score("段落12", example("passage_retrieval_zh", "段落1")) == 0.0
    assert score("There are 5. Or 6.", example("passage_count", "5")) == 0.5
    assert score("many", example("passage_count", "5")) == 0.0
    with pytest.raises(ValueError, match="names no paragraph"):
        score("3", example("passage_retrieval_en", "three"))


def test_code_is_compared_by_the_first_line_of_code():
    reference = example("lcc", "return x + 1")
    assert score("\n```python\n# next\nreturn x + 1\nprint(x)", reference) == 1.0
    # return x - 1: 11 of 12 characters in common
    assert score("return x - 1", reference) == pytest.approx(11 / 12)
    assert score("// nothing", reference) == 0.0


def test_prompts_hold_the_context_and_the_input(file):
    first, _, third = longbench.load(file)
    assert longbench.prompt(first).endswith(f"\n\n{first.context}\n\nWho wrote it?")
    assert longbench.prompt(third).endswith("会议开始。")
    assert longbench.prompt(first, "{context} Q: {input}") == f"{first.context} Q: Who wrote it?"
    # braces in the data are not a template
    odd = replace(first, context="{input} {x}", input="{context}")
    assert longbench.prompt(odd, "{context}|{input}") == "{input} {x}|{context}"


class Words:
    """Blank-separated tokens; a decoded end loses its outer blanks, so two ends can grow together."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return text.split(" ") if text else []

    def decode(self, ids):
        return " ".join(ids) + " "


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a_cut_text_fits_even_where_its_ends_tokenise_otherwise(limit):
    text = "a b c d e f"
    out = longbench.middle_truncate(Words(), text, limit)
    assert len(Words().encode(out, add_special_tokens=False)) <= limit
    assert out == "" or (out.startswith("a") and limit > 1)
    assert longbench.middle_truncate(Words(), text, 6) == text


class Characters:
    def encode(self, text, add_special_tokens=True):
        return list(text)

    def decode(self, ids):
        return "".join(ids)


@pytest.mark.parametrize(
    ("limit", "expected"), [(10, "0123456789"), (9, "012346789"), (4, "0189"), (3, "019"), (1, "0")]
)
def test_the_start_and_the_end_are_kept(limit, expected):
    assert longbench.middle_truncate(Characters(), "0123456789", limit) == expected


def test_nothing_to_keep_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        longbench.middle_truncate(Characters(), "abc", 0)
