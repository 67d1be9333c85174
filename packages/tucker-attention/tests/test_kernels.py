"""Every operation's paths give one result: reference, fused attention of torch, Triton in its interpreter."""

import pytest
import torch

from tucker_attention.kernels import latent_attention, latent_attention_packed, latent_decode
from tucker_attention.kernels.rotary import Tables


def case(b=2, n=7, m=9, heads=3, ranks=(5, 6), post=(4, 8), dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(b, n, ranks[0]), (heads, *ranks), (b, m, ranks[1]), (b, m, post[1]), (heads, *post)]
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def angles(b, n, m, pairs, *, keys, interleaved):
    g = torch.Generator().manual_seed(9)
    turns = torch.rand(b, max(n, m), pairs, generator=g) * 6
    q, k = turns[:, :n], turns[:, :m]
    return Tables(q.cos(), q.sin(), k.cos() if keys else None, k.sin() if keys else None, interleaved)


def check_attention(prefer, arguments, tolerance=1e-4, **options):
    found = latent_attention(*arguments, prefer=prefer, **options)
    expected = latent_attention(*arguments, prefer="torch", **options)
    assert found.dtype == arguments[0].dtype
    assert torch.isfinite(found).all()
    assert found.shape == expected.shape
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance * largest)


def key_mask(b, m):
    mask = torch.ones(b, m, dtype=torch.bool)
    mask[0, : m // 3] = False
    mask[-1] = False  # a row of padding alone
    return mask


SHAPES = [
    {}, {"n": 1, "m": 1}, {"n": 33, "m": 33}, {"n": 5, "m": 40, "heads": 1},
    {"heads": 7, "ranks": (3, 16), "post": (20, 33)}, {"b": 1, "ranks": (70, 12), "post": (3, 2)}, {"n": 0}, {"m": 0},
    {"heads": 5, "n": 17, "m": 20, "ranks": (8, 2), "post": (8, 2)},
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"keys": True}, {"causal": True, "keys": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_attention(shape, options):
    arguments = case(**shape)
    given = {"causal": options.get("causal", False)}
    if options.get("keys"):
        given["key_mask"] = key_mask(arguments[2].shape[0], arguments[2].shape[1])
    check_attention("cpu", arguments, **given)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_cpu_attention_with_rotary(interleaved, keys):
    check_attention("cpu", case(), causal=True, rotary=angles(2, 7, 9, 3, keys=keys, interleaved=interleaved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_attention_in_half_precision(dtype):
    check_attention("cpu", case(n=20, m=20, ranks=(16, 16), post=(16, 16), dtype=dtype), 2e-2, causal=True)


@pytest.mark.parametrize("heads", [1, 3, 20])
@pytest.mark.parametrize("masked", [False, True])
def test_cpu_decode(heads, masked):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, *shape, generator=g) for shape in ((heads, 6), (11, 6), (11, 9)))
    mask = key_mask(3, 11) if masked else None
    found = latent_decode(q, k, v, key_mask=mask, prefer="cpu")
    assert torch.allclose(found, latent_decode(q, k, v, key_mask=mask, prefer="torch"), atol=1e-5)
    assert latent_decode(q, k[:, :0], v[:, :0]).abs().max() == 0


def test_wrong_shapes_are_named():
    q2, t, k, v, tt = case()
    with pytest.raises(ValueError, match=r"shapes do not fit: .* got q2 \(2, 7, 5\), t \(3, 5, 6\), k \(2, 9, 5\)"):
        latent_attention(q2, t, k[..., :5], v, tt)
    with pytest.raises(ValueError, match="takes five tensors of three dimensions"):
        latent_attention(q2[0], t, k, v, tt)
    with pytest.raises(ValueError, match=r"latent_decode takes q \[B, H, r3\]"):
        latent_decode(q2, k, v)


PACKED = torch.tensor([0, 4, 4, 13]), torch.tensor([0, 6, 7, 7])  # a sequence without queries, one without keys


def check_packed(prefer, rotary):
    """Each sequence is attended to alone, forward and backward."""
    q2, t, k, v, tt = (x.requires_grad_() for x in case(b=1, n=13, m=7))
    turn = angles(1, 13, 7, 3, keys=True, interleaved=False) if rotary else None
    given = {"causal": True, "rotary": turn}
    with torch.no_grad():
        plain = latent_attention_packed(q2[0], t, k[0], v[0], tt, *PACKED, prefer=prefer, **given)
    found = latent_attention_packed(q2[0], t, k[0], v[0], tt, *PACKED, prefer=prefer, **given)
    if rotary:
        given["rotary"] = Tables(*(x[:, :n] for x, n in zip(turn[:4], (4, 4, 6, 6), strict=True)))
    expected = torch.zeros(13, 4)
    expected[:4] = latent_attention(q2[:, :4], t, k[:, :6], v[:, :6], tt, prefer="torch", **given)[0]
    assert torch.allclose(plain, expected, atol=1e-4)
    assert torch.allclose(found, expected, atol=1e-4)
    wanted = torch.randn(13, 4, generator=torch.Generator().manual_seed(4))
    for a, b in zip(
        *(torch.autograd.grad((x * wanted).sum(), (q2, t, k, v, tt)) for x in (found, expected)), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("prefer", ["cpu", "torch"])
@pytest.mark.parametrize("rotary", [False, True])
def test_packed_sequences(prefer, rotary):
    check_packed(prefer, rotary)


@pytest.mark.parametrize("cuts", [[0, 5], [1, 13], [0, 9, 4, 13], [0.0, 13.0], [13]], ids=str)
def test_boundaries_that_do_not_fit_are_named(cuts):
    q2, t, k, v, tt = case(b=1, n=13, m=13)
    with pytest.raises(ValueError, match="cu_seqlens must be whole numbers from 0 to 13 that do not decrease, got"):
        latent_attention_packed(q2[0], t, k[0], v[0], tt, torch.tensor(cuts))


# -- Triton, in its interpreter ----------------------------------------------------------------------------------------

interpreted = pytest.mark.triton_interpreter
TRITON_SHAPES = [
    {}, {"n": 1, "m": 1}, {"n": 19, "m": 70, "heads": 5, "ranks": (3, 16), "post": (20, 33)},
    {"b": 1, "ranks": (70, 11), "post": (3, 2)}, {"n": 0}, {"m": 0},
    {"b": 1, "n": 3, "m": 5, "ranks": (4, 6), "post": (300, 100)},
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "keys": True}], ids=str)
@pytest.mark.parametrize("shape", TRITON_SHAPES, ids=str)
def test_triton_attention(shape, options):
    arguments = case(**shape)
    given = {"causal": options.get("causal", False)}
    if options.get("keys"):
        given["key_mask"] = key_mask(arguments[2].shape[0], arguments[2].shape[1])
    check_attention("triton", arguments, **given)


@interpreted
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_triton_attention_with_rotary(interleaved, keys):
    check_attention("triton", case(n=9), causal=True, rotary=angles(2, 9, 9, 3, keys=keys, interleaved=interleaved))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16])
