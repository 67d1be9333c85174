"""The fused policy loss, in chunks and in Triton, against the reference: values, gradients, skipped rows, edge
cases."""

import math

import pytest
import torch

from icml26_shared import aot
from maxrl import fused_policy_loss
from maxrl.kernels import policy_loss_chunked, policy_loss_triton

SETTINGS = {
    "plain": {},
    "off-policy": {"old": True},
    "clipped": {"old": True, "epsilon_low": 0.02, "epsilon_high": 0.03},
    "kl": {"old": True, "ref": True, "beta": 0.1},
    "soft-cap": {"softcap": 5.0, "temperature": 0.7, "logit_scale": 1.5},
    "bias": {"with_bias": True, "temperature": 1.3, "entropy": True},
    "weights": {"weighted": True, "normalizer": 17.0, "old": True},
}


def make(
    rows, vocabulary, width, *, dtype=torch.float32, old=False, ref=False, with_bias=False, weighted=False, **options
):
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary + width)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(rows, width), normal(vocabulary, width) / math.sqrt(width)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    advantages = normal(rows)
    advantages[::3] = 0
    targets[1::5] = -100
    tensors = {"hidden": hidden, "weight": weight}
    if with_bias:
        tensors["bias"] = normal(vocabulary)
    logp = torch.log_softmax(hidden @ weight.T, -1)[torch.arange(rows), targets.clamp(min=0)]
    floats = {"advantages": advantages}
    if old:
        floats["old_logp"] = logp + 0.3 * normal(rows)
    if ref:
        floats["ref_logp"] = logp + 0.3 * normal(rows)
    if weighted:
        floats["row_weights"] = normal(rows).abs()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}
    return tensors, {"targets": targets, **{k: v.to(wide) for k, v in floats.items()}, **options}


