"""Perplexity: every token once, the value against a plain computation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml26_shared.evaluation.perplexity import Perplexity, sliding_window_perplexity, windows

torch = pytest.importorskip("torch")


@given(st.integers(0, 200), st.integers(2, 50), st.data())
def test_every_token_but_the_first_is_scored_once_with_context(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    scored = []
    for begin, end, first in windows(length, window, stride):
        assert 0 <= begin < first < end <= length
        assert end - begin <= window
        scored += range(first, end)
        if begin > 0:
            assert first - begin >= window - stride
    assert scored == list(range(1, length))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 0), (4, 4), (4, 5)])
def test_impossible_windows_are_refused(window, stride):
    with pytest.raises(ValueError, match="need window >= 2 and 1 <= stride < window"):
        list(windows(10, window, stride))


class Bigram(torch.nn.Module):
    """A model that knows only the last token: its perplexity does not depend on the window."""

    def __init__(self, vocabulary=7):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, vocabulary)
        self.config = type("Config", (), {"max_position_embeddings": 8})()
        self.device = torch.device("cpu")
        self.widths = []

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        self.widths.append(input_ids.shape[1])
        return type("Output", (), {"logits": self.table(input_ids)})()


@pytest.fixture
def bigram():
    torch.manual_seed(0)
    return Bigram()


@pytest.mark.parametrize(("window", "stride"), [(None, None), (2, 1), (5, 4), (8, 3), (1000, 1)])
def test_the_value_is_the_plain_one(bigram, window, stride):
    ids = torch.randint(0, 7, (1, 700), generator=torch.Generator().manual_seed(1))
    found = sliding_window_perplexity(bigram, ids, window=window, stride=stride)
    expected = torch.nn.functional.cross_entropy(bigram.table.weight.detach()[ids[0, :-1]].double(), ids[0, 1:])
    assert found.tokens == 699
    assert found.per_token == pytest.approx(expected.item(), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(expected.item()), rel=1e-6)


def test_the_default_window_is_the_models(bigram):
    counts = []
    sliding_window_perplexity(bigram, list(range(7)) * 4, progress=counts.append)
    assert max(bigram.widths) == 8
    assert sum(counts) == 27


def test_a_uniform_model_has_the_vocabulary_as_perplexity(bigram):
    torch.nn.init.zeros_(bigram.table.weight)
    assert sliding_window_perplexity(bigram, [0, 1, 2, 3]).perplexity == pytest.approx(7.0)


def test_a_real_model_over_overlapping_windows():
    pytest.importorskip("transformers")
    from icml26_shared.models import tiny_llama

    model = tiny_llama(seed=0)
    ids = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(2))
    found = sliding_window_perplexity(model, ids, window=16, stride=5)
    total = 0.0
    with torch.inference_mode():
        for position in range(1, 40):  # each token from the window that scores it, one at a time
            begin = 0 if position < 16 else 5 * math.ceil((position - 15) / 5)
            logits = model(ids[None, begin:position]).logits[0, -1].double()
            total -= torch.log_softmax(logits, -1)[ids[position]].item()
    assert found.nll == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("ids", [[], [1], [[1, 2], [3, 4]]])
def test_bad_ids_are_refused(bigram, ids):
    with pytest.raises(ValueError, match="one row of at least two tokens"):
        sliding_window_perplexity(bigram, torch.tensor(ids))


def test_bits_of_the_result():
    result = Perplexity(nll=math.log(2) * 10, tokens=10)
    assert result.perplexity == pytest.approx(2.0)
