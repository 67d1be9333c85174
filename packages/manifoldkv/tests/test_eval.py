"""Evaluation: both protocols against an explicit loop, batches against single runs, resuming, LongBench."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from manifoldkv import KVConfig, score_keys, select
from manifoldkv.baselines import snapkv_scores

transformers = pytest.importorskip("transformers")

from icml26_shared.checkpoint import JsonlStore  # noqa: E402
from icml26_shared.errors import UserError  # noqa: E402
from icml26_shared.evaluation import longbench, ruler  # noqa: E402
from manifoldkv import eval as evaluation  # noqa: E402
from manifoldkv.eval import Prompt, SnapKV, answer, run_eval, run_longbench  # noqa: E402
from manifoldkv.integrations.transformers.queries import capture_queries  # noqa: E402

PLAIN = {"n_sink": 0, "n_recent": 0}


class Numbers:
    """A tokenizer whose text is the token ids themselves: ``"5 7 9"``."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        return SimpleNamespace(input_ids=torch.tensor([[int(word) for word in text.split()]]))

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(i)) for i in ids)


def text(ids):
    return " ".join(map(str, ids.flatten().tolist())) + " "


@pytest.fixture
def asked(prompt):
    """A context of 30 tokens and a question of 4, as text and as ids."""
    ids, _ = prompt(1, 34)
    return Prompt(text(ids[:, :30]), text(ids[:, 30:]), 6), ids[:, :30], ids[:, 30:]


def greedy(model, cache, ids, question, count):
    """One token at a time, no batch, no stop."""
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        for place in range(question.shape[1]):
            logits = model(question[:, place : place + 1], past_key_values=cache).logits[:, -1]
        found = []
        for _ in range(count):
            found.append(int(logits.argmax()))
            logits = model(torch.tensor([[found[-1]]]), past_key_values=cache).logits[:, -1]
    return " ".join(map(str, found))


class TestProtocols:
    """Answers equal dense attention with the evicted keys masked, decoded token by token."""

    @pytest.mark.parametrize("metric", ["l2", "cosine"])
    @pytest.mark.parametrize("adaptive", [False, True])
    def test_query_agnostic(self, metric, adaptive, tiny, reference, asked):
        model = tiny("llama")
        prompt, context, question = asked
        explicit = reference(model, metric=metric, ratio=0.6, adaptive=adaptive, **PLAIN)
        with explicit:
            expected = greedy(model, explicit.cache(), context, question, 6)
        assert {length for _, length, _ in explicit.evictions} == {30}  # the question was not there yet
        cfg = KVConfig(metric=metric, compression_ratio=0.6, head_budget=("uniform", "adaptive")[adaptive], **PLAIN)
        assert answer(model, Numbers(), prompt, {"own": cfg})["own"] == (expected, 12, 30, metric)

    @pytest.mark.parametrize("metric", ["l2", "cosine"])
    def test_query_aware(self, metric, tiny, reference, asked):
        model = tiny("llama")
        prompt, context, question = asked
        explicit = reference(model, metric=metric, ratio=0.6, **PLAIN)
        with explicit:
            expected = greedy(model, explicit.cache(), torch.cat((context, question), 1), question[:, :0], 6)
        assert {length for _, length, _ in explicit.evictions} == {34}
        cfg = KVConfig(metric=metric, compression_ratio=0.6, **PLAIN)
        assert answer(model, Numbers(), prompt, {"own": cfg}, "query-aware")["own"] == (expected, 13, 34, metric)

    def test_the_two_differ_and_an_unknown_one_is_refused(self, tiny, asked):
        model, prompt = tiny("llama"), asked[0]
        settings = {"own": KVConfig(metric="l2", compression_ratio=0.75, **PLAIN)}
        found = [answer(model, Numbers(), prompt, settings, how)["own"] for how in ("query-agnostic", "query-aware")]
        assert found[0].text != found[1].text
        with pytest.raises(ValueError, match="protocol='aware' is not one of query-agnostic, query-aware"):
            run_eval(model, Numbers(), [], {}, "aware")

    def test_the_full_cache_is_generate(self, tiny, asked):
        model = tiny("qwen2-sliding")
        prompt, context, question = asked
        ids = torch.cat((context, question), 1)
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 34:]
        for how in ("query-agnostic", "query-aware"):
            found = answer(model, Numbers(), prompt, {"full": None}, how)["full"]
            assert found.text == Numbers().decode(expected)
            assert found.kept == found.total == (30 if how == "query-agnostic" else 34)
            assert found.metric == ""


