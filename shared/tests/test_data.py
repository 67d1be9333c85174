"""Finding data sets, reading text and JSONL, splitting sentences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml26_shared.data import MissingData, find, paragraphs, sentences
from icml26_shared.data.jsonl import read_rows
from icml26_shared.data.text import read_text, standard_library
from icml26_shared.errors import UserError


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("text")
    monkeypatch.setenv("ICML26_DATA", str(tmp_path))
    return tmp_path


def test_data_is_found_by_the_environment(store):
    assert find("set") == store / "set"
    assert find("set", "a.txt") == store / "set" / "a.txt"


def test_an_argument_wins_over_the_environment(store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("other")
    assert find("set", "a.txt", other) == other / "a.txt"
    assert find("set", "a.txt", other / "a.txt") == other / "a.txt"
    assert find("set", root=other) == other


@pytest.mark.parametrize(
    "arguments", [("none",), ("set", "b.txt"), ("set", "b.txt", "/nowhere"), ("set", None, "/nowhere")]
)
def test_missing_data_is_a_user_error_and_a_missing_file(store, arguments):
    with pytest.raises(MissingData) as caught:
        find(*arguments)
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, FileNotFoundError)


def test_the_error_names_both_ways(monkeypatch, tmp_path):
    monkeypatch.delenv("ICML26_DATA", raising=False)
    with pytest.raises(MissingData, match="ICML26_DATA is not set: give its path as an argument, or set ICML26_DATA"):
        find("set", "a.txt")
    monkeypatch.setenv("ICML26_DATA", str(tmp_path))
    with pytest.raises(MissingData, match=r"a\.txt does not exist: give its path as an argument, or set ICML26_DATA"):
        find("set", "a.txt")
    with pytest.raises(MissingData, match=r"no set/a\.txt at .*: give the file or its folder"):
        find("set", "a.txt", tmp_path / "wrong")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00", "is not UTF-8"), (b" \n", "has no text"), (None, "cannot be read: No such")],
)
def test_unreadable_text_is_a_user_error(tmp_path, content, message):
    file = tmp_path / "t.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_text(file)


def test_paragraphs_are_blocks_between_blank_lines():
    assert paragraphs("\n\none\ntwo\n \nthree\n\n\n") == ["one two", "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said: "Go." Then he went.', ['He said: "Go."', "Then he went."]),
        ("Mr. Smith met Dr. J. Brown. They left.", ["Mr. Smith met Dr. J. Brown.", "They left."]),
        ("It cost 3.50 then. 12 came.", ["It cost 3.50 then.", "12 came."]),
        ("See e.g. Plato. Or not...", ["See e.g. Plato.", "Or not..."]),
        ('First. "Second one." (Third.)', ["First.", '"Second one."', "(Third.)"]),
        ("no capital. after it", ["no capital. after it"]),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


@given(st.text(alphabet=list("aBr .!?\"'()\nM1"), max_size=60))
def test_sentences_join_to_the_text(text):
    assert " ".join(sentences(text)) == " ".join(text.split())


def test_rows_may_hold_any_character(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "x\u2028y\x85z"}\n\n{"a": "2"}\n', encoding="utf-8")
    assert read_rows(file, lambda row: row["a"], "a row") == ["x\u2028y\x85z", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: list instead of an object, so not a row"),
        ('{"b": 1}', "line 2: not a row, it has no field 'a'"),
        ('{"a": "x"}', "line 2: not a row .*invalid literal"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        read_rows(file, lambda row: int(row["a"]), "a row")


def test_the_standard_librarys_sources(tmp_path, monkeypatch):
    sources = {"b.py": "bb", "a.py": "aaa", "a/x.py": "x", "test/t.py": "t", "a/tests/u.py": "u", "c.txt": "c"}
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert standard_library(100) == b"aaaxbb"  # by path: "a.py" < "a/x.py" < "b.py"
    assert standard_library(100, packages=False) == b"aaabb"
    assert standard_library(4, packages=False) == b"aaab"
