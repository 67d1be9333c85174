"""The command line on a tiny local model: every command, JSON, resuming, and one line for what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from manifoldkv import KVConfig
from manifoldkv.cli import app

LONGBENCH = [
    {"input": "what ?", "context": "the sky is blue . " * 12, "answers": ["blue"], "length": 60, "dataset": "hotpotqa",
     "language": "en", "all_classes": None, "_id": "a"},
    {"input": "", "context": "Paragraph 1 : the sun . " * 8, "answers": ["1"], "length": 48, "dataset": "passage_count",
     "language": "en", "all_classes": None, "_id": "b"},
    {"input": "what is green ?", "context": "the grass is green . " * 12, "answers": ["grass", "the grass"],
     "length": 60, "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "c"},
]  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """``run(*arguments)``: exit code, parsed JSON (where asked for) or stdout, and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = app.run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, json.loads(said.out) if "--json" in arguments and code == 0 else said.out, said.err

    return call


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("the sky is blue . the grass is green . the sun is yellow . here we go . " * 4)
    return path


@pytest.fixture
def data(run, tiny_folder, tmp_path):
    """Two samples of a task, written by the command."""
    code, _, said = run("ruler", "generate", "--task", "niah_3key", "--length", 330, "--num-samples", 2,
                        "--tokenizer", tiny_folder, "-o", tmp_path / "data")  # fmt: skip
    assert code == 0, said
    return tmp_path / "data"


def refuses(result, *parts):
    """Exit code 2 and one line that says all of these."""
    code, _, said = result
    assert code == 2, said
    assert len(said.strip().splitlines()) == 1, said
    for part in parts:
        assert part in said


class TestGeneral:
    def test_version_and_help(self, run):
        from manifoldkv import __version__

        assert run("--version")[:2] == (0, f"manifoldkv {__version__}\n")
        code, shown, _ = run("--help")
        assert code == 0
        for command in ("demo", "claims", "bench", "diagnose", "ruler", "eval", "longbench", "generate", "vllm-check"):
            assert command in shown

    @pytest.mark.parametrize(
        "command",
        ["demo", "claims", "bench", "diagnose", "ruler generate", "eval", "longbench", "generate", "vllm-check"],
    )
    def test_every_command_has_help_and_refuses_unknown_options(self, command, run):
        code, shown, _ = run(*command.split(), "--help")
        assert code == 0
        assert f"manifoldkv {command}" in shown
        refuses(run(*command.split(), "--no-such-option", 1), f"manifoldkv {command} --help")

    def test_wrong_commands(self, run):
        refuses(run(), "no command given")
        refuses(run("compress"), "compress")

    def test_without_vllm_the_check_names_the_extra(self, run):
        if importlib.util.find_spec("vllm") is not None:
            pytest.skip("vLLM is installed here")
        refuses(run("vllm-check"), "manifoldkv[vllm]")


