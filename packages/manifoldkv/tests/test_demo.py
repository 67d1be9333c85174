"""The demo on a tiny model: the same result after kills, and a conclusion and a picture drawn from the figures."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from manifoldkv import (
    KVConfig,
    demo,
)
from manifoldkv.cli import app

NAMES = [
    "auto (ManifoldKV)",
    "L2 (ManifoldKV)",
    "L2, radius-calibrated",
    "cosine (KeyDiff)",
    "SnapKV",
    "key norm",
    "StreamingLLM",
    "random",
]


def figures(**half):
    """Accuracy of every rule: 0.25 but for the full cache (1) and what is said of half the cache."""
    found = {(demo.FULL, task, 0.0): 1.0 for task in demo.TASKS}
    for ratio in demo.RATIOS:
        for name in NAMES:
            for task in demo.TASKS:
                found[name, task, ratio] = half.get(name.split()[0], 0.25) if ratio == 0.5 else 0.25
    return found


@pytest.fixture
def command(tiny_folder):
    return ("demo", "--model", tiny_folder, "--samples", 2, "--tokens", 210, "--new-tokens", 3, "--dtype", "float32",
            "--quiet", "--json")  # fmt: skip


def run(command, out, capsys):
    code = app.run([str(argument) for argument in (*command, "--out", out)])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


class TestRun:
    def test_every_figure_is_there(self, command, tmp_path, capsys):
        code, found = run(command, tmp_path, capsys)
        assert code == 0, found
        assert found["tasks"] == ["niah_single_1", "niah_3key"]
        shown = {(row["method"], row["task"], row["removed"]) for row in found["accuracy"]}
        assert shown == set(figures())
        assert all(0 <= row["accuracy"] <= 1 for row in found["accuracy"])
        assert found["auto"].partition(",")[0] in ("l2", "cosine")
        picture = tmp_path / "demo.png"
        assert found["picture"] == str(picture)
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert (tmp_path / "demo.svg").is_file()

    def test_killed_at_random_moments_it_ends_the_same(self, command, tmp_path, capsys):
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        expected = run(command, whole, capsys)[1]
        store = broken / "demo.jsonl"
        moments = random.Random(0)
        for _ in range(3):
            lines = store.read_bytes().count(b"\n") if store.exists() else 0
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os._exit(app.run([str(argument) for argument in (*command, "--out", broken)]))
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and (not store.exists() or store.read_bytes().count(b"\n") <= lines):
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.3))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        code, found = run(command, broken, capsys)
        assert code == 0, found
        paths = {"picture": str(broken / "demo.png")}
        assert found == expected | paths
        assert sorted(store.read_bytes().splitlines()) == sorted((whole / "demo.jsonl").read_bytes().splitlines())

    def test_other_settings_are_refused(self, command, tmp_path, capsys):
        assert run(command, tmp_path, capsys)[0] == 0
        code, said = run((*command, "--tokens", 220), tmp_path, capsys)
        assert code == 2
        assert "made with other settings (tokens: 210 there, 220 now)" in said
        assert len(said.strip().splitlines()) == 1

    @pytest.mark.parametrize(
        ("option", "said"),
        [
            (("--samples", 0), "--samples 0"),
            (("--new-tokens", 0), "--new-tokens 0"),
            (("--tokens", 3), "too short"),
            (("--model", "none"), "no model 'none'"),
            (("--dtype", "int4"), "--dtype"),
        ],
    )
    def test_bad_input(self, option, said, command, tmp_path, capsys):
        code, line = run((*command, *option), tmp_path, capsys)
        assert code == 2
        assert said in line
        assert len(line.strip().splitlines()) == 1


class TestConclusion:
    def test_names_the_best_rule_and_its_figures(self):
        line = demo.conclude(figures(cosine=0.875, L2=0.5, auto=0.75))
        assert line == (
            "With half of the cache removed, cosine (KeyDiff) found 88% of the needles (full cache: 100%); "
            "plain L2 found 50%, and the metric that 'auto' chose found 75%."
        )

    def test_names_all_that_share_the_first_place(self):
        line = demo.conclude(figures(cosine=0.5, SnapKV=0.5))
        assert "cosine (KeyDiff) and SnapKV found 50%" in line
        assert "plain L2 found 25%" in line

    def test_a_cache_that_loses_everything_is_not_praised(self):
        lost = dict.fromkeys(figures(), 0.0)
        assert "found 0% of the needles (full cache: 0%)" in demo.conclude(lost)

    def test_both_tasks_count_alike(self):
        found = figures()
        found["random", "niah_single_1", 0.5] = 1.0
        assert "random found 62% of the needles" in demo.conclude(found)


class TestPicture:
    def test_lines_labels_and_axes(self, tmp_path, monkeypatch):
        from icml26_shared import plots

        drawn = []
        save = plots.save

        def keep(figure, path):
            for axis in figure.axes:
                lines = {
                    line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()
                }
                drawn.append((axis.get_title("left"), axis.get_xlabel(), axis.get_ylabel(), lines))
            drawn.append([text.get_text() for text in figure.legends[0].get_texts()])
            return save(figure, path)

        monkeypatch.setattr(plots, "save", keep)
        accuracy = figures(cosine=0.875)
        demo.draw(accuracy, tmp_path / "demo.png", "a title")
        width, height = struct.unpack(">II", (tmp_path / "demo.png").read_bytes()[16:24])
        assert width > 800
        assert height > 300
        one, three, legend = drawn
        assert legend == [demo.FULL, *NAMES]
        assert one[0] == "one key in noise (niah_single_1)"
        assert three[0] == "three keys in noise (niah_3key)"
        assert one[1] == "cache kept (% of tokens)"
        assert one[2] == "needles found (share)"
        for task, (*_, lines) in zip(demo.TASKS, (one, three), strict=True):
            for name in NAMES:
                kept, values = lines[name]
                assert values == [accuracy[name, task, ratio] for ratio in demo.RATIOS]
                assert kept == pytest.approx([80, 50, 25], abs=1.5)  # moved aside a little where lines coincide
            assert set(lines[demo.FULL][1]) == {1.0}


def test_the_settings_compared():
    from manifoldkv.eval import SnapKV

    found = demo.settings_at(0.2, 7)
    assert list(found) == NAMES
    plain = {"compression_ratio": 0.2, "n_sink": 0, "n_recent": 0}
    assert found["auto (ManifoldKV)"] == KVConfig(metric="auto", **plain)
    assert found["L2 (ManifoldKV)"] == KVConfig(metric="l2", **plain)
    assert found["cosine (KeyDiff)"] == KVConfig(metric="cosine", **plain)
    assert found["random"] == KVConfig(metric="random", seed=7, **plain)
    assert found["StreamingLLM"] == KVConfig(metric="streaming", compression_ratio=0.2, n_sink=4, n_recent=0)
    assert found["SnapKV"] == SnapKV(0.2)
