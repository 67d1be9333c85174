"""Rollout logs: reading, replaying, and every kind of bad line."""

import gzip
import json

import pytest
import torch

from dppo import PruningConfig
from dppo.cli import app
from dppo.logs import LogError, batches, read_groups, read_lengths, replay


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def group(prompt, rewards, length=10, **more):
    return [{"prompt_id": prompt, "reward": r, "length": length, **more} for r in rewards]


def test_groups_by_runs_and_repeated_visits(tmp_path):
    rows = group("a", [1, 0, 0, 0]) + group("b", [1, 1, 1, 1]) + group("b", [0, 1, 0, 0]) + group("a", [1, 1, 0, 0])
    groups = read_groups(write(tmp_path / "log.jsonl", [*rows[:4], "", *rows[4:]]))
    assert [g.prompt for g in groups] == ["a", "b", "b", "a"]
    assert groups[0].advantages.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert groups[1].advantages.tolist() == [0, 0, 0, 0]


def test_groups_by_step_whatever_the_order(tmp_path):
    rows = group(1, [1, 0], step=0) + group(2, [1, 1], step=0) + group(1, [0, 0], step=1)
    shuffled = [rows[i] for i in (4, 0, 2, 5, 1, 3)]
    groups = read_groups(write(tmp_path / "log.jsonl", shuffled))
    by_step = list(batches(groups, 99))
    assert [[g.prompt for g in batch] for batch in by_step] == [[1, 2], [1]]
    assert {len(g.rewards) for g in groups} == {2}


def test_given_advantages_are_used(tmp_path):
    rows = [
        {"prompt_id": 0, "reward": 1, "length": 3, "advantage": 7.0},
        {"prompt_id": 0, "reward": 0, "length": 0, "advantage": -1.0},
    ]
    (only,) = read_groups(write(tmp_path / "log.jsonl", rows))
    assert only.advantages.tolist() == [7.0, -1.0]
    assert only.lengths.tolist() == [3, 0]


def test_replay_by_hand(tmp_path):
    """One group of 1000 with equal lengths, then the same prompt again: low against the other prompt's history."""
    rows = group("a", [1, 0, 0, 0]) + group("b", [1, 1, 0, 0]) + group("a", [1, 0, 0, 0]) + group("c", [0, 0, 0, 0])
    groups = read_groups(write(tmp_path / "log.jsonl", rows))
    result = replay(groups, PruningConfig(), prompts=2)
    assert result.groups == 4
    assert result.dead_groups == 1
    assert result.tokens == 160
    # Second batch: "a" was seen with H = .866 < τ = (.866 + 1)/2, so it is skipped with probability 1/2.
    assert result.generated == pytest.approx(80 + 20 + 40)
    # a: 1 + 3/2 completions; b: 4; a again: half of that; c: none.
    assert result.updated == pytest.approx(25 + 40 + 12.5)
    a_squares = [3.0, 1 / 3, 1 / 3, 1 / 3]
    expected = 10 * (sum(a_squares[1:]) * 1 + (2 - 1) * 3.0 + sum(a_squares[1:]) * 3)
    assert result.added == pytest.approx(expected)
    assert result.energy == pytest.approx(10 * (4 + 4 + 4))
    summary = result.summary()
    assert summary["bias"]["dppo"]["signal_lost"] == 0
    assert summary["bias"]["cppo"]["signal_lost"] > 0
    assert summary["bias"]["greso"]["signal_lost"] == 0, "no streak of all right or all wrong was visited again"
    assert summary["speedup_tokens"] == pytest.approx(640 / (140 + 3 * 77.5))


def test_greso_skips_are_losses_once_a_prompt_comes_back_to_life(tmp_path):
    dead, alive = [0, 0, 0, 0], [1, 0, 0, 0]
    visits = [("a", dead), ("b", alive), ("a", dead), ("b", alive), ("a", alive)]
    rows = [row for prompt, rewards in visits for row in group(prompt, rewards)]
    result = replay(read_groups(write(tmp_path / "log.jsonl", rows)), PruningConfig(), prompts=1)
    # p_hard goes .49, .50, .49, .50 with the batches; after two all-wrong visits "a" is skipped with 1 − .5², and so
    # three quarters of its third visit's signal, a third of the log's, are lost.
    assert result.lost_greso / result.signal == pytest.approx(0.75 / 3)