class TestDiagnose:
    def test_table_and_json(self, run, tiny_folder, words):
        code, found, said = run("diagnose", tiny_folder, "--text", words, "--dtype", "float32", "--json")
        assert code == 0
        assert "warning: the metric is chosen from 76 tokens" in said
        assert found["metric"] == found["model"]["metric"]
        assert found["metric"] in ("l2", "cosine")
        assert found["tokens"] == 76
        assert len(found["layers"]) == 2
        assert set(found["model"]) == {"cv", "agree", "upper", "lower", "overlap", "metric", "reason"}
        code, shown, _ = run("diagnose", tiny_folder, "--text", words, "--dtype", "float32")
        assert code == 0
        assert f"metric: {found['metric']}, because {found['model']['reason']}" in shown

    def test_the_same_as_the_function(self, run, tiny_folder, words):
        from icml26_shared import models
        from manifoldkv import diagnose

        model, tokenizer = models.load(tiny_folder, dtype="float32")
        with pytest.warns(UserWarning, match="76 tokens"):
            expected = diagnose(model, tokenizer(words.read_text(), return_tensors="pt").input_ids).to_dict()
        _, found, _ = run("diagnose", tiny_folder, "--text", words, "--dtype", "float32", "--json")
        assert found == json.loads(json.dumps(expected))

    def test_the_built_in_text_fills_the_tokens_asked_for(self, run, tiny_folder):
        _, found, _ = run("diagnose", tiny_folder, "--tokens", 300, "--dtype", "float32", "--json")
        assert found["tokens"] == 300

    def test_no_more_tokens_than_the_model_takes(self, run, tiny_folder):
        """Without the limit a slip of the finger would tokenise gigabytes."""
        code, found, said = run("diagnose", tiny_folder, "--tokens", 10**9, "--dtype", "float32", "--json")
        assert code == 0, said
        context = json.loads((tiny_folder / "config.json").read_text())["max_position_embeddings"]
        assert found["tokens"] == context
        assert f"calibrating on {context} tokens" in said

    def test_bad_input(self, run, tiny_folder, tmp_path):
        refuses(run("diagnose"), "model")
        refuses(run("diagnose", tmp_path / "nothing"), "no model", "local folder")
        refuses(run("diagnose", tiny_folder, "--text", tmp_path / "nothing.txt"), "no file at")
        (tmp_path / "empty.txt").write_text(" \n")
        refuses(run("diagnose", tiny_folder, "--text", tmp_path / "empty.txt"), "is empty")
        (tmp_path / "short.txt").write_text("the sky is blue")
        refuses(run("diagnose", tiny_folder, "--text", tmp_path / "short.txt"), "4 tokens are too few")
        refuses(run("diagnose", tiny_folder, "--tokens", 5), "--tokens 5 is too few")
        refuses(run("diagnose", tiny_folder, "--dtype", "int8"), "--dtype", "int8")


class TestRulerGenerate:
    def test_writes_the_benchmarks_own_format(self, run, tiny_folder, tmp_path):
        code, found, _ = run("ruler", "generate", "--task", "niah_single_1", "--length", 330, "--num-samples", 3,
                             "--tokenizer", tiny_folder, "-o", tmp_path / "data", "--json")  # fmt: skip
        assert code == 0
        file = tmp_path / "data" / "niah_single_1" / "validation.jsonl"
        assert found == {"path": str(file), "samples": 3, "longest": found["longest"]}
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["index"] for row in rows] == [0, 1, 2]
        for row in rows:
            assert {"index", "input", "outputs", "length", "answer_prefix"} <= set(row)
            assert row["length"] <= 330
            assert row["outputs"][0] in row["input"]

    def test_a_seed_decides_the_samples(self, run, tiny_folder, tmp_path):
        texts = []
        for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
            run("ruler", "generate", "--task", "vt", "--length", 400, "--num-samples", 1, "--tokenizer", tiny_folder,
                "-o", tmp_path / folder, "--seed", seed)  # fmt: skip
            texts.append((tmp_path / folder / "vt" / "validation.jsonl").read_text())
        assert texts[0] == texts[1] != texts[2]

    def test_a_place_that_cannot_be_written_is_refused_before_the_work(self, run, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setattr(
            "icml26_shared.evaluation.ruler.generate", lambda *_, **__: pytest.fail("samples were made")
        )
        refuses(
            run("ruler", "generate", "--task", "niah_single_1", "--length", 200, "-o", tmp_path / "file" / "data"),
            f"cannot write into {tmp_path / 'file'}; give a folder",
        )

    def test_an_essay_task_with_a_haystack_of_ones_own(self, run, tiny_folder, words, tmp_path):
        common = ("ruler", "generate", "--task", "niah_single_2", "--length", 330, "--num-samples", 1)
        code, _, said = run(*common, "--tokenizer", tiny_folder, "--haystack", words, "--out", tmp_path / "out")
        assert code == 0, said
        assert (tmp_path / "out" / "niah_single_2" / "validation.jsonl").is_file()

    def test_a_folder_with_nothing_but_a_tokenizer(self, run, tiny_folder, tmp_path):
        (tmp_path / "bare").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "bare" / name).write_bytes((tiny_folder / name).read_bytes())
        code, _, said = run("ruler", "generate", "--task", "niah_3key", "--length", 330, "--num-samples", 1,
                            "--tokenizer", tmp_path / "bare", "-o", tmp_path / "data")  # fmt: skip
        assert code == 0, said

    def test_bad_input(self, run, tiny_folder, tmp_path, monkeypatch):
        monkeypatch.delenv("ICML26_DATA", raising=False)
        common = ("ruler", "generate", "--num-samples", 1, "-o", tmp_path / "data", "--quiet")
        own = ("--tokenizer", tiny_folder)
        refuses(run(*common, *own, "--task", "niah_9", "--length", 330), "'niah_9' is unknown", "niah_single_1")
        refuses(run(*common, *own, "--task", "niah_3key", "--length", 130), "length 130 is too short", "at least")
        refuses(run(*common, *own, "--task", "niah_single_2", "--length", 330), "emerson_essays.txt", "ICML26_DATA")
        refuses(run(*common, *own, "--task", "niah_3key"), "--length")
        refuses(run(*common, "--tokenizer", tmp_path / "none", "--task", "vt", "--length", 330), "no tokenizer at")
        (tmp_path / "empty").mkdir()
        refuses(run(*common, "--tokenizer", tmp_path / "empty", "--task", "vt", "--length", 330), "cannot be loaded")
        refuses(run(*common, *own, "--task", "vt", "--length", 330, "--num-samples", 0), "--num-samples 0 must be 1")
        assert not (tmp_path / "data").exists()


