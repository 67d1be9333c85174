"""The layer: golden values, masks, merging, odd inputs."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from tucker_attention import TuckerAttention, TuckerConfig, param_count
from tucker_attention.config import parameter_shapes

double = torch.float64
GOLDEN = [[3.881824, 2.029544], [4.097711, 2.048855], [3.729782, 2.222807]]
GOLDEN_CAUSAL = [[6, 0], [3, 1.5], [3.729782, 2.222807]]


def golden_layer(**changes):
    config = TuckerConfig(d_model=2, n_heads=2, ranks=(1, 2, 2), scale=1.0, **changes)
    layer = TuckerAttention(config).double()
    values = {
        "C": [[[1, 0], [0, 2]]], "U1": [[1], [-0.5]], "U2": [[1, 0], [0, 1]], "U3": [[1, 1], [0, 1]],
        "Ct": [[[1, 0], [0, 1]]], "V1": [[1], [2]], "V2": [[1, 0], [0, 1]], "V3": [[2, 0], [0, 1]],
    }  # fmt: skip
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(torch.tensor(value, dtype=double))
    return layer


X = torch.tensor([[[1, 0], [0, 1], [1, 1]]], dtype=double)


def test_golden_logits():
    layer = golden_layer()
    w, _ = layer.to_tensors()
    logits = torch.einsum("nd,hde,me->hnm", X[0], w, X[0])
    first = torch.tensor([[1, 0, 1], [2, 2, 4], [3, 2, 5]], dtype=double)
    assert torch.equal(logits, torch.stack([first, -0.5 * first]))


@pytest.mark.parametrize("merged", [False, True])
def test_golden_output(merged):
    layer = golden_layer()
    if merged:
        layer.merge()
    assert torch.allclose(layer(X)[0], torch.tensor(GOLDEN, dtype=double), atol=5e-7)
    expected = torch.tensor(GOLDEN_CAUSAL, dtype=double)
    assert torch.allclose(layer(X, is_causal=True)[0], expected, atol=5e-7)
    assert torch.allclose(golden_layer(causal=True)(X)[0], expected, atol=5e-7)


def test_the_tensor_view_is_the_same_attention():
    """A = softmax(W x2 X x3 X / sqrt(d_H)), S = Wt x3 X, out[j,k] = sum_il A[i,j,l] S[i,k,l]."""
    layer = TuckerAttention(TuckerConfig(12, 4, (3, 5, 6), post_ranks=(2, 7, 4))).double()
    x = torch.randn(2, 9, 12, dtype=double)
    w, wt = layer.to_tensors()
    for row, expected in zip(x, layer(x), strict=True):
        weights = (torch.einsum("hde,nd,me->hnm", w, row, row) / 12**0.5 * 4**0.5).softmax(-1)
        values = torch.einsum("hov,mv->hom", wt, row)
        assert torch.allclose(torch.einsum("ijl,ikl->jk", weights, values), expected, atol=1e-12)


def make(**changes):
    settings = {"d_model": 12, "n_heads": 3, "ranks": (2, 5, 4), "post_ranks": (3, 4, 6), **changes}
    return TuckerAttention(TuckerConfig(**settings)).double().eval()


def naive(layer, x, allowed, context=None):
    """From the two tensors, with a bool mask [B, H, N, M]; no biases."""
    w, wt = layer.to_tensors()
    source = x if context is None else context
    logits = torch.einsum("bnd,hde,bme->bhnm", x, w, source) * layer.config.softmax_scale
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhnm,hov,bmv->bno", weights, wt, source)


def test_masks_agree_with_the_tensors():
    layer, x = make(), torch.randn(2, 6, 12, dtype=double)
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(2, 3, 6, 6, generator=g) > 0.4
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, :2] = True
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    everything = torch.ones(2, 3, 6, 6, dtype=torch.bool)
    for arguments, allowed in [
        ({"mask": mask}, mask),
        ({"mask": mask[:, :1]}, mask[:, :1].expand_as(everything)),
        ({"mask": mask[0, 0]}, mask[0, 0].expand_as(everything)),
        ({"mask": mask[:, 0]}, mask[:, :1].expand_as(everything)),
        ({"is_causal": True}, causal.expand_as(everything)),
        ({"key_padding_mask": padding}, ~padding[:, None, None].expand_as(everything)),
        ({"key_padding_mask": padding, "is_causal": True}, ~padding[:, None, None] & causal & everything),
        ({"mask": mask, "key_padding_mask": padding, "is_causal": True}, mask & ~padding[:, None, None] & causal),
        ({"mask": torch.zeros(6, 6, dtype=double).masked_fill(~causal, float("-inf"))}, causal.expand_as(everything)),
    ]:
        assert torch.allclose(layer(x, **arguments), naive(layer, x, allowed), atol=1e-12), list(arguments)


def test_a_query_that_may_look_at_nothing_gives_the_output_bias():
    layer = make(biases=("query", "key", "output"))
    with torch.no_grad():
        for name in ("query_bias", "key_bias", "output_bias"):
            getattr(layer, name).normal_()
    x = torch.randn(2, 4, 12, dtype=double)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, :] = True  # a row of padding alone
    out = layer(x, key_padding_mask=padding)
    assert torch.equal(out[0], layer.output_bias.expand(4, -1))
    assert torch.isfinite(out).all()
    left = torch.tensor([[True, True, False, False], [False] * 4])
    out = layer(x, key_padding_mask=left, is_causal=True)  # left padding: the first queries see padding only
    assert torch.equal(out[0, :2], layer.output_bias.expand(2, -1))
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_cross_attention():
    layer = make(context_dim=7, ranks=(2, 5, 4), post_ranks=(3, 4, 6))
    x, context = torch.randn(2, 3, 12, dtype=double), torch.randn(2, 5, 7, dtype=double)
    assert torch.allclose(
        layer(x, context=context), naive(layer, x, torch.ones(2, 3, 3, 5, dtype=torch.bool), context), atol=1e-12
    )


@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token(n):
    layer, x = make(), torch.randn(2, n, 12, dtype=double)
    out = layer(x)
    assert out.shape == (2, n, 12)
    if n:
        assert torch.allclose(out, naive(layer, x, torch.ones(2, 3, 1, 1, dtype=torch.bool)), atol=1e-12)
    assert layer(torch.randn(2, 3, 12, dtype=double), context=torch.randn(2, 0, 12, dtype=double)).abs().max() == 0


def test_shuffled_heads_give_the_same_output():
    layer, x = make(), torch.randn(2, 5, 12, dtype=double)
    expected = layer(x)
    with torch.no_grad():
        order = torch.tensor([2, 0, 1])
        layer.U1.copy_(layer.U1[order])
        layer.V1.copy_(layer.V1[order])
    assert torch.allclose(layer(x), expected, atol=1e-12)


@pytest.mark.parametrize("share_kv", [False, True])
def test_gradients(share_kv):
    post = (1, 2, 2) if share_kv else (1, 2, 3)
    biases = ("query", "key", "output")
    layer = make(
        d_model=4, n_heads=2, ranks=(2, 3, 2), share_kv=share_kv, post_ranks=post, rope="latent", biases=biases
    )
    x = torch.randn(1, 3, 4, dtype=double, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,), {"is_causal": True})

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


def test_gradients_of_only_some_factors():
    layer = make()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in ("C", "Ct"))
    layer.train()
    layer(torch.randn(1, 4, 12, dtype=double)).sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {"C", "Ct"}


def test_merged_cores_are_forgotten_in_training_and_follow_dtypes():
    layer, x = make(), torch.randn(1, 4, 12, dtype=double)
    before = layer.merge()(x)
    layer.train()
    with torch.no_grad():
        layer.C.mul_(2)
    assert not torch.allclose(layer.eval()(x), before)
    assert layer.merge().float()(x.float()).dtype == torch.float32


def test_share_kv_has_one_latent():
    layer = make(share_kv=True, post_ranks=(3, 4, 4))
    assert "V3" not in dict(layer.named_parameters())
    x = torch.randn(1, 5, 12, dtype=double)
    assert torch.allclose(layer(x), naive(layer, x, torch.ones(1, 3, 5, 5, dtype=torch.bool)), atol=1e-12)


@pytest.mark.parametrize("ranks", [(8, 128, 64), (1, 16, 8), (12, 64, 64), (2, 9, 31), (12, 256, 128)])
def test_initial_logits_have_unit_variance(ranks):
    torch.manual_seed(0)
    layer = TuckerAttention(TuckerConfig(256, 16, (min(ranks[0], 16), *ranks[1:])))
    q, k = torch.randn(64, 256), torch.randn(64, 256)
    w, _ = layer.to_tensors()
    # over heads and tokens; r1 = 1 has one random core only, so its own spread is wide
    logits = torch.einsum("nd,hde,me->hnm", q, w, k) * layer.config.softmax_scale
    assert 0.7 <= float(logits.detach().std()) <= 1.4


def test_logits_of_ten_thousand_are_exact():
    layer, x = make(), torch.randn(1, 5, 12, dtype=double)
    with torch.no_grad():
        layer.C.mul_(1e4 / float(torch.einsum("nd,hde,me->hnm", x[0], layer.to_tensors()[0], x[0]).abs().max()) * 2)
    everything = torch.ones(1, 3, 5, 5, dtype=torch.bool)
    expected = naive(layer, x, everything)
    assert torch.allclose(layer(x), expected, atol=1e-10)
    assert torch.allclose(layer.float()(x.float()).double(), expected, atol=5e-2)


def test_half_precision_does_not_overflow():
    layer = TuckerAttention(TuckerConfig(64, 1, (1, 64, 64))).half()
    with torch.no_grad():
        layer.U1.fill_(1)
        for factor in (layer.U2, layer.U3):
            factor.copy_(torch.eye(64))
        layer.C.copy_(torch.eye(64))
    out = layer(torch.full((1, 3, 64), 45.0).half())  # q k = 64 * 45^2 = 129600 overflows without the scale 1/8
    assert torch.isfinite(out).all()


def test_inputs_that_are_not_contiguous():
    layer = make()
    wide = torch.randn(2, 12, 10, dtype=double)
    x = wide.transpose(1, 2)[:, ::2]
    assert torch.allclose(layer(x), layer(x.contiguous()), atol=1e-14)


def test_many_heads_at_a_time_is_all_heads_at_once(monkeypatch):
    from importlib import import_module

    layer, x = make(n_heads=4, ranks=(3, 5, 4)), torch.randn(2, 6, 12, dtype=double)
    expected = layer(x, is_causal=True)
    module = import_module("tucker_attention.kernels.latent_attention")
    monkeypatch.setattr(module, "_ALL_HEADS", 0)
    monkeypatch.setattr(module, "_COLUMNS", 30)
    assert module.heads_at_once(2, 6, 4, 10) == 3
    assert torch.allclose(layer(x, is_causal=True), expected, atol=1e-14)


def test_dropout_drops_in_training_only():
    layer, x = make(dropout=0.5), torch.randn(1, 6, 12, dtype=double)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


_COMPILED = """
import torch
from tucker_attention import TuckerAttention, TuckerConfig
layer = TuckerAttention(TuckerConfig(12, 3, (2, 5, 4), rope="latent"))
x = torch.randn(2, 6, 12)
with torch.no_grad():
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # a graph break is an error
    print(float((compiled(x, is_causal=True) - layer(x, is_causal=True)).abs().max()))
