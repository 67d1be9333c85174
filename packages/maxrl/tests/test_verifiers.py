"""Verifiers, their failures, and the sandbox."""

import math
import time

import pytest

from icml26_shared.errors import UserError
from maxrl.eval.prompts import load_prompts
from maxrl.eval.verifiers import Scorer, TooManyFailures, get_verifier


@pytest.mark.parametrize(
    ("name", "completion", "answer", "passed"),
    [
        ("exact", " 42\n", "42", True),
        ("exact", "42.", "42", False),
        ("boxed", r"so \boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("boxed", r"\boxed{1,000}", "1000", True),
        ("boxed", r"\boxed{0.50}", "0.5", True),
        ("boxed", "42", "42", False),
        ("boxed", r"\boxed{4", "4", False),
        ("regex", "the answer is 12", r"\b12\b", True),
        ("regex", "the answer is 123", r"\b12\b", False),
    ],
)
def test_built_in(name, completion, answer, passed):
    assert get_verifier(name)(completion, answer) is passed


def test_unknown_verifiers():
    with pytest.raises(ValueError, match=r"choose one of exact, boxed, regex, maze, or module:function"):
        get_verifier("exakt")
    with pytest.raises(ValueError, match="cannot be imported"):
        get_verifier("nowhere:f")
    with pytest.raises(ValueError, match="is not a function"):
        get_verifier("math:pi")


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import time, os\n"
        "def judge(completion, answer):\n"
        "    print('noise on stdout')\n"
        "    if completion == 'raise': raise KeyError('boom')\n"
        "    if completion == 'hang': time.sleep(60)\n"
        "    if completion == 'die': os._exit(3)\n"
        "    if completion == 'none': return None\n"
        "    if completion == 'secret': return 'SECRET_TOKEN' in os.environ\n"
        "    return completion == answer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET_TOKEN", "x")
    return "mine:judge"


def test_failures_are_counted_and_stop_the_run(user_code):
    scorer = Scorer(user_code, max_failures=2)
    got = scorer(["a", "raise", "b", "none"], ["a", "a", "a", "a"])
    assert [x if x == x else None for x in got] == [1.0, None, 0.0, None]
    assert scorer.failures == 2
    with pytest.raises(TooManyFailures, match="failed 3 times, more than 2; the last time: KeyError: 'boom'"):
        scorer(["raise"], ["a"])


def test_sandbox_survives_hangs_crashes_and_noise(user_code):
    scorer = Scorer(user_code, sandbox=True, timeout=1.0)
    try:
        assert scorer(["a", "b"], ["a", "a"]) == [1.0, 0.0]
        start = time.monotonic()
        assert math.isnan(scorer(["hang"], ["a"])[0])
        assert time.monotonic() - start < 30
        assert math.isnan(scorer(["die"], ["a"])[0])
        assert math.isnan(scorer(["raise"], ["a"])[0])
        assert scorer(["secret", "a"], ["", "a"]) == [0.0, 1.0]
        assert scorer.failures == 3
    finally:
        scorer.close()
    with pytest.raises(ValueError, match="cannot be imported"):
        Scorer("nowhere:f", sandbox=True)


def test_prompts_of_several_formats(tmp_path):
    lines = tmp_path / "gsm8k.jsonl"
    lines.write_text(
        '{"question": "1 + 1?", "answer": "It is 2.\\n#### 2"}\n\n{"question": "2 + 2?", "answer": "#### 4"}\n'
    )
    assert [(p.prompt, p.answer) for p in load_prompts(lines)] == [("1 + 1?", "2"), ("2 + 2?", "4")]
    assert len(load_prompts(lines, limit=1)) == 1
    polaris = tmp_path / "polaris.json"
    polaris.write_text('[{"problem": "x", "answer": 3}]')
    assert load_prompts(polaris)[0].answer == "3"
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"prompt": ["a"], "answer": ["b"]}).to_parquet(tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet")[0].prompt == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        (
            '{"prompt": "a"}',
            r"row 1: it has the columns \['prompt'\]; needed: one of prompt, question, problem, and answer",
        ),
        ("[1]", "row 1: an object"),
        ('{"prompt": "a", "answer": "b"}\nnot json', "line 2 is not JSON"),
    ],
)
def test_bad_prompts(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_prompts(file)
    with pytest.raises(UserError, match="no file"):
        load_prompts(tmp_path / "absent.jsonl")