def test_a_log_of_dead_groups_only(tmp_path):
    result = replay(
        read_groups(write(tmp_path / "log.jsonl", group("a", [1, 1]) + group("b", [0, 0]))), PruningConfig()
    )
    summary = result.summary()
    assert summary["updated_share"] == 0
    assert summary["variance_inflation"] is None
    assert summary["dead_groups"] == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"prompt_id": 1, "reward": 1}', "no 'length'"),
        ('{"prompt_id": 1.5, "reward": 1, "length": 3}', "prompt_id must be a text or an integer"),
        ('{"prompt_id": 1, "reward": NaN, "length": 3}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": "1", "length": 3}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": 1, "length": -3}', "length must be a whole number"),
        ('{"prompt_id": 1, "reward": 1, "length": 3.5}', "length must be a whole number"),
        ('{"prompt_id": 1, "reward": 1, "length": 3, "advantage": Infinity}', "advantage must be a finite number"),
        ('{"prompt_id": 1, "reward": 1, "length": 3, "step": "x"}', "step must be an integer"),
        ('{"prompt_id": 1, "reward": 1, "length": 3, "step": 1.0}', "step must be an integer"),
        ('{"prompt_id": 1, "reward": 1, "length": 3, "step": 18446744073709551616}', "step must be an integer"),
        ('{"reward": 1, "length": 3}', "no 'prompt_id'"),
        ('{"prompt_id": 1, "length": 3}', "no 'reward'"),
        ('{"prompt_id": null, "reward": 1, "length": 3}', "prompt_id must be a text or an integer, got None"),
        ('{"prompt_id": true, "reward": 1, "length": 3}', "prompt_id must be a text or an integer, got True"),
        ('{"prompt_id": [1], "reward": 1, "length": 3}', r"prompt_id must be a text or an integer, got \[1\]"),
        ('{"prompt_id": 1, "reward": null, "length": 3}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": false, "length": 3}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": [1], "length": 3}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": 1e200, "length": 3}', "reward must be a finite number below 1e.100, got 1e.200"),
        (f'{{"prompt_id": 1, "reward": 1{"0" * 400}, "length": 3}}', "reward must be a finite number"),
        ('{"prompt_id": 1, "reward": 1, "length": null}', "length must be a whole number"),
        ('{"prompt_id": 1, "reward": 1, "length": true}', "length must be a whole number"),
        ('{"prompt_id": 1, "reward": 1, "length": 10000000000000000000000}', "length must be a whole number"),
        ("[" * 100_000, "line 2: not JSON that can be read"),
        (f'{{"prompt_id": 1, "reward": 1{"0" * 5000}, "length": 3}}', "line 2: not JSON that can be read"),
        ('{"prompt_id": "a", "reward": 1, "length": 3, "advantage": 1}', "line 1: no advantage, which other rows"),
    ],
)
def test_bad_lines_say_where(tmp_path, capsys, line, message):
    path = write(tmp_path / "log.jsonl", [group("a", [1])[0], line])
    with pytest.raises(LogError, match=message):
        read_groups(path)
    assert app.run(["audit", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, "one line, no traceback"
    assert shown.out == ""


def test_line_ends_blank_lines_marks_and_gzip_do_not_matter(tmp_path):
    rows = [json.dumps(row) for row in group("ä", [1, 0, 0]) + group("b", [0, 1, 1])]
    plain = read_groups(write(tmp_path / "plain.jsonl", rows))
    windows = "\ufeff" + "\r\n".join(["", *rows[:2], "  ", *rows[2:], "", ""])
    (tmp_path / "windows.jsonl").write_bytes(windows.encode())
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    for name in ("windows.jsonl", "log.jsonl.gz"):
        other = read_groups(tmp_path / name)
        assert [g.prompt for g in other] == [g.prompt for g in plain] == ["ä", "b"]
        assert [g.rewards.tolist() for g in other] == [[1, 0, 0], [0, 1, 1]]


def test_files_that_are_no_text_and_damaged_archives(tmp_path):
    rows = "".join(json.dumps(row) + "\n" for row in group("a", range(500)))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt_id": "\xe4"}\n')
    with pytest.raises(LogError, match="after line 0: not text in UTF-8"):
        read_groups(tmp_path / "latin.jsonl")
    whole = gzip.compress(rows.encode())
    for damaged in (whole[:-20], whole[:100] + b"\0" * 20 + whole[120:], whole[:-8] + b"\0" * 8):
        (tmp_path / "cut.gz").write_bytes(damaged)
        with pytest.raises(LogError, match="the gzip file is damaged"):
            read_groups(tmp_path / "cut.gz")
    with pytest.raises(LogError, match="line 1: not JSON"):
        read_groups(write(tmp_path / "two.jsonl", ['{"a": 1}{"a": 2}']))


def test_null_is_absent(tmp_path):
    rewards = {"a": [1, 0], "b": [1, 1], "c": [0, 1]}
    bare = [row for name in "abac" for row in group(name, rewards[name])]
    nulls = [{**row, "step": None, "advantage": None} for row in bare]
    first, second = (read_groups(write(tmp_path / "log.jsonl", rows)) for rows in (bare, nulls))
    assert [g.prompt for g in first] == [g.prompt for g in second] == ["a", "b", "a", "c"]
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("prompt", [2**63, 2**64 - 1, -(2**80), "", "\ud800", "a\u2028b", "x" * 10_000])
def test_any_prompt_id(tmp_path, prompt):
    """Unsigned 64-bit hashes, long numbers, half of a surrogate pair, separators: an id is an id."""
    rows = group(prompt, [1, 0, 0, 0]) + group("other", [1, 1, 0, 0]) + group(prompt, [1, 0, 0, 0])
    result = replay(read_groups(write(tmp_path / "log.jsonl", rows)), PruningConfig(), prompts=2)
    assert result.generated == pytest.approx(80 + 20), "recognised at its second visit"


def test_one_item_groups_and_zero_lengths(tmp_path, capsys):
    ones = write(tmp_path / "ones.jsonl", [row for i in range(5) for row in group(i, [i])])
    assert [len(g.rewards) for g in read_groups(ones)] == [1] * 5
    summary = replay(read_groups(ones), PruningConfig()).summary()
    assert summary["dead_groups"] == 5, "one reward is its own mean"
    assert app.run(["audit", str(ones)]) == 0
    assert "All groups of this log are dead" in capsys.readouterr().out
    empty = write(tmp_path / "empty.jsonl", group("a", [1, 0, 0], length=0))
    summary = replay(read_groups(empty), PruningConfig()).summary()
    assert summary["tokens"] == summary["generated_share"] == summary["updated_share"] == 0
    assert summary["speedup_tokens"] is None
    assert app.run(["audit", str(empty), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bias"]["cppo"]["signal_lost"] is None
    assert app.run(["audit", str(empty)]) == 0
    assert "has length 0" in capsys.readouterr().out
    mixed = group("a", [1, 0, 0], length=0) + group("b", [1, 0, 0], length=7)
    result = replay(read_groups(write(tmp_path / "mixed.jsonl", mixed)), PruningConfig(prompt_rate=0))
    assert result.updated == pytest.approx(7 * (1 + 0.5 + 0.5))


def test_equal_advantages_of_a_log_are_not_pruned(tmp_path):
    rows = group("a", [1, 1, 1], advantage=-0.3) + group("b", [1, 0, 1, 0])
    result = replay(read_groups(write(tmp_path / "log.jsonl", rows)), PruningConfig(0.95, 0.95))
    assert result.updated == result.generated == result.tokens == 70
    assert result.added == 0


def test_a_huge_group(tmp_path):
    """50,000 completions of one prompt, one right: all others are low."""
    result = replay(
        read_groups(write(tmp_path / "log.jsonl", group("a", [1] + [0] * 49_999, length=2))), PruningConfig()
    )
    assert result.tokens == 100_000
    assert result.updated == pytest.approx(2 + 2 * 49_999 / 2)
    assert result.ess == pytest.approx(0.5, rel=0.02)  # half of them with weight 2: (Σw)² / Σw² of n/2 each


def test_dead_batches_do_not_count_as_lost_sample_size(tmp_path):
    rows = group("a", [1, 1, 1, 1]) + group("b", [1, 1, 0, 0])
    summary = replay(read_groups(write(tmp_path / "log.jsonl", rows)), PruningConfig(), prompts=1).summary()
    assert summary["ess_share"] == 1


def test_empty_and_missing_files(tmp_path):
    with pytest.raises(LogError, match="has no rows"):
        read_groups(write(tmp_path / "log.jsonl", [""]))
    with pytest.raises(FileNotFoundError):
        read_groups(tmp_path / "none.jsonl")


def test_lengths(tmp_path):
    assert read_lengths(write(tmp_path / "a.txt", ["12", " 7 ", ""])).tolist() == [12, 7]
    assert read_lengths(write(tmp_path / "b.jsonl", [{"length": 5}, {"length": 0}])).tolist() == [5, 0]
    for bad in ("x", "1.5", '{"tokens": 3}'):
        with pytest.raises(LogError, match="line 1"):
            read_lengths(write(tmp_path / "c.txt", [bad]))
    for bad in ("-1", "1" + "0" * 30):
        with pytest.raises(LogError, match="lengths are >= 0 and at most"):
            read_lengths(write(tmp_path / "c.txt", [bad]))
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"3\r\n4\r\n"))
    assert read_lengths(tmp_path / "d.gz").tolist() == [3, 4]


def test_mixed_int_and_text_ids(tmp_path):
    groups = read_groups(write(tmp_path / "log.jsonl", group(1, [1, 0]) + group("x", [1, 0])))
    assert torch.isfinite(torch.tensor(replay(groups, PruningConfig(), prompts=1).updated))