"""


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    # in a process without the run-time shape checks, which dynamo cannot follow
    answer = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert float(answer.stdout) <= 1e-6


@pytest.mark.parametrize("ranks", [(8, 128, 64), (1, 1, 1), (12, 768, 768)])
def test_parameters_are_the_formula(ranks):
    config = TuckerConfig(768, 12, ranks)
    held = sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())
    r1, r2, r3 = ranks
    assert held == 2 * (r1 * r2 * r3 + 12 * r1 + 768 * r2 + 768 * r3)
    assert held == param_count("tucker", d_model=768, n_heads=12, ranks=ranks)


def test_megabytes_of_gpt2():
    """bf16, 12 layers; paper's table: 56.62, 37.74, 33.02, 26.00, 15.74, 10.24, 6.31 MB."""
    shared = {"d_model": 768, "n_heads": 12, "n_layers": 12}
    cases = [
        ("mha", {}, 56.62), ("gqa", {"n_kv_heads": 4}, 37.74), ("gqa", {"n_kv_heads": 2}, 33.02),
        ("mla", {"latent": 128}, 26.00), ("tucker", {"ranks": (8, 128, 128)}, 15.74),
        ("tucker", {"ranks": (8, 128, 64)}, 10.24), ("tucker", {"ranks": (8, 64, 64)}, 6.31),
    ]  # fmt: skip
    for kind, options, megabytes in cases:
        assert abs(2 * param_count(kind, **shared, **options) / 1e6 - megabytes) <= 0.06, kind


