"""Latent RoPE: relative scores, its frequencies, its conventions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tucker_attention import TuckerAttention, TuckerConfig
from tucker_attention.kernels.rotary import rotate
from tucker_attention.rope import angles, frequencies

double = torch.float64


def config(**changes):
    return TuckerConfig(**{"d_model": 12, "n_heads": 3, "ranks": (2, 5, 6), "rope": "latent", **changes})


@given(
    st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_scores_depend_on_the_difference_of_positions(m, n, shift, interleaved, fraction):
    made = config(rope_interleaved=interleaved, rope_fraction=fraction)
    g = torch.Generator().manual_seed(m + n)
    q, k = (torch.randn(1, 1, 6, generator=g, dtype=double) for _ in range(2))
    inverse = torch.tensor(frequencies(made), dtype=double)

    def score(first, second):
        a, b = (rotate(x, *angles(torch.tensor([[p]]), inverse), interleaved) for x, p in ((q, first), (k, second)))
        return float((a * b).sum())

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-10)


def test_layer_outputs_depend_on_differences_only():
    layer, x = TuckerAttention(config()).double(), torch.randn(2, 6, 12, dtype=double)
    for causal in (False, True):
        here = layer(x, is_causal=causal)
        there = layer(x, is_causal=causal, positions=torch.arange(6) + 5000)
        assert (here - there).abs().max() <= 1e-10
    assert (layer(x) - layer(x, positions=torch.arange(6) * 2)).abs().max() > 1e-3


def test_query_side_fusion_is_exact():
    """(q2 T_h) R(m)^T with T_h formed from W^UQ W^UK^T beforehand is the unfused product: no decoupled rotary part."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, generator=g, dtype=double)
    down, up, key_up, kv_down = (
        torch.randn(*shape, generator=g, dtype=double) for shape in ((12, 7), (7, 4), (6, 4), (12, 6))
    )
    cos, sin = angles(torch.arange(5)[None], torch.tensor(frequencies(config()), dtype=double))

    def scores(latent_query):
        q, k = rotate(latent_query, cos[0], sin[0], False), rotate(x @ kv_down, cos[0], sin[0], False)
        return q @ k.T

    assert (scores(((x @ down) @ up) @ key_up.T) - scores(x @ (down @ (up @ key_up.T)))).abs().max() <= 1e-10


def test_rotation_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=double)
    quarter, none = torch.tensor([[0.0, 1.0]], dtype=double), torch.tensor([[1.0, 0.0]], dtype=double)
    # pair 0 turns by 90 degrees, pair 1 not at all
    assert torch.equal(rotate(x, quarter, none, False), torch.tensor([[-3.0, 2.0, 1.0, 4.0]], dtype=double))
    assert torch.equal(rotate(x, quarter, none, True), torch.tensor([[-2.0, 1.0, 3.0, 4.0]], dtype=double))


def test_frequencies_are_those_of_the_latent_width():
    assert frequencies(config()) == pytest.approx([1, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)])
    assert frequencies(config(rope_theta=100.0)) == pytest.approx([1, 100 ** (-1 / 3), 100 ** (-2 / 3)])
    assert frequencies(config(rope_fraction=0.5, ranks=(2, 5, 8))) == pytest.approx([1, 1e-2, 0, 0])
    assert frequencies(config(rope_frequencies=(3.0, 2.0, 1.0))) == (3.0, 2.0, 1.0)


def test_long_positions_stay_exact():
    inverse = torch.tensor(frequencies(config()), dtype=double)
    cos, _ = angles(torch.tensor([[1_000_003]]), inverse)
    assert float(cos[0, 0, 0]) == pytest.approx(torch.cos(torch.tensor(1_000_003.0, dtype=double)).item(), abs=1e-9)