class TestEval:
    @pytest.fixture
    def command(self, tiny_folder, data, tmp_path):
        return ("eval", "--model", tiny_folder, "--data", data, "--metric", "l2", "cosine", "--ratio", 0.2, 0.5,
                "--new-tokens", 4, "--dtype", "float32", "-o", tmp_path / "results.jsonl")  # fmt: skip

    def test_scores_every_setting(self, run, command, tmp_path):
        code, found, said = run(*command, "--json")
        assert code == 0, said
        names = ["full", "l2@0.2", "cosine@0.2", "l2@0.5", "cosine@0.5"]
        assert [(row["task"], row["setting"]) for row in found["scores"]] == [("niah_3key", name) for name in names]
        rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][1:]
        assert sorted((row["index"], row["config"]) for row in rows) == sorted((i, n) for i in range(2) for n in names)
        for row in rows:
            kept = row["total"] if row["config"] == "full" else KVConfig(
                compression_ratio=float(row["config"].split("@")[1])).keep_count(row["total"])  # fmt: skip
            assert row["kept"] == kept
        for row in found["scores"]:
            own = [other["score"] for other in rows if other["config"] == row["setting"]]
            assert row["score"] == sum(own) / 2

    def test_killed_between_lines_it_goes_on(self, run, command, tmp_path):
        """Killed by SIGKILL while it works, with a half-written line left; run again it gives the same results."""
        path = tmp_path / "results.jsonl"
        code, expected, _ = run(*command[:-1], tmp_path / "whole.jsonl", "--json")
        assert code == 0
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os._exit(app.run([str(argument) for argument in (*command, "--quiet")]))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 2):
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        before = path.read_bytes()
        with path.open("ab") as file:
            file.write(b'{"task": "niah_3key", "ind')
        code, found, said = run(*command, "--json")
        assert code == 0
        assert "half-written last line" in said
        assert found["scores"] == expected["scores"]
        assert path.read_bytes().startswith(before)  # nothing was computed twice
        whole = (tmp_path / "whole.jsonl").read_bytes()
        assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_more_settings_are_added_and_other_ones_refused(self, run, command, tmp_path):
        assert run(*command)[0] == 0
        path = tmp_path / "results.jsonl"
        before = path.read_bytes()
        code, found, _ = run(*command, "--metric", "l2", "snapkv", "calibrated", "--ratio", 0.5, "--json")
        assert code == 0
        assert [row["setting"] for row in found["scores"]] == ["full", "l2@0.5", "snapkv@0.5", "calibrated@0.5"]
        assert path.read_bytes().startswith(before)
        assert path.read_bytes()[len(before) :].count(b"\n") == 4
        refuses(run(*command, "--protocol", "query-aware"), "made with other settings", "query-agnostic")

    def test_other_data_is_refused(self, run, command, tiny_folder, data):
        assert run(*command)[0] == 0
        run("ruler", "generate", "--task", "niah_3key", "--length", 360, "--num-samples", 2, "--tokenizer", tiny_folder,
            "-o", data)  # fmt: skip
        refuses(run(*command, "--quiet"), "another prompt for sample 0 of niah_3key")

    def test_query_aware_and_a_single_file(self, run, command, data, tmp_path):
        file = data / "niah_3key" / "validation.jsonl"
        arguments = (*command[:3], "--data", file, *command[5:-1], tmp_path / "aware.jsonl")
        code, found, _ = run(*arguments, "--protocol", "query-aware", "--num-samples", 1, "--json")
        assert code == 0
        assert len(found["scores"]) == 5

    def test_bad_input(self, run, command, data, tmp_path):
        refuses(run(*command, "--metric", "l3"), "--metric 'l3' is unknown", "cosine_mean", "calibrated", "snapkv")
        refuses(run(*command, "--ratio", 1.0), "compression_ratio=1.0 must be in [0, 1)")
        refuses(run(*command, "--metric", "snapkv", "--ratio", -0.1), "compression_ratio=-0.1")
        refuses(run(*command, "--window", 1), "window=1")
        refuses(run(*command, "--n-sink", -1), "n_sink=-1")
        refuses(run(*command, "--num-samples", 0), "--num-samples 0 must be 1 or more")
        refuses(run(*command, "--num-samples", -1), "--num-samples -1 must be 1 or more")
        refuses(run(*command, "--new-tokens", 0), "--new-tokens 0 must be 1 or more")
        refuses(run(*command, "--protocol", "aware"), "--protocol", "aware")
        refuses(run(*command, "--data", tmp_path / "none"), "none")
        (tmp_path / "empty").mkdir()
        refuses(run(*command, "--data", tmp_path / "empty"), "no TASK/validation.jsonl under", "ruler generate")
        (tmp_path / "blank.jsonl").write_text("")
        refuses(run(*command, "--data", tmp_path / "blank.jsonl"), "has no text in it")
        (data / "niah_3key" / "validation.jsonl").write_text('{"index": 0}\n')
        refuses(run(*command), "line 1", "no field 'input'")
        assert not (tmp_path / "results.jsonl").exists()


