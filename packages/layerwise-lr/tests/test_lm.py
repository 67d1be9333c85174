"""The small language model: text, model, training, the pre-training suites on a tiny one."""

import math

import pytest
import torch

from layerwise_lr.eval import pretrain
from layerwise_lr.eval.llama import Llama, Shape
from layerwise_lr.eval.stdlib_lm import Run, make_optimizer, schedule, train
from layerwise_lr.eval.text import Text, batch, load_text, windows

TINY = Shape(width=64, layers=1, ffn=80, length=16)


@pytest.fixture(scope="module")
def text():
    tokens = torch.randint(0, 128, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Text(tokens[:4000], tokens[4000:], "test", "test")


def test_the_standard_librarys_text():
    found = load_text()
    assert found.train.numel() + found.validation.numel() <= 10_000_000
    assert found.validation.numel() == pytest.approx(0.05 * (found.train.numel() + found.validation.numel()), abs=1)
    assert int(found.train.max()) < 128
    assert bytes(found.train[:40].tolist()).startswith(b'"""')
    assert len(found.sha256) == 64


def test_a_file_as_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes("ä".encode() * 60_000)
    assert set(load_text(str(path)).train.tolist()) == {ord("?")}
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="has 5 bytes; at least 100000"):
        load_text(str(tmp_path / "short"))
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load_text(str(tmp_path / "nothing"))


def test_batches_are_windows_of_the_text():
    tokens = torch.arange(100).to(torch.uint8)
    found = batch(tokens, 5, 3, torch.Generator().manual_seed(0))
    assert found.shape == (3, 6)
    assert (found.diff(dim=1) == 1).all()
    even = windows(tokens, 9, 3)
    assert even[:, 0].tolist() == [0, 45, 90]


def test_model_is_causal_and_knows_positions():
    model = Llama(TINY)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 128
    a, b = model(tokens), model(changed)
    assert torch.allclose(a[:, :9], b[:, :9], atol=1e-6)
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-6)
    again = Llama(TINY)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    window = torch.randint(0, 128, (1, 17))
    by_hand = -torch.log_softmax(model(window[:, :-1]), -1)[0, range(16), window[0, 1:]].mean()
    assert float(model.loss(window).detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)


def test_schedule():
    factor = schedule(400)
    assert (factor(0), factor(39), factor(400)) == (1 / 40, 1, pytest.approx(0.1))
    assert factor(220) == pytest.approx(0.55)


@pytest.mark.parametrize("method", ["uniform", "llr", "permuted", "mean", "inverse", "sharpness", "lars", "lamb"])
def test_every_method_trains_and_repeats(method, text):
    run = Run(
        method,
        4e-3,
        6,
        settings=(("interval", 2), ("ramp", 1), ("active_fraction", 1.0))
        if method in ("llr", "permuted", "mean", "inverse")
        else (),
    )
    first, second = (train(run, 0, text, shape=TINY, batch_size=2) for _ in range(2))
    assert first == second
    assert 0 < first["loss"] < 2 * math.log(128)
    if method in ("llr", "permuted"):
        assert max(first["ratios"].values()) == pytest.approx(3)
    if method == "mean":
        assert len(set(first["ratios"].values())) == 1


def test_muon_run(text):
    result = train(Run("llr", 4e-3, 3, muon=True), 0, text, shape=TINY, batch_size=2)
    assert math.isfinite(result["loss"])
    assert type(make_optimizer(Llama(TINY), Run("uniform", muon=True))).__name__ == "MuonAdamW"


# -- pre-training ------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of 30 letters."""

    eos_token_id = 0

    def __len__(self):
        return 30

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1 + ord(c) % 29 for c in text]}


@pytest.fixture
def fineweb(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i} says {'abcdefgh'[i % 8] * (i % 13)} and ends" for i in range(400)]
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    parquet.write_table(pyarrow.table({"text": texts[:200]}), folder / "a.parquet")
    parquet.write_table(pyarrow.table({"text": texts[200:]}), folder / "b" / "c.parquet")
    monkeypatch.setattr(pretrain, "VALIDATION_WINDOWS", 8)
    return folder


def test_windows_of_fineweb_cover_the_text_once(fineweb):
    from icml26_shared.errors import UserError
    from layerwise_lr.eval.fineweb import documents, token_windows

    whole = [token for text in documents(fineweb) for token in [*Letters()(text)["input_ids"], 0]]
    found = list(token_windows(documents(fineweb), Letters(), 15))
    assert torch.cat(found).tolist() == whole[: 16 * len(found)]
    assert len(found) == len(whole) // 16
    later = list(token_windows(documents(fineweb), Letters(), 15, skip=5))
    assert torch.equal(torch.stack(later), torch.stack(found[5:]))
    with pytest.raises(UserError, match=r"is not a folder with \*.parquet files"):
        next(documents(fineweb / "nothing"))
    with pytest.raises(UserError, match="has no column 'body'; it has text"):
        next(documents(fineweb, "body"))


def test_a_killed_pretraining_resumes_to_the_same_result(fineweb, tmp_path):
    suite = pretrain.Suite(64, 1, 4, 80, 1e-3, 3.0, 2, 3, 6, batch=4, length=15)

    def job(folder, llr=True):
        return pretrain.Job(suite, fineweb, Letters(), tmp_path / folder, llr, micro=2, save_every=2)

    def kill(step):
        if step == 5:
            raise KeyboardInterrupt

    expected = job("whole").run()
    with pytest.raises(KeyboardInterrupt):
        job("part").run(kill)
    assert job("part").run() == expected
    assert job("uniform", llr=False).run()["perplexity"] != expected["perplexity"]
    assert expected["tokens"] == 6 * 4 * 15