def run(tensors, options, **more):
    leaves = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
    out = fused_policy_loss(**leaves, **options, **more)
    out.loss.backward()
    return out, [leaf.grad for leaf in leaves.values()]


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("shape", [(1, 2, 1), (7, 33, 5), (40, 129, 17), (130, 50, 64)])
def test_chunks_equal_the_reference(setting, shape, monkeypatch):
    monkeypatch.setattr(policy_loss_chunked, "LOGITS_AT_ONCE", 16 * shape[1])  # several chunks, the last one ragged
    tensors, options = make(*shape, **SETTINGS[setting])
    ours, grads = run(tensors, options, path="cpu")
    want, wanted = run(tensors, options, path="torch")
    torch.testing.assert_close(ours.loss, want.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.logp, want.logp, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.clipped, want.clipped)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    if options.get("entropy"):
        torch.testing.assert_close(ours.entropy, want.entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", ["plain", "clipped", "soft-cap", "bias", "kl"])
def test_sixteen_bits(dtype, setting, monkeypatch):
    monkeypatch.setattr(policy_loss_chunked, "LOGITS_AT_ONCE", 16 * 65)
    monkeypatch.setattr(policy_loss_chunked, "_VOCABULARY_TILE", 24)
    tensors, options = make(60, 65, 48, dtype=dtype, **SETTINGS[setting])
    ours, grads = run(tensors, options, path="cpu")
    want, wanted = run(tensors, options, path="torch")
    assert ours.loss.dtype == torch.float32
    torch.testing.assert_close(ours.loss, want.loss, rtol=2e-2, atol=2e-3)
    for got, expected in zip(grads, wanted, strict=True):
        assert got.dtype == dtype
        difference = (got.float() - expected.float()).norm() / expected.float().norm()
        assert difference < 2e-2
    if options.get("entropy"):
        torch.testing.assert_close(ours.entropy, want.entropy, rtol=2e-2, atol=2e-2)


def test_a_large_normaliser_loses_nothing_in_float16():
    """Gradients of a long batch are below float16's smallest number until the loss scale brings them back."""
    tensors, options = make(40, 129, 17, dtype=torch.float16, with_bias=True)
    scale = 2.0**24
    found = []
    for normalizer, factor in ((1.0, 1.0), (scale, scale)):
        leaves = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
        (fused_policy_loss(**leaves, **options, normalizer=normalizer, path="cpu").loss * factor).backward()
        found.append([leaf.grad for leaf in leaves.values()])
    for plain, scaled in zip(*found, strict=True):
        assert plain.any()
        assert torch.equal(plain, scaled)


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_gradcheck(setting):
    # With old_logp = None the ratio is 1 whatever the parameters, so finite differences see nothing: give one here.
    tensors, options = make(6, 11, 3, dtype=torch.float64, **{**SETTINGS[setting], "old": True})

    def loss(*leaves):
        return fused_policy_loss(**dict(zip(tensors, leaves, strict=True)), **options, path="cpu").loss

    assert torch.autograd.gradcheck(loss, tuple(tensors.values()), eps=1e-6, atol=1e-7)


def test_skipped_rows_change_nothing():
    """Dropping the rows with advantage 0 or target -100 by hand, with the same Z, gives the same loss and gradients."""
    tensors, options = make(40, 60, 16, old=True)
    ours, grads = run(tensors, options, path="cpu")
    live = (options["targets"] != -100) & (options["advantages"] != 0)
    assert torch.equal(ours.live, live)
    assert 0 < live.sum() < 30
    normalizer = int((options["targets"] != -100).sum())
    hidden, weight = (tensors[k].detach().clone().requires_grad_() for k in ("hidden", "weight"))
    logp = torch.log_softmax(hidden @ weight.T, -1)
    rows = torch.arange(40)[live]
    logp = logp[rows, options["targets"][live]]
    ratio = torch.exp(logp - options["old_logp"][live])
    a = options["advantages"][live]
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / normalizer
    loss.backward()
    torch.testing.assert_close(ours.loss, loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-4, atol=1e-7)
    assert not grads[0][~live].any()
    assert not ours.logp[~live].any()


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_left_is_loss_zero_with_a_graph(rows):
    tensors, options = make(rows, 9, 4, with_bias=True)
    options["advantages"] = torch.zeros(rows)
    out, grads = run(tensors, options)
    assert out.loss == 0
    assert out.loss.requires_grad or out.loss.grad_fn is None
    for grad in grads:
        assert grad is not None
        assert not grad.any()


def test_tied_weights_add_up():
    torch.manual_seed(0)
    embedding = torch.nn.Parameter(torch.randn(20, 6))
    ids, targets, a = torch.randint(0, 20, (8,)), torch.randint(0, 20, (8,)), torch.randn(8)

    def gradient(path):
        embedding.grad = None
        hidden = torch.tanh(embedding[ids])
        fused_policy_loss(hidden, embedding, targets, a, path=path).loss.backward()
        return embedding.grad.clone()

    torch.testing.assert_close(gradient("cpu"), gradient("torch"), rtol=1e-4, atol=1e-6)


def test_strides_frozen_head_and_scaled_backward():
    tensors, options = make(12, 30, 8)
    dense, grads = run(tensors, options, path="cpu")
    hidden = tensors["hidden"].detach().T.contiguous().T
    weight = torch.cat([tensors["weight"].detach()] * 2, 1)[:, :8]
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    strided = hidden.requires_grad_()
    out = fused_policy_loss(strided, weight, **options, path="cpu")
    (out.loss * 3).backward(retain_graph=True)
    torch.testing.assert_close(strided.grad, 3 * grads[0])
    out.loss.backward()  # through the retained graph, after the first backward took the buffers
    torch.testing.assert_close(strided.grad, 4 * grads[0])
    assert out.loss.item() == pytest.approx(dense.loss.item())
    assert not out.logp.requires_grad
    with torch.no_grad():
        assert fused_policy_loss(strided, weight, **options).loss.item() == pytest.approx(dense.loss.item())


def test_clip_shares():
    hidden, weight = torch.zeros(4, 2), torch.zeros(2, 2)
    logp = -math.log(2)
    old = torch.tensor([logp - 1, logp, logp + 1, logp + 1])
    out = fused_policy_loss(hidden, weight, torch.zeros(4).long(), torch.tensor([1.0, 1.0, -1.0, 1.0]), old_logp=old)
    assert out.clipped.tolist() == [True, False, True, False]
    assert out.clip_share_positive == pytest.approx(1 / 3)
    assert out.clip_share_negative == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"hidden must be \(R, D\)"),
        ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, "one floating type"),
        ({"targets": torch.tensor([0, 1, 9])}, r"targets must lie in 0\.\.8"),
        ({"targets": torch.tensor([0, 1, -1])}, r"or be -100"),
        ({"advantages": torch.zeros(2)}, "advantages has shape"),
        ({"bias": torch.zeros(3)}, "bias has shape"),
        ({"beta": 0.1}, "pass ref_logp"),
        ({"temperature": 0.0}, "temperature = 0"),
        ({"softcap": -1.0}, "softcap = -1"),
        ({"epsilon_low": 2.0}, "epsilon_low = 2"),
        ({"path": "triton"}, "CPU"),
    ],
)
def test_bad_input(change, message):
    good = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "targets": torch.tensor([0, 1, -100]),
        "advantages": torch.ones(3),
    }
    with pytest.raises(ValueError, match=message):
        fused_policy_loss(**{**good, **change})


