"""Packed attention and the packed policy loss: every path against separate attention and plain formulas."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo.kernels import AOT_SPECS, PackedLayout, packed_attention, packed_policy_loss
from dppo.kernels.policy_loss import Clip
from dppo.losses import Surrogate
from dppo.packing import pack_window

T = torch.tensor
interpreted = pytest.mark.triton_interpreter


def layout_of(lengths, prefixes=None):
    """Segments of these lengths; prefixes[i] is the index of the segment that i continues, or None."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    prefixes = prefixes or [None] * len(lengths)
    start = [0 if p is None else int(bounds[p]) for p in prefixes]
    size = [0 if p is None else lengths[p] for p in prefixes]
    return PackedLayout(T(bounds), T(start), T(size))


CASES = {
    "one token": ([1], None),
    "segments of length 1 among others": ([1, 5, 1, 1, 70], None),
    "block boundaries": ([64, 64, 1, 63, 65], None),
    "empty segments": ([0, 3, 0, 4, 0], None),
    "prefix shorter than a block": ([10, 7, 5, 30], [None, 0, 0, None]),
    "prefix longer than a block": ([150, 20, 1, 40], [None, 0, 0, 0]),
    "two prompts": ([5, 3, 4, 80, 9, 2], [None, 0, 0, None, 3, 3]),
}


def inputs(tokens, heads, kv_heads, dim, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim)]
    return [torch.randn(*s, generator=rng).to(dtype).requires_grad_() for s in shapes]


def separate(q, k, v, layout):
    """Each segment alone, un-packed, by PyTorch's attention: a prefix is prepended, as if every sequence had its
    own."""
    pieces = []
    for start, length, prefix, prefix_length in layout.segments():
        own = slice(start, start + length)
        before = slice(prefix, prefix + prefix_length)
        keys, values = (torch.cat([x[before], x[own]]).transpose(0, 1) for x in (k, v))
        mask = torch.ones(length, prefix_length + length, dtype=torch.bool).tril(prefix_length)
        repeat = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q[own].transpose(0, 1), keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0), mask
        )
        pieces.append(out.transpose(0, 1))
    return torch.cat(pieces)


