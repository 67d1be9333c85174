"""MHA, MQA, GQA and MLA are Tucker attention, exactly; and trained layers at smaller ranks."""

import warnings

import pytest
import torch
from tucker_peers import grouped_attention, measured_ranks, random_matrices

from tucker_attention import TuckerAttention
from tucker_attention.special_cases import both_ranks, tensors
from tucker_attention.weights import AttentionWeights, Rotary

double = torch.float64
SHAPES = [  # d, heads, key heads, head width
    (16, 4, 4, 4), (16, 8, 2, 2), (12, 3, 1, 4), (18, 3, 3, 6), (10, 1, 1, 10), (12, 4, 2, 5), (15, 5, 1, 3),
]  # fmt: skip


def biases_for(matrices, seed=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(m.shape[1], generator=g, dtype=double) for m in matrices]


@pytest.mark.parametrize("core", ["dense", "per_head"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_query_attention_is_a_special_case(shape, biased, core):
    d, heads, groups, width = shape
    matrices = random_matrices(d, heads, groups, width)
    biases = biases_for(matrices) if biased else []
    named = dict(zip(("query_bias", "key_bias", "value_bias", "output_bias"), biases, strict=False))
    layer = TuckerAttention.from_gqa(*matrices, n_heads=heads, n_kv_heads=groups, core=core, **named)
    x = torch.randn(2, 7, d, dtype=double)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    for mask in (None, causal, torch.rand(7, 7) > 0.3):
        if mask is not None:
            mask[:, 0] = True  # every query sees something
        expected = grouped_attention(x, *matrices, heads, groups, mask=mask, biases=biases)
        assert (layer(x, mask=mask) - expected).abs().max() <= 1e-10
    expected = grouped_attention(x, *matrices, heads, groups, mask=causal, biases=biases)
    assert (layer(x, is_causal=True) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("core", ["dense", "per_head"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_mode_ranks_are_the_table(heads, groups, core):
    d, width = 16, 4
    matrices = random_matrices(d, heads, groups)
    layer = TuckerAttention.from_gqa(*matrices, n_heads=heads, n_kv_heads=groups, core=core)
    expected = (heads, d, width * groups)
    assert (layer.config.ranks, layer.config.post_ranks) == (expected, expected)
    w, wt = layer.to_tensors()
    assert (measured_ranks(w), measured_ranks(wt)) == (expected, expected)
    query, key, value, output = matrices
    for head in range(heads):
        mine, theirs = (
            slice(head * width, (head + 1) * width),
            slice(*(width * (head // (heads // groups) + i) for i in (0, 1))),
        )
        assert torch.allclose(w[head], query[:, mine] @ key[:, theirs].T, atol=1e-12)
        assert torch.allclose(wt[head], (value[:, theirs] @ output[mine]).T, atol=1e-12)


def test_multi_head_attention_has_its_own_parameters_and_allocates_no_head_tensor():
    matrices = random_matrices(16, 4, 4)
    layer = TuckerAttention.from_mha(*matrices, n_heads=4)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 16 * 16


def mla_matrices(d, heads, width, query_latent, latent, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (d, query_latent), (query_latent, heads * width), (d, latent), (latent, heads * width), (latent, heads * width),
        (heads * width, d),
    ]  # fmt: skip
    return [torch.randn(*shape, generator=g, dtype=double) / shape[0] ** 0.5 for shape in shapes]


@pytest.mark.parametrize("core", ["dense", "per_head"])
@pytest.mark.parametrize(
    "shape", [(16, 4, 4, 12, 8), (16, 4, 4, 16, 5), (12, 3, 6, 7, 9), (10, 1, 3, 2, 4), (9, 3, 3, 9, 1)]
)
def test_multi_head_latent_attention_is_a_special_case(shape, core):
    d, heads, width, query_latent, latent = shape
    dq, uq, dkv, uk, uv, wo = mla_matrices(*shape)
    layer = TuckerAttention.from_mla(dq, uq, dkv, uk, uv, wo, n_heads=heads, core=core)
    x = torch.randn(2, 6, d, dtype=double)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for mask in (None, causal):
        expected = grouped_attention(x, dq @ uq, dkv @ uk, dkv @ uv, wo, heads, heads, mask=mask)
        assert (layer(x, mask=mask) - expected).abs().max() <= 1e-10
    w, wt = layer.to_tensors()
    spread = min(d, heads * width)
    assert layer.config.ranks == (heads, query_latent, latent)
    few, thin = heads * min(width, latent), heads * min(width, query_latent)  # what a slice of rank d_H leaves
    assert measured_ranks(w) == (heads, min(query_latent, few), min(latent, thin))
    assert measured_ranks(wt) == (heads, min(spread, few), min(latent, heads * width))
    if core == "per_head":
        assert sum(p.numel() for p in layer.parameters()) == sum(m.numel() for m in (dq, uq, dkv, uk, uv, wo))


@pytest.fixture(scope="module")
def weights():
    matrices = random_matrices(12, 4, 2, 3)
    qb, kb, vb, ob = biases_for(matrices)
    return AttentionWeights.from_matrices(
        *matrices, n_heads=4, n_kv_heads=2, query_bias=qb, key_bias=kb, value_bias=vb, output_bias=ob
    )


def exact_output(weights, x, **options):
    return TuckerAttention.from_weights(weights)(x, **options)


@pytest.mark.parametrize("core", [None, "dense", "per_head"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_all_of_the_energy_is_the_layer(weights, core, calibrated):
    x = torch.randn(2, 6, 12, dtype=double)
    calibration = torch.randn(40, 12, dtype=double) if calibrated else None
    layer = TuckerAttention.from_weights(weights, energy=1.0, core=core, calibration=calibration)
    assert (layer(x) - exact_output(weights, x)).abs().max() <= 1e-8
    full = TuckerAttention.from_weights(weights, ranks=((4, 13, 7), (4, 12, 6)), core=core, calibration=calibration)
    assert (full(x) - exact_output(weights, x)).abs().max() <= 1e-8


def test_known_ranks_are_found():
    g = torch.Generator().manual_seed(3)
    core = torch.randn(2, 5, 3, generator=g, dtype=double)
    mixing = torch.randn(6, 2, generator=g, dtype=double)
    u2, u3 = (torch.randn(24, r, generator=g, dtype=double) for r in (5, 3))
    slices = torch.einsum("ha,aqk->hqk", mixing, core)  # W_h = U2 T_h U3^T: rank 3 a head
    query = torch.einsum("dq,hqk->hdk", u2, slices)
    key = u3.expand(6, -1, -1)
    made = AttentionWeights(query, key, key.flip(1), query.transpose(1, 2))
    layer = TuckerAttention.from_weights(made, energy=1.0)
    assert layer.config.ranks == (2, 5, 3)
    assert layer.config.core == "dense"
    x = torch.randn(1, 5, 24, dtype=double)
    assert (layer(x) - exact_output(made, x)).abs().max() <= 1e-9 * exact_output(made, x).abs().max()


def test_truncation_error_is_the_reported_one_and_falls_with_rank(weights):
    before = float("inf")
    for r in (1, 2, 4, 6):
        layer = TuckerAttention.from_weights(weights, ranks=((2, r, r), (2, r, r)))
        w, wt = layer.to_tensors()
        exact_w, exact_wt = TuckerAttention.from_weights(weights).to_tensors()
        error = ((w - exact_w).square().sum() + (wt - exact_wt).square().sum()).item()
        assert error < before
        before = error


def test_calibration_lowers_the_error_on_its_data(weights):
    g = torch.Generator().manual_seed(2)
    skewed = torch.randn(400, 12, generator=g, dtype=double) * torch.logspace(0, -2, 12, dtype=double)
    pre, _ = tensors(weights)
    ones = torch.cat([skewed, torch.ones(400, 1, dtype=double)], 1)

    def logit_error(layer):
        u2 = torch.cat([layer.U2, layer.query_bias[None]]).detach()
        u3 = torch.cat([layer.U3, layer.key_bias[None]]).detach()
        found = torch.einsum("nd,dq,hqk,ek,me->hnm", ones, u2, layer.slices()[0].detach(), u3, ones)
        return float((found - torch.einsum("nd,hdw,hew,me->hnm", ones, pre.a, pre.b, ones)).square().mean())

    plain = logit_error(TuckerAttention.from_weights(weights, ranks=(3, 4, 4)))
    fitted = logit_error(TuckerAttention.from_weights(weights, ranks=(3, 4, 4), calibration=skewed))
    assert fitted < plain


def test_budget_is_kept_and_used(weights):
    for budget in (120, 200, 300):
        layer = TuckerAttention.from_weights(weights, budget=budget)
        held = sum(p.numel() for name, p in layer.named_parameters() if not name.endswith("bias"))
        held += layer.config.ranks[1] + layer.config.ranks[2]  # W's biases are rows of its factors
        assert 0.8 * budget < held <= budget
    with pytest.raises(ValueError, match="a budget of 5 parameters is below the"):
        TuckerAttention.from_weights(weights, budget=5)


def rotated(theta, width):
    """Head-space RoPE, pairs (p, p + w/2), as in Llama."""

    def rotate(x):
        pairs = width // 2
        turn = torch.arange(x.shape[1], dtype=double)[:, None] * theta ** (-torch.arange(pairs, dtype=double) / pairs)
        a, b = x[..., :pairs], x[..., pairs:]
        return torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)

    return rotate


def rotary_weights(heads=4, groups=2, d=16, width=4, theta=100.0):
    frequencies = tuple(theta ** (-p / (width // 2)) for p in range(width // 2))
    matrices = random_matrices(d, heads, groups, width)
    made = AttentionWeights.from_matrices(
        *matrices, n_heads=heads, n_kv_heads=groups, causal=True, rotary=Rotary(frequencies)
    )
    return matrices, made


def test_head_rope_is_exact():
    matrices, made = rotary_weights()
    x = torch.randn(2, 7, 16, dtype=double)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = grouped_attention(x, *matrices, 4, 2, mask=causal, rotate=rotated(100.0, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (TuckerAttention.from_weights(made)(x) - expected).abs().max() <= 1e-10
        full = TuckerAttention.from_weights(made, energy=1.0, rope="head")
    assert (full(x) - expected).abs().max() <= 1e-8
    kept = TuckerAttention.from_weights(made, ranks=(4, 16, 8), rope="head")
    assert (kept(x) - expected).abs().max() <= 1e-8


def test_latent_rope_says_that_it_is_an_initialisation():
    _, made = rotary_weights()
    with pytest.warns(UserWarning, match="NOT the model's layer but an initialisation that needs training"):
        layer = TuckerAttention.from_weights(made, ranks=(4, 8, 6))
    assert (layer.config.rope, layer.config.rope_theta) == ("latent", pytest.approx(100.0))
    with pytest.warns(UserWarning, match="initialisation"):
        layer = TuckerAttention.from_weights(made, energy=0.9)
    assert layer.config.ranks[2] % 2 == 0


def test_truncated_layer_of_a_layer(weights):
    layer = TuckerAttention.from_weights(weights, energy=1.0)
    x = torch.randn(1, 5, 12, dtype=double)
    whole = layer.truncate((layer.config.ranks, layer.config.post_ranks))
    assert whole.config.core == "dense"
    assert (whole(x) - layer(x)).abs().max() <= 1e-9
    small = layer.truncate((2, 4, 4))
    direct = TuckerAttention.from_weights(weights, ranks=(2, 4, 4))
    for found, expected in zip(small.to_tensors(), direct.to_tensors(), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="rank 14 of mode 2 is not between 1 and 12"):
        layer.truncate((2, 14, 4))


def test_one_head_and_one_token():
    matrices = random_matrices(6, 1, 1)
    x = torch.randn(1, 1, 6, dtype=double)
    expected = grouped_attention(x, *matrices, 1, 1)
    for core in ("dense", "per_head"):
        assert (TuckerAttention.from_mha(*matrices, n_heads=1, core=core)(x) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": (2, 2, 2), "energy": 0.5}, "give one of ranks, energy and budget; got ranks, energy"),
        ({"energy": 0.0}, r"energy must be in \(0, 1\], got 0.0"),
        ({"energy": 1.5}, r"energy must be in \(0, 1\], got 1.5"),
        ({"ranks": (5, 2, 2)}, "rank 5 of mode 1 is not between 1 and 4"),
        ({"ranks": (2, 2)}, "ranks must be"),
        ({"ranks": (2, 2, 2), "core": "per_head"}, "per-head cores keep all 4 heads"),
        ({"ranks": (2, 2, 2), "calibration": torch.ones(3, 5)}, r"calibration must be inputs \[.., 12\], got \(3, 5\)"),
        ({"ranks": (2, 2, 2), "calibration": torch.full((3, 12), float("nan"))}, "finite ones"),
        ({"rope": "head"}, "the layer has no RoPE"),
        ({"core": "sparse"}, "core 'sparse' unknown"),
    ],
)
def test_wrong_options_are_named(weights, options, message):
    with pytest.raises(ValueError, match=message):
        TuckerAttention.from_weights(weights, **options)


def test_wrong_weights_are_named():
    q, k, v, o = random_matrices(12, 4, 4)
    with pytest.raises(ValueError, match="5 heads do not divide it"):
        TuckerAttention.from_mha(q, k, v, o, n_heads=5)
    q[0, 0] = float("nan")
    with pytest.raises(ValueError, match="query has values that are not finite"):
        TuckerAttention.from_mha(q, k, v, o, n_heads=4)
    with pytest.raises(ValueError, match="do not divide"):
        TuckerAttention.from_mla(*mla_matrices(16, 4, 4, 12, 8), n_heads=3)


def test_both_ranks():
    assert both_ranks((1, 2, 3)) == ((1, 2, 3), (1, 2, 3))
    assert both_ranks([[1, 2, 3], [4, 5, 6]]) == ((1, 2, 3), (4, 5, 6))