def test_any_mqa_computes_it():
    """MQA through torch's own function: the latents are one key and value head."""
    layer, x = make(post_ranks=(3, 4, 4)), torch.randn(2, 6, 12, dtype=double)
    t, tt = layer.merged_cores()
    q = torch.einsum("bnr,hrk->bhnk", x @ layer.U2, t)
    one = (x @ layer.U3).unsqueeze(1), (x @ layer.V3).unsqueeze(1)
    looked = F.scaled_dot_product_attention(q, *one, scale=1.0, enable_gqa=True)
    assert torch.allclose(torch.einsum("bhns,hts->bnt", looked, tt) @ layer.V2.T, layer(x), atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": (2, 4, 11)}, r"x must be \[B, N, 12\], got \(2, 4, 11\)"),
        ({"x": (4, 12)}, r"x must be \[B, N, 12\], got \(4, 12\)"),
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, r"mask must be \[4, 4\], \[2, 4, 4\] or .* got \(3, 3\)"),
        ({"mask": torch.ones(4, 4, dtype=torch.int64)}, "mask must be bool .* got torch.int64"),
        ({"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}, r"must be bool \[2, 4\], True for padding"),
        ({"key_padding_mask": torch.zeros(2, 4)}, r"must be bool \[2, 4\]"),
        ({"context": (3, 4, 12)}, r"context must be \[2, M, 12\], got \(3, 4, 12\)"),
        ({"positions": torch.arange(4)}, "positions were given to a layer without RoPE"),
    ],
)
def test_wrong_inputs_are_named(arguments, message, unchecked):
    made = {name: torch.randn(*v, dtype=double) if isinstance(v, tuple) else v for name, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        make()(**{"x": torch.randn(2, 4, 12, dtype=double), **made})