def assert_same(path, lengths, prefixes, heads, kv_heads, dim, dtype=torch.float32, tolerance=1e-5):
    layout = layout_of(lengths, prefixes)
    q, k, v = inputs(layout.tokens, heads, kv_heads, dim, dtype)
    other = [x.detach().float().requires_grad_() for x in (q, k, v)]
    out, expected = packed_attention(q, k, v, layout, path=path), separate(*other, layout)
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((out.float() * weight).sum(), [q, k, v])
    theirs = torch.autograd.grad((expected * weight).sum(), other)
    for a, b, name in zip(ours, theirs, "qkv", strict=True):
        assert a.dtype == dtype
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(
            a.float() / scale, b / scale, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", ["cpu", "torch"])
def test_packed_equals_separate(path, case):
    assert_same(path, *CASES[case], heads=4, kv_heads=2, dim=32)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_triton_equals_separate(case):
    assert_same("triton", *CASES[case], heads=2, kv_heads=1, dim=32)


@interpreted
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_triton_head_dimensions(dim):
    assert_same("triton", [20, 17, 33], [None, 0, 0], heads=2, kv_heads=2, dim=dim)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_half_precision(dtype):
    assert_same("triton", [30, 41, 9], [None, 0, None], heads=2, kv_heads=1, dim=32, dtype=dtype, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_half_precision(dtype):
    assert_same("cpu", [30, 41, 9], [None, 0, None], heads=2, kv_heads=1, dim=64, dtype=dtype, tolerance=2e-2)


@interpreted
def test_triton_strided_input_lse_and_its_gradient():
    layout = layout_of([9, 30, 4], [None, 0, 0])
    base = torch.randn(43, 3, 4, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (base[:, i].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for i in range(3))
    assert q.stride(2) != 1
    results = []
    for path in ("triton", "torch"):
        out, lse = packed_attention(q, k, v, layout, scale=0.3, return_lse=True, path=path)
        results.append((out, lse, *torch.autograd.grad((out.square().sum() + (lse * lse).sum()), [q, k, v])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@interpreted
def test_triton_gradient_is_deterministic():
    layout = layout_of([70, 40, 50], [None, 0, 0])
    q, k, v = inputs(160, 4, 1, 16)
    first, second = (
        torch.autograd.grad(packed_attention(q, k, v, layout, path="triton").square().sum(), [q, k, v])
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), data=st.data())
def test_cpu_path_on_random_layouts(lengths, data):
    prefixes = [data.draw(st.sampled_from([None, *range(i)])) for i in range(len(lengths))]
    if sum(lengths):
        assert_same("cpu", lengths, prefixes, heads=2, kv_heads=1, dim=8, tolerance=2e-5)


def test_gradcheck_in_double_precision():
    layout = layout_of([3, 2, 4], [None, 0, None])
    q, k, v = (x.detach().double().requires_grad_() for x in inputs(9, 2, 1, 4))
    for path in ("cpu", "torch"):
        assert torch.autograd.gradcheck(lambda *x, p=path: packed_attention(*x, layout, path=p), (q, k, v))


def test_empty_input_keeps_the_graph():
    q, k, v = inputs(0, 2, 1, 8)
    out = packed_attention(q, k, v, layout_of([0]))
    assert out.shape == (0, 2, 8)
    out.sum().backward()


def test_block_lists_cover_the_mask_and_nothing_else():
    layout = layout_of([100, 30, 64, 1, 77], [None, 0, 0, None, 3])
    mask = layout.dense_mask()
    row_ptr, row_blocks, column_ptr, column_blocks = layout.block_lists(32, 16, "cpu")
    pairs = {(m, int(n)) for m in range(len(row_ptr) - 1) for n in row_blocks[row_ptr[m] : row_ptr[m + 1]]}
    mirrored = {
        (int(m), n) for n in range(len(column_ptr) - 1) for m in column_blocks[column_ptr[n] : column_ptr[n + 1]]
    }
    needed = {(int(i) // 32, int(j) // 16) for i, j in torch.nonzero(mask)}
    assert pairs == mirrored == needed


def test_layouts_from_packing_and_positions():
    packing = pack_window([4, 2, 3], 20, prefix_ids=["a", "a", "b"], prefix_lengths=[3, 3, 2])
    layout = PackedLayout.from_packing(packing)
    rows = packing.block_mask()
    assert layout.tokens == packing.tokens == 14
    assert torch.equal(layout.dense_mask(), rows[0][:14, :14])
    plain = PackedLayout.from_position_ids(T([0, 1, 2, 0, 0, 1]))
    assert plain.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert PackedLayout.from_position_ids(T([5, 6])).cu_seqlens.tolist() == [0, 2]


def test_bad_layouts_and_shapes():
    for bounds in ([1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            PackedLayout(torch.tensor(bounds, dtype=torch.int64))
    with pytest.raises(ValueError, match="prefix of segment 0"):
        PackedLayout(T([0, 3]), T([0]), T([2]))
    with pytest.raises(ValueError, match="one entry"):
        PackedLayout(T([0, 3]), T([0, 0]), T([0, 0]))
    q, k, v = inputs(5, 4, 2, 8)
    with pytest.raises(ValueError, match="the layout has 4 tokens, q has 5"):
        packed_attention(q, k, v, layout_of([4]))
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        packed_attention(q[:, :3], k, v, layout_of([5]))
    with pytest.raises(ValueError, match="one floating point dtype"):
        packed_attention(q, k.double(), v.double(), layout_of([5]))
    with pytest.raises(ValueError, match="k like v"):
        packed_attention(q, k, v[:4], layout_of([5]))


def loss_inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    bounds = T([0, 5, 5, 1300, 1301])
    logps = (torch.randn(1301, generator=rng) * 0.3 - 1).to(dtype).requires_grad_()
    old, ref = ((logps.detach() + 0.3 * torch.randn(1301, generator=rng).to(dtype)) for _ in range(2))
    return logps, T([0.7, 1.0, -1.3, 2.0]).to(dtype), T([0.5, 1.0, 2.0, 0.25]).to(dtype), bounds, old, ref


CLIPS = [Clip(), Clip(0.1, 0.28, delta=1.3), Clip(beta=0.2), Clip(0.2, 0.2, 1.1, 0.05)]


def check_loss_path(path, clip, dtype, tolerance):
    logps, advantages, coefficients, bounds, old, ref = loss_inputs(dtype)
    options = {"old_logps": old, "ref_logps": ref, "clip": clip}
    ours = packed_policy_loss(logps, advantages, coefficients, bounds, path=path, **options)
    theirs = packed_policy_loss(logps, advantages, coefficients, bounds, path="torch", **options)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    weight = T([1.0, 2.0, -0.5, 3.0]).to(theirs.dtype)
    a, b = (torch.autograd.grad((x * weight).sum(), logps)[0] for x in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_cpu_path(clip, dtype, tolerance):
    check_loss_path("cpu", clip, dtype, tolerance)


@interpreted
@pytest.mark.parametrize("clip", CLIPS)
def test_loss_triton(clip):
    check_loss_path("triton", clip, torch.float32, 1e-4)


@interpreted
def test_loss_triton_bf16():
    check_loss_path("triton", CLIPS[3], torch.bfloat16, 2e-2)


def test_packed_loss_equals_padded_loss():
    """The weighted Dr.GRPO and GRPO losses of `dppo.losses`, from flat tokens."""
    rng = torch.Generator().manual_seed(3)
    lengths, width = [3, 0, 4, 1], 4
    mask = (torch.arange(width) < T(lengths)[:, None]).double()
    logps, old, ref = (torch.randn(4, width, generator=rng).double() for _ in range(3))
    advantages, weight = torch.randn(4, generator=rng).double(), T([1.0, 2.0, 0.5, 3.0]).double()
    bounds = T(np.concatenate([[0], np.cumsum(lengths)]))
    flat = [x[mask.bool()] for x in (logps, old, ref)]
    for name, share in (("dr_grpo", torch.ones(4).double()), ("grpo", 1 / T(lengths).clamp(min=1).double())):
        surrogate = Surrogate(name, beta=0.1, max_length=9)
        z = surrogate.normalizer(mask)
        padded = surrogate.loss(logps, advantages, mask, weight=weight, normalizer=z, old_logps=old, ref_logps=ref)
        packed = packed_policy_loss(
            flat[0], advantages, weight * share / z, bounds, old_logps=flat[1], ref_logps=flat[2], clip=Clip(beta=0.1)
        )
        assert packed.sum().item() == pytest.approx(padded.item(), rel=1e-12)


def test_loss_on_policy_empty_and_bad_input():
    logps = T([-1.0, -2.0]).requires_grad_()
    loss = packed_policy_loss(logps, T([2.0]), T([1.0]), T([0, 2]))
    assert loss.tolist() == [-4.0]
    assert torch.autograd.grad(loss.sum(), logps)[0].tolist() == [-2.0, -2.0]
    none = packed_policy_loss(torch.zeros(0, requires_grad=True), torch.zeros(0), torch.zeros(0), T([0]))
    assert none.sum() == 0
    none.sum().backward()
    with pytest.raises(ValueError, match="needs ref_logps"):
        packed_policy_loss(logps, T([2.0]), T([1.0]), T([0, 2]), clip=Clip(beta=0.1))
    with pytest.raises(ValueError, match="one entry for each of the 1 segments"):
        packed_policy_loss(logps, T([2.0, 1.0]), T([1.0]), T([0, 2]))
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 3"):
        packed_policy_loss(logps, T([2.0]), T([1.0]), T([0, 3]))


def test_kernels_compile_ahead_of_time_without_spills():
    """The two that need most registers (the whole list: python -m icml26_shared.aot dppo)."""
    aot = pytest.importorskip("icml26_shared.aot")
    pytest.importorskip("triton")
    chosen = [spec for spec in AOT_SPECS() if "dk, dv bf16 D=64" in spec.name or "with KL" in spec.name]
    reports = aot.compile(chosen, ("sm_90", "gfx942"))
    assert len(reports) == 2 * len(chosen) == 4
    for report in reports:
        assert report.error == "", report
        assert (report.spills, report.stack_bytes) == (0, 0), report


def test_scale_default_is_one_over_root_dim():
    layout = layout_of([4])
    q, k, v = inputs(4, 1, 1, 16)
    torch.testing.assert_close(
        packed_attention(q, k, v, layout), packed_attention(q, k, v, layout, scale=1 / math.sqrt(16))
    )
