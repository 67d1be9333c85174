"""What a configuration refuses, and its JSON."""

import pytest

from tucker_attention import TuckerConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (5, 4, 4)}, r"ranks \(5, 4, 4\): the head rank is 5, allowed are 1 to 4"),
        ({"ranks": (4, 33, 4)}, "the query rank is 33, allowed are 1 to 32"),
        ({"ranks": (4, 4, 0)}, "the key rank is 0, allowed are 1 to 32"),
        ({"post_ranks": (4, 33, 4)}, "post_ranks .* the output rank is 33"),
        ({"ranks": (4, 4)}, "must be three whole numbers"),
        ({"ranks": 4}, "must be three whole numbers"),
        ({"d_model": 30}, "d_model 30 is not divisible by n_heads 4; give head_dim"),
        ({"n_heads": 0}, "n_heads must be a whole number of at least 1, got 0"),
        ({"rope": "latent", "ranks": (4, 4, 5)}, "must be even, got 5"),
        ({"rope": "head"}, "rope='head' .* needs core='per_head'"),
        ({"rope": "yarn"}, "rope 'yarn' unknown"),
        ({"rope": "latent", "rope_fraction": 1.5}, r"rope_fraction must be in \[0, 1\]"),
        ({"rope": "latent", "rope_frequencies": (1.0,)}, "rope_frequencies must be 2"),
        ({"scale": "query_rank"}, "scale 'query_rank' unknown"),
        ({"scale": -1.0}, "scale must be a positive number, got -1.0"),
        ({"scale": float("nan")}, "scale must be a positive number, got nan"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"biases": ("value",)}, "biases .*'value'.* unknown; allowed: query, key, output"),
        ({"share_kv": True, "post_ranks": (4, 4, 5)}, "the value rank must be the key rank 4, got 5"),
        ({"core": "sparse"}, "core 'sparse' unknown"),
        ({"core": "per_head", "ranks": (2, 4, 4)}, "keeps every head"),
        ({"core": "per_head", "n_kv_heads": 3}, "not a multiple of n_kv_heads 3"),
        ({"core": "per_head", "blocks": ("query",)}, "its rank must be 32, got 4"),
        ({"blocks": ("query",)}, "need core='per_head'"),
        ({"n_kv_heads": 2}, "needs core='per_head'"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TuckerConfig(**{"d_model": 32, "n_heads": 4, "ranks": (4, 4, 4), **changes})


def test_json_and_back():
    config = TuckerConfig(30, 4, (2, 3, 4), (1, 2, 3), head_dim=8, rope="latent", biases=("query",), scale=0.5)
    assert TuckerConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="unknown fields of a Tucker configuration: depth"):
        TuckerConfig.from_json({**config.to_json(), "depth": 3})


def test_scales():
    shape = (64, 4, (2, 8, 9))
    assert TuckerConfig(*shape).softmax_scale == 1 / 4
    assert TuckerConfig(*shape, scale="key_rank").softmax_scale == 1 / 3
    assert TuckerConfig(*shape, scale=0.7).softmax_scale == 0.7
    assert TuckerConfig(60, 7, (2, 8, 9), head_dim=25).softmax_scale == 1 / 5