SHAPES = [(1, 2, 1), (5, 129, 16), (17, 40, 33), (33, 31, 64), (16, 128, 65), (70, 257, 20)]


@pytest.fixture
def small_blocks(monkeypatch):
    for name in ("BLOCK_R", "BLOCK_V", "BLOCK_D"):
        monkeypatch.setattr(policy_loss_triton, name, 32)


def compare(shape, setting, dtype=torch.float32, tolerance=1e-4, **more):
    tensors, options = make(*shape, dtype=dtype, **SETTINGS[setting])
    ours, grads = run(tensors, options, path="triton", **more)
    want, wanted = run(tensors, options, path="torch")
    torch.testing.assert_close(ours.loss, want.loss, rtol=max(1e-5, tolerance / 10), atol=max(1e-5, tolerance / 10))
    torch.testing.assert_close(ours.logp, want.logp, rtol=tolerance, atol=max(1e-5, tolerance))
    for got, expected in zip(grads, wanted, strict=True):
        assert got.dtype == dtype
        scale = expected.float().norm() + 1e-6
        assert (got.float() - expected.float()).norm() / scale < tolerance
    if options.get("entropy"):
        torch.testing.assert_close(ours.entropy, want.entropy, rtol=tolerance, atol=max(1e-4, tolerance))
    return grads


@pytest.mark.triton_interpreter
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, small_blocks):
    compare(shape, "off-policy")


@pytest.mark.triton_interpreter
@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize("deterministic", [True, False])
def test_settings(setting, deterministic, small_blocks):
    compare((21, 75, 40), setting, deterministic=deterministic)


@pytest.mark.triton_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_triton(dtype, small_blocks):
    compare((21, 75, 40), "off-policy", dtype=dtype, tolerance=2e-2)


@pytest.mark.triton_interpreter
def test_strides_and_default_blocks():
    tensors, options = make(9, 140, 70, old=True)
    tensors["hidden"] = tensors["hidden"].detach().T.contiguous().T
    tensors["weight"] = torch.cat([tensors["weight"].detach()] * 2, 1)[:, :70]
    ours, grads = run(tensors, options, path="triton", deterministic=True)
    want, wanted = run(tensors, options, path="torch")
    torch.testing.assert_close(ours.loss, want.loss, rtol=1e-5, atol=1e-6)
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.triton_interpreter
def test_empty_and_fully_clipped(small_blocks):
    tensors, options = make(6, 40, 8)
    options["advantages"] = torch.zeros(6)
    out, grads = run(tensors, options, path="triton")
    assert out.loss == 0
    assert not any(grad.any() for grad in grads)
    options["advantages"] = torch.ones(6)
    options["old_logp"] = torch.full((6,), -100.0)  # every ratio far above the clip
    out, grads = run(tensors, options, path="triton")
    assert out.clip_share_positive == 1
    assert not any(grad.any() for grad in grads)


@pytest.mark.slow  # 24 compilations
def test_compile_ahead_of_time_without_spills():
    pytest.importorskip("triton")
    reports = aot.compile("maxrl")
    assert len(reports) == 2 * 4 * 3
    for report in reports:
        assert report.error == ""
        assert report.registers > 0
        assert report.spills == 0, report
        assert report.stack_bytes == 0, report