def test_triton_attention_in_half_precision(dtype):
    check_attention("triton", case(n=9, m=9, ranks=(16, 16), post=(16, 16), dtype=dtype), 2e-2, causal=True)


@interpreted
@pytest.mark.parametrize("options", ["plain", "causal", "masked", "rotary", "interleaved"])
def test_triton_gradients(options):
    arguments = [x.requires_grad_() for x in case(n=9, m=9)]
    given = {"causal": options != "plain"}
    if options == "masked":
        given["key_mask"] = key_mask(2, 9)
    if options in ("rotary", "interleaved"):
        given["rotary"] = angles(2, 9, 9, 3, keys=True, interleaved=options == "interleaved")
    wanted = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(4))
    found = torch.autograd.grad((latent_attention(*arguments, prefer="triton", **given) * wanted).sum(), arguments)
    expected = torch.autograd.grad((latent_attention(*arguments, prefer="torch", **given) * wanted).sum(), arguments)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, float(b.abs().max())))


@interpreted
def test_triton_reads_strides():
    q2, t, k, v, tt = case(n=8, m=8)
    wide = torch.cat([k, v], 2)
    check_attention("triton", [q2, t, wide[..., :6], wide[..., 6:], tt])


@interpreted
@pytest.mark.parametrize("rotary", [False, True])
def test_triton_packed_sequences(rotary):
    check_packed("triton", rotary)


@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 18])
def test_triton_decode(heads, masked, monkeypatch):
    from tucker_attention.kernels import triton_decode

    monkeypatch.setattr(triton_decode, "SPLIT_TOKENS", 64)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, *shape, generator=g) for shape in ((heads, 6), (150, 6), (150, 9)))
    mask = key_mask(3, 150) if masked else None
    found = latent_decode(q, k, v, key_mask=mask, prefer="triton")
    assert torch.allclose(found, latent_decode(q, k, v, key_mask=mask, prefer="torch"), atol=1e-4)
