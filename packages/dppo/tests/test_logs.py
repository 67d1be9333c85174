"""Rollout logs: reading, replaying, and every kind of bad line."""

import json

import pytest
import torch

from dppo import PruningConfig
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
    ],
)
def test_bad_lines_say_where(tmp_path, line, message):
    with pytest.raises(LogError, match=message):
        read_groups(write(tmp_path / "log.jsonl", [group("a", [1])[0], line]))


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
    with pytest.raises(LogError, match="lengths are >= 0"):
        read_lengths(write(tmp_path / "c.txt", ["-1"]))


def test_mixed_int_and_text_ids(tmp_path):
    groups = read_groups(write(tmp_path / "log.jsonl", group(1, [1, 0]) + group("x", [1, 0])))
    assert torch.isfinite(torch.tensor(replay(groups, PruningConfig(), prompts=1).updated))