class TestLongBench:
    @pytest.fixture
    def command(self, tiny_folder, tmp_path):
        (tmp_path / "longbench").mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in LONGBENCH)
        (tmp_path / "longbench" / "three.jsonl").write_text(lines)
        return ("longbench", "--model", tiny_folder, "--data", tmp_path / "longbench", "--metric", "l2", "--ratio", 0.5,
                "--new-tokens", 4, "--dtype", "float32")  # fmt: skip

    def test_a_file_in_the_original_format(self, run, command, tmp_path):
        code, found, said = run(*command, "-o", tmp_path / "results.jsonl", "--json")
        assert code == 0, said
        wanted = [("hotpotqa", "full"), ("hotpotqa", "l2@0.5"), ("passage_count", "full"), ("passage_count", "l2@0.5")]
        assert sorted((row["task"], row["setting"]) for row in found["scores"]) == wanted
        code, again, _ = run(*command, "-o", tmp_path / "results.jsonl", "--json")
        assert again == found
        code, shown, _ = run(*command, "-o", tmp_path / "results.jsonl")
        assert "passage_count" in shown
        assert str(tmp_path / "results.jsonl") in shown.replace("\n", "")

    def test_a_number_of_samples_of_each_data_set(self, run, command, tmp_path):
        assert run(*command, "-o", tmp_path / "results.jsonl", "--num-samples", 1)[0] == 0
        rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()][1:]
        assert {(row["task"], row["index"]) for row in rows} == {("hotpotqa", 0), ("passage_count", 0)}

    def test_another_truncation_is_not_mixed_in(self, run, command, tmp_path):
        assert run(*command, "-o", tmp_path / "results.jsonl")[0] == 0
        refuses(run(*command, "-o", tmp_path / "results.jsonl", "--max-length", 20, "--quiet"), "another prompt")

    def test_bad_input(self, run, command, tmp_path):
        refuses(run(*command, "--max-length", 0), "--max-length 0 must be 1 or more")
        file = tmp_path / "longbench" / "three.jsonl"
        file.write_text(file.read_text().replace("passage_count", "passages"))
        refuses(run(*command, "--quiet"), "unknown LongBench data set 'passages'")
        file.write_text("{\n")
        refuses(run(*command), "line 1", "not JSON")


