"""The latent cache: size, growth, beams; cached decoding is the full forward pass."""

import pytest
import torch

from tucker_attention import TuckerAttention, TuckerCache, TuckerConfig

double = torch.float64


def make(**changes):
    settings = {"d_model": 12, "n_heads": 3, "ranks": (2, 5, 4), "post_ranks": (3, 4, 6), "causal": True, **changes}
    return TuckerAttention(TuckerConfig(**settings)).double().eval()


LAYERS = {
    "plain": {},
    "rope": {"rope": "latent"},
    "interleaved": {"rope": "latent", "rope_interleaved": True, "rope_fraction": 0.5},
    "shared": {"share_kv": True, "post_ranks": (3, 4, 4)},
    "shared rope": {"share_kv": True, "post_ranks": (3, 4, 4), "rope": "latent"},
    "per head": {"core": "per_head", "ranks": (3, 5, 4), "post_ranks": (3, 4, 6)},
    "head rope": {"core": "per_head", "ranks": (3, 5, 4), "post_ranks": (3, 4, 6), "rope": "head", "head_dim": 6},
}  # fmt: skip


@pytest.mark.parametrize("room", [None, 12])
@pytest.mark.parametrize("name", LAYERS)
def test_cached_decoding_is_the_full_pass_at_every_step(name, room):
    layer, x = make(**LAYERS[name]), torch.randn(2, 9, 12, dtype=double)
    with torch.no_grad():
        full, cache = layer(x), TuckerCache(room)
        found = [layer(x[:, :3], cache=cache), layer(x[:, 3:5], cache=cache)]
        found += [layer(x[:, i : i + 1], cache=cache) for i in range(5, 9)]
    assert cache.get_seq_length() == 9
    assert (torch.cat(found, 1) - full).abs().max() <= 1e-10


@pytest.mark.parametrize("name", ["rope", "shared rope", "head rope"])
def test_positions_with_an_offset_and_left_padding(name):
    """A row with three tokens of padding before it decodes as the row alone does."""
    layer, x = make(**LAYERS[name]), torch.randn(1, 8, 12, dtype=double)
    padded = torch.cat([torch.randn(1, 3, 12, dtype=double), x[:, :7]], 1)
    padding = torch.tensor([[True] * 3 + [False] * 7])
    positions = torch.cat([torch.zeros(1, 3, dtype=torch.int64), torch.arange(7)[None]], 1)
    with torch.no_grad():
        alone = layer(x)
        cache = TuckerCache()
        prompt = layer(padded, cache=cache, positions=positions, key_padding_mask=padding)
        assert (prompt[:, 3:] - alone[:, :7]).abs().max() <= 1e-10
        more = torch.cat([padding, torch.zeros(1, 1, dtype=torch.bool)], 1)
        step = layer(x[:, 7:], cache=cache, positions=torch.tensor([[7]]), key_padding_mask=more)
    assert (step - alone[:, 7:]).abs().max() <= 1e-10


def test_bytes_are_the_formula():
    x = torch.randn(2, 5, 12)
    for changes, width in (
        ({"ranks": (2, 5, 4), "post_ranks": (2, 5, 4)}, 8),
        ({"share_kv": True, "post_ranks": (3, 4, 4)}, 4),
        ({"share_kv": True, "post_ranks": (3, 4, 4), "rope": "latent"}, 4),
        ({"core": "per_head", "ranks": (3, 5, 4)}, 10),
    ):
        layer, cache = make(**changes).float(), TuckerCache()
        layer(x, cache=cache)
        assert layer.config.cache_width == width
        assert cache.nbytes == 2 * 5 * width * 4


def test_beams():
    layer, x = make(rope="latent"), torch.randn(2, 6, 12, dtype=double)
    with torch.no_grad():
        cache = TuckerCache()
        layer(x[:, :4], cache=cache)
        cache.repeat(2)  # rows 0 0 1 1
        order = torch.tensor([3, 0, 0, 2])
        cache.reorder(order)
        rows = torch.tensor([1, 0, 0, 1])
        found = layer(x[rows, 4:5], cache=cache)
        assert (found - layer(x[rows, :5])[:, 4:]).abs().max() <= 1e-10


@pytest.mark.parametrize("room", [None, 9])
def test_crop(room):
    layer, x = make(), torch.randn(1, 7, 12, dtype=double)
    with torch.no_grad():
        cache = TuckerCache(room)
        layer(x, cache=cache)
        cache.crop(4)
        assert cache.get_seq_length() == 4
        assert (layer(x[:, 4:6], cache=cache) - layer(x[:, :6])[:, 4:]).abs().max() <= 1e-10
        cache.crop(-3)
        assert cache.get_seq_length() == 3


def test_layers_are_apart():
    cache, x = TuckerCache(), torch.randn(1, 3, 12, dtype=double)
    make()(x, cache=cache, layer_idx=0)
    make()(x[:, :2], cache=cache, layer_idx=4)
    assert (len(cache), cache.get_seq_length(0), cache.get_seq_length(4), cache.get_seq_length(1)) == (2, 3, 2, 0)


def test_what_does_not_fit_is_named():
    layer = make()
    cache = TuckerCache(4)
    layer(torch.randn(2, 3, 12, dtype=double), cache=cache)
    with pytest.raises(ValueError, match="the cache has room for 4 tokens; 3 are in it and 2 more came"):
        layer(torch.randn(2, 2, 12, dtype=double), cache=cache)
    with pytest.raises(ValueError, match="holds a batch of 2, the new tokens are a batch of 3"):
        layer(torch.randn(3, 1, 12, dtype=double), cache=cache)
    with pytest.raises(ValueError, match="it belongs to another layer"):
        make(ranks=(2, 5, 3))(torch.randn(2, 1, 12, dtype=double), cache=cache)
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        TuckerCache(0)
    with pytest.raises(ValueError, match="repeat takes at least 1, got 0"):
        cache.repeat(0)
    rotary = make(rope="latent")
    with pytest.raises(ValueError, match=r"positions must be \[1\] or \[2, 1\], one a token, got \(1, 5\)"):
        rotary(torch.randn(2, 1, 12, dtype=double), positions=torch.arange(5))