SETTINGS = {
    "full": None,
    "nothing removed": KVConfig(metric="l2", compression_ratio=0.0),
    "l2": KVConfig(metric="l2", compression_ratio=0.5, **PLAIN),
    "cosine": KVConfig(metric="cosine", compression_ratio=0.5, **PLAIN),
    "knorm": KVConfig(metric="knorm", compression_ratio=0.5, **PLAIN),
    "snapkv": SnapKV(0.5),
    "windowed": KVConfig(metric="l2", window=8, compression_ratio=0.75, **PLAIN),
    "random": KVConfig(metric="random", compression_ratio=0.75, seed=3),
    "both": KVConfig(metric="l2", budget=15, phase="both", interval=3, **PLAIN),
    "both, cosine": KVConfig(metric="cosine", budget=15, phase="both", interval=3, **PLAIN),
    "chunked": KVConfig(metric="l2", budget=15, phase="chunked", **PLAIN),
    "chunked, cosine": KVConfig(metric="cosine", budget=15, phase="chunked", **PLAIN),
    "adaptive": KVConfig(metric="l2", compression_ratio=0.5, head_budget="adaptive", **PLAIN),
}


class TestBatches:
    @pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
    def test_settings_decoded_together_equal_each_alone(self, name, tiny, asked):
        model, prompt = tiny(name), asked[0]
        together = answer(model, Numbers(), prompt, SETTINGS)
        assert list(together) == list(SETTINGS)
        for setting, cfg in SETTINGS.items():
            assert answer(model, Numbers(), prompt, {setting: cfg})[setting] == together[setting], setting
        assert len({found.text for found in together.values()}) > 4  # the settings matter

    def test_an_end_token_stops_its_row_only(self, tiny, asked):
        model, prompt = copy.deepcopy(tiny("llama")), asked[0]
        settings = {name: SETTINGS[name] for name in ("l2", "cosine", "knorm")}
        free = answer(model, Numbers(), prompt, settings)
        stop = int(free["l2"].text.split()[2])
        for end in (stop, [stop, 60]):
            model.generation_config.eos_token_id = end
            stopped = answer(model, Numbers(), prompt, settings)
            ends = {stop} if end == stop else {stop, 60}
            for name, found in free.items():
                words = found.text.split()
                place = next((i for i, word in enumerate(words) if int(word) in ends), len(words))
                assert stopped[name].text.split() == words[:place]


def sample(index, ids, references, task="niah_single_1", limit=8):
    """A sample of a task whose text is token ids."""
    split = ids.shape[1] - 4
    return ruler.Sample(
        index, task, text(ids[:, :split]), text(ids[:, split:]), "", tuple(references), ids.shape[1], limit
    )


class TestScores:
    def test_stopping_early_does_not_change_them(self, tiny, prompt, monkeypatch):
        model = tiny("llama")
        ids = [prompt(1, 34, seed=seed)[0] for seed in range(4)]
        plain = [sample(i, own, ["none"]) for i, own in enumerate(ids)]
        settings = {name: SETTINGS[name] for name in ("full", "l2", "cosine")}
        words = [
            row["output"].split() for row in run_eval(model, Numbers(), plain, settings) if row["config"] == "full"
        ]
        samples = [sample(i, own, [said[1], said[3]]) for i, (own, said) in enumerate(zip(ids, words, strict=True))]
        early = run_eval(model, Numbers(), samples, settings)
        monkeypatch.setattr(evaluation, "_all_found", lambda text, references: False)
        late = run_eval(model, Numbers(), samples, settings)
        assert [row["score"] for row in early] == [row["score"] for row in late]
        assert {row["score"] for row in early if row["config"] == "full"} == {1.0}
        lengths = [[len(row["output"].split()) for row in rows] for rows in (early, late)]
        assert sum(lengths[0]) < sum(lengths[1])
        assert set(lengths[1]) == {8}

    def test_the_share_of_references_found(self, tiny, prompt):
        model, (ids, _) = tiny("llama"), prompt(1, 34)
        (row,) = run_eval(model, Numbers(), [sample(0, ids, ["none"])], {"full": None})
        words = row["output"].split()
        (row,) = run_eval(model, Numbers(), [sample(0, ids, [words[0], "none"])], {"full": None})
        assert row["score"] == 0.5
        assert row["length"] == 34

    def test_new_tokens_are_capped_by_the_task_and_by_the_argument(self, tiny, prompt):
        model, samples = tiny("llama"), [sample(0, prompt(1, 34)[0], ["none"], limit=5)]
        for cap, count in ((None, 5), (3, 3), (9, 5)):
            (row,) = run_eval(model, Numbers(), samples, {"full": None}, max_new_tokens=cap)
            assert len(row["output"].split()) == count
        with pytest.raises(ValueError, match="max_new_tokens=0 must be 1 or more"):
            run_eval(model, Numbers(), samples, {"full": None}, max_new_tokens=0)