class TestGenerate:
    @pytest.fixture
    def command(self, tiny_folder, words):
        return ("generate", "--model", tiny_folder, "--prompt", words, "--new-tokens", 5, "--dtype", "float32",
                "--metric", "l2", "--n-recent", 4)  # fmt: skip

    def test_equals_compress(self, run, command, tiny_folder, words):
        from icml26_shared import models
        from manifoldkv import compress

        code, found, _ = run(*command, "--budget", 20, "--json")
        assert code == 0
        model, tokenizer = models.load(tiny_folder, dtype="float32")
        inputs = tokenizer(words.read_text(), return_tensors="pt")
        with compress(model, metric="l2", budget=20, n_recent=4) as kv:
            out = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert found["text"] == tokenizer.decode(out[0, 76:], skip_special_tokens=True)
        assert found["layers"] == [vars(layer) for layer in kv.stats()]
        assert found["layers"][0]["stored_length"] == 24
        assert found["stored_bytes"] == 2 * 2 * 2 * 24 * 8 * 4  # layers, keys and values, heads, tokens, width, bytes
        code, shown, said = run(*command, "--budget", 20)
        assert found["text"] in shown
        assert "l2: 24 of 80 tokens stored per head" in said

    def test_explain(self, run, command):
        code, shown, _ = run(*command, "--budget", 20, "--explain", 1, 0)
        assert code == 0
        assert "layer 1, key-value head 0, metric l2: 20 of 76 tokens kept" in shown
        assert "[-" in shown
        assert "radial" in shown
        code, found, _ = run(*command, "--budget", 20, "--explain", 1, 0, "--json")
        assert sum(found["explain"]["kept"]) == 20
        assert len(found["explain"]["tokens"]) == 76

    def test_half_is_removed_by_default(self, run, command):
        _, found, _ = run(*command, "--json")
        assert found["layers"][0]["stored_length"] == 38 + 4

    def test_without_ratio_and_budget_half_goes_and_it_says_so(self, run, command):
        code, found, _ = run(*command, "--json")
        assert code == 0
        assert found["layers"][0]["stored_length"] == 76 // 2 + 4
        _, _, said = run(*command)
        assert "half of the prompt's tokens are removed (--ratio 0.5)" in said

    def test_nothing_evicted_has_nothing_to_explain(self, run, command):
        code, _, said = run(*command, "--ratio", 0, "--explain", 0, 0)
        assert code == 0
        assert "nothing was evicted" in said

    def test_bad_input(self, run, command, tmp_path):
        refuses(run(*command, "--ratio", 1.5), "compression_ratio=1.5 must be in [0, 1)")
        refuses(run(*command, "--ratio", 0.5, "--budget", 9), "both given")
        refuses(run(*command, "--budget", 0), "budget=0")
        refuses(run(*command, "--phase", "never"), "phase='never' is not one of prefill")
        refuses(run(*command, "--metric", "l3"), "metric='l3'")
        refuses(run(*command, "--new-tokens", 0), "--new-tokens 0 must be 1 or more")
        refuses(run(*command, "--prompt", tmp_path / "none"), "no file at")
        refuses(run(*command, "--budget", 9, "--explain", 7, 0), "layer=7 is not a compressed layer; those are 0, 1")
        refuses(run(*command, "--budget", 9, "--explain", 0, 5), "head=5 is not one of the 2")
        refuses(run(*command, "--budget", 9000), "budget=9000 is larger than the model's context of 2048")