class TestSnapKV:
    def test_queries_are_the_models_own(self, tiny, prompt):
        """Captured queries reproduce the attention of an eager run."""
        model = copy.deepcopy(tiny("llama"))
        model.set_attn_implementation("eager")
        ids, _ = prompt(1, 20)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad(), capture_queries(model, 5) as queries:
            model(ids, past_key_values=cache)
        assert model.config._attn_implementation == "eager"
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        for index, layer in enumerate(cache.layers):
            keys = layer.keys.repeat_interleave(2, dim=1)
            logits = queries[index] @ keys.mT / keys.shape[-1] ** 0.5
            logits += torch.full((5, 20), -torch.inf).triu(16)
            torch.testing.assert_close(logits.softmax(-1), attentions[index][:, :, -5:], atol=1e-5, rtol=1e-5)

    def test_what_it_keeps(self, tiny, asked):
        """The cache equals one made from the scores by hand; the window shrinks to what may be kept."""
        model = tiny("llama")
        prompt, context, question = asked
        for ratio, window in ((0.5, 15), (0.5, 6), (0.9, 64)):
            kept = int(30 * (1 - ratio))
            with torch.no_grad(), capture_queries(model, min(window, kept)) as queries:
                cache = transformers.DynamicCache(config=model.config)
                model(context, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                chosen = select(snapkv_scores(layer.keys, queries[index]), kept)[..., None].expand(-1, -1, -1, 8)
                layer.keys, layer.values = layer.keys.gather(2, chosen), layer.values.gather(2, chosen)
            expected = []
            step, position = question, torch.arange(30, 34)[None]
            with torch.no_grad():
                for _ in range(6):
                    logits = model(step, past_key_values=cache, position_ids=position).logits[:, -1]
                    step, position = logits.argmax(-1, keepdim=True), position[:, -1:] + 1
                    expected.append(int(step))
            found = answer(model, Numbers(), prompt, {"own": SnapKV(ratio, window)})["own"]
            assert found == (" ".join(map(str, expected)), kept, 30, "snapkv")

    def test_its_presence_changes_no_other_setting(self, tiny, asked):
        """Soft-capped attention runs eagerly; capturing queries must not swap it for another one."""
        model, prompt = tiny("gemma2"), asked[0]
        settings = {name: SETTINGS[name] for name in ("full", "l2", "cosine")}
        without = answer(model, Numbers(), prompt, settings)
        both = answer(model, Numbers(), prompt, {**settings, "snapkv": SnapKV(0.5)})
        assert {name: both[name] for name in settings} == without
        ids = asked[1]
        with torch.no_grad():
            expected = model(ids).logits
            with capture_queries(model, 4):
                assert torch.equal(model(ids).logits, expected)


class TestResuming:
    @pytest.fixture
    def work(self, tiny, prompt):
        samples = [sample(i, prompt(1, 34, seed=i)[0], ["7", "23"]) for i in range(3)]
        return tiny("llama"), samples, {name: SETTINGS[name] for name in ("full", "l2", "cosine")}

    def test_finished_lines_are_not_computed_again(self, work, tmp_path, monkeypatch):
        model, samples, settings = work
        expected = run_eval(model, Numbers(), samples, settings)
        asked = []
        whole = evaluation.answer

        def counted(model, tokenizer, prompt, todo, *rest):
            asked.append(list(todo))
            return whole(model, tokenizer, prompt, todo, *rest)

        monkeypatch.setattr(evaluation, "answer", counted)
        path = tmp_path / "results.jsonl"
        with JsonlStore(path) as store:
            run_eval(model, Numbers(), samples[:1], {"l2": settings["l2"]}, store=store)
        with JsonlStore(path) as store:
            advanced = []
            rows = run_eval(model, Numbers(), samples, settings, store=store, advance=advanced.append)
        assert rows == expected
        assert asked == [["l2"], ["full", "cosine"], list(settings), list(settings)]
        assert advanced == [3, 3, 3]
        with JsonlStore(path) as store:
            assert run_eval(None, None, samples, settings, store=store) == expected  # no model needed any more

    def test_a_half_written_last_line_is_computed_again(self, work, tmp_path):
        model, samples, settings = work
        path = tmp_path / "results.jsonl"
        with JsonlStore(path) as store:
            expected = run_eval(model, Numbers(), samples, settings, store=store)
        whole = path.read_bytes()
        for cut in (1, 20, 400):
            path.write_bytes(whole[:-cut])
            with pytest.warns(UserWarning, match="half-written last line"), JsonlStore(path) as store:
                assert run_eval(model, Numbers(), samples, settings, store=store) == expected
            assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_results_of_other_prompts_are_refused(self, work, tmp_path):
        model, samples, settings = work
        path = tmp_path / "results.jsonl"
        with JsonlStore(path) as store:
            run_eval(model, Numbers(), samples[:1], settings, store=store)
        other = [sample(0, torch.full((1, 34), 9), ["7"])]
        with JsonlStore(path) as store, pytest.raises(UserError, match="another prompt for sample 0 of niah_single_1"):
            run_eval(model, Numbers(), other, settings, store=store)

    def test_auto_goes_on_with_the_metric_it_began_with(self, tiny, prompt, tmp_path):
        """The first long prompt settles it for the run; so it must after a break, whatever later prompts would say."""
        model = tiny("llama", max_position_embeddings=513)
        samples = [sample(i, prompt(1, 300, seed=i)[0], ["none"], limit=2) for i in range(2)]
        settings = {"auto": KVConfig(metric="auto", compression_ratio=0.5)}
        rows = run_eval(model, Numbers(), samples, settings)
        assert rows[0]["metric"] == rows[1]["metric"]
        own = rows[0]["metric"]
        other = {"l2": "cosine", "cosine": "l2"}[own]
        path = tmp_path / "results.jsonl"
        with JsonlStore(path) as store:
            run_eval(model, Numbers(), samples[:1], settings, store=store)
        path.write_text(path.read_text().replace(f'"metric":"{own}"', f'"metric":"{other}"').replace(
            f'"metric": "{own}"', f'"metric": "{other}"'))  # fmt: skip
        with JsonlStore(path) as store:
            assert run_eval(model, Numbers(), samples, settings, store=store)[1]["metric"] == other


LINES = [
    ("hotpotqa", "who ?", "the sky is blue . " * 12, ["sky"], None),
    ("passage_count", "", "Paragraph 1 : the sun . " * 8, ["3"], None),
    ("hotpotqa", "what ?", "the grass is green . " * 12, ["grass", "the grass"], None),
]


def longbench_file(path):
    rows = [
        {"input": asked, "context": context, "answers": answers, "length": 9, "dataset": dataset, "language": "en",
         "all_classes": classes, "_id": str(i)}
        for i, (dataset, asked, context, answers, classes) in enumerate(LINES)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestLongBench:
    @pytest.fixture
    def loaded(self, tiny_folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
        return model, transformers.AutoTokenizer.from_pretrained(tiny_folder)

    def test_three_lines(self, loaded, tmp_path):
        model, tokenizer = loaded
        examples = longbench.load(longbench_file(tmp_path / "three.jsonl"))
        settings = {"full": None, "l2": KVConfig(metric="l2", compression_ratio=0.5)}
        rows = run_longbench(model, tokenizer, examples, settings, max_new_tokens=5)
        assert [(row["task"], row["index"], row["config"]) for row in rows] == [
            (task, index, config)
            for task, index in (("hotpotqa", 0), ("passage_count", 0), ("hotpotqa", 1))
            for config in settings
        ]
        for row, example in zip(rows[::2], examples, strict=True):
            instruction = longbench.DATASETS[example.dataset].instruction
            ids = tokenizer(f"{instruction}\n\n{example.context}\n\n{example.input}\n", return_tensors="pt").input_ids
            said = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
            assert row["output"] == tokenizer.decode(said, skip_special_tokens=True)
            assert row["score"] == longbench.score(row["output"], example)
        assert rows[1]["kept"] == int(rows[1]["total"] * 0.5)

    def test_long_contexts_lose_their_middle(self, loaded, tmp_path):
        model, tokenizer = loaded
        examples = longbench.load(longbench_file(tmp_path / "three.jsonl"))[:1]
        whole, short = (
            run_longbench(model, tokenizer, examples, {"full": None}, max_length=size, max_new_tokens=2)[0]
            for size in (7500, 10)
        )
        assert whole["total"] - short["total"] == 5 * 12 - 10

    def test_an_unknown_data_set_is_named(self, loaded, tmp_path):
        path = longbench_file(tmp_path / "three.jsonl")
        path.write_text(path.read_text().replace("passage_count", "passages"))
        with pytest.raises(UserError, match="unknown LongBench data set 'passages'; known are narrativeqa"):
            run_longbench(*loaded, longbench.load(path), {"full": None}, max_new_tokens=1)


def test_the_scores_behind_a_setting_are_those_of_the_cached_keys(tiny, asked):
    """What ``kept`` counts is what ``score_keys`` and ``select`` keep of a plain prefill."""
    model = tiny("llama")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(asked[1], past_key_values=cache)
    cfg = SETTINGS["l2"]
    own = evaluation._compressed(model, cache, cfg, {}, None)
    for layer, dense in zip(own.layers, cache.layers, strict=True):
        assert torch.equal(layer.positions, select(score_keys(dense.keys, cfg), 15))
