"""Operations on cached keys and values: every path against float64, golden values, faulty and odd input."""

from __future__ import annotations

import inspect
import math
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from jaxtyping import TypeCheckError, jaxtyped

from icml26_shared import aot
from icml26_shared.kernels import has_triton
from icml26_shared.memory import peak_memory
from manifoldkv import kernels
from manifoldkv.kernels import layout

INF = math.inf
INTERPRETED = [
    pytest.mark.triton_interpreter,
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
PATHS = ["torch", "cpu", pytest.param("triton", marks=INTERPRETED)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POINTS = torch.tensor([(3.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (-1.0, 0.5)])[None, None]


def draw(generator: random.Random, *shape: int, dtype=torch.float32) -> torch.Tensor:
    torch_generator = torch.Generator().manual_seed(generator.randrange(2**31))
    return torch.randn(shape, generator=torch_generator).to(dtype)


# -- the definition, in float64 and index by index --------------------------------------------------------------------


def exact(keys, mask, bounds, metric, n_sink, n_recent):
    """``(sums, unit sums, squared norms, counts, scores, steady)`` in float64, a head and a window at a time.

    ``steady`` is false at tokens whose cosine is ill-conditioned: their centroid cancels to nearly nothing.
    """
    batch, heads, length, dim = keys.shape
    keys = keys.double()
    valid = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    windows = len(bounds) - 1
    total, unit = torch.zeros(2, batch, heads, windows, dim, dtype=torch.float64)
    squares, count = torch.zeros(2, batch, heads, windows, dtype=torch.float64)
    scores = torch.full((batch, heads, length), -INF, dtype=torch.float64)
    steady = torch.ones(batch, heads, length, dtype=torch.bool)
    for b in range(batch):
        order = valid[b].nonzero()[:, 0].tolist()
        protected = {*order[:n_sink], *order[max(len(order) - n_recent, 0) :]}
        for h in range(heads):
            finite = valid[b] & keys[b, h].isfinite().all(-1)
            for w, (low, high) in enumerate(pairwise(bounds)):
                own = keys[b, h, low:high][finite[low:high]]
                total[b, h, w] = own.sum(0)
                norms = own.norm(dim=-1, keepdim=True)
                unit[b, h, w] = (own / norms.clamp(min=1e-12)).sum(0)
                squares[b, h, w] = norms.square().sum()
                count[b, h, w] = len(own)
                centre = (unit if metric == "cosine" else total)[b, h, w] / max(len(own), 1)
                if metric == "l2":
                    made = (own - centre).norm(dim=-1)
                else:
                    made = -(own @ centre) / (norms[:, 0].clamp(min=1e-8) * centre.norm().clamp(min=1e-8))
                    typical = 1.0 if metric == "cosine" or not len(own) else norms.mean()
                    steady[b, h, low:high] = bool(centre.norm() > 0.03 * typical)
                scores[b, h, low:high][finite[low:high]] = made
            for t in protected:
                scores[b, h, t] = INF if finite[t] else -INF
    return total, unit, squares, count, scores, steady


def odd_layout(generator: random.Random, keys: torch.Tensor) -> torch.Tensor:
    """The same keys in memory laid out some other way."""
    batch, heads, length, dim = keys.shape
    kind = generator.choice(["plain", "tokens first", "every other", "dim first", "offset"])
    if kind == "tokens first":
        return keys.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "every other":
        wide = torch.full((batch, heads, 2 * length, dim + 3), float("nan"), dtype=keys.dtype)
        wide[:, :, ::2, 1 : dim + 1] = keys
        return wide[:, :, ::2, 1 : dim + 1]
    if kind == "dim first":
        return keys.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    if kind == "offset":
        flat = torch.empty(keys.numel() + 1, dtype=keys.dtype)[1:].view(keys.shape)
        return flat.copy_(keys)
    return keys


def random_case(seed: int):
    """Keys, mask, bounds, protection and metric; the whole range of shapes, most of them small."""
    generator = random.Random(seed)
    dim = generator.choice([64, 80, 96, 128, 256, 1, 40, 72])
    length = generator.choice([1, 2, 3, 15, 17, 31, 63, 100, 129, 257]) if seed % 50 else 4999
    batch, heads = generator.choice([(1, 1), (1, 2), (2, 1), (2, 2)]) if seed % 50 else (1, 1)
    keys = draw(generator, batch, heads, length, dim, dtype=DTYPES[seed % 3])
    keys = keys + draw(generator, 1, heads, 1, dim, dtype=keys.dtype) * generator.choice([0, 1, 30])
    if generator.random() < 0.3:
        for value in (float("nan"), INF, -INF):
            keys[generator.randrange(batch), generator.randrange(heads), generator.randrange(length), -1] = value
    mask = None
    if generator.random() < 0.5:
        mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < generator.choice(
            [0.0, 0.5, 0.9]
        )
    window = max(length // 3, 1) if length > 17 else 2
    tumbling = [*range(0, length, window), length]
    uneven = [0, *generator.sample(range(1, length), min(2, length - 1)), length]
    bounds = generator.choice([[0, length], [0, length], tumbling, uneven])
    protection = generator.choice([(0, 0), (4, 32), (1, 0), (0, 3), (9, 9)])
    metric = generator.choice(["l2", "cosine", "cosine_mean"])
    return odd_layout(generator, keys), mask, sorted(set(bounds)), protection, metric


def tolerance(keys: torch.Tensor) -> float:
    """Rounding of float32 arithmetic on numbers of the keys' size."""
    finite = keys.double()[keys.isfinite()]
    return 4e-6 * (1 + float(finite.abs().max()) if finite.numel() else 1.0)


def check_case(seed: int, path: str) -> None:
    keys, mask, bounds, (n_sink, n_recent), metric = random_case(seed)
    total, unit, squares, count, scores, steady = exact(keys, mask, bounds, metric, n_sink, n_recent)
    atol = tolerance(keys)
    size = math.sqrt(keys.shape[3])

    width = count.clamp(min=1)[..., None]
    for is_unit in {metric == "cosine", (metric == "cosine") != (seed % 4 == 0)}:
        stats = kernels.key_stats(keys, mask, bounds, unit=is_unit, prefer=path)
        wanted, own_atol = (unit, 4e-6) if is_unit else (total, atol)
        torch.testing.assert_close(stats.total.double() / width, wanted / width, atol=own_atol, rtol=1e-5)
        torch.testing.assert_close(stats.squares.double(), squares, atol=atol, rtol=1e-5)
        torch.testing.assert_close(stats.count.double(), count, atol=0, rtol=0)
        if is_unit == (metric == "cosine"):
            centroid = stats.mean()

    score = kernels.l2_scores if metric == "l2" else kernels.cosine_scores
    made = score(keys, centroid, mask, bounds, n_sink=n_sink, n_recent=n_recent, prefer=path)
    assert made.dtype == torch.float32
    assert not bool(made.isnan().any())
    slack = atol * size if metric == "l2" else 1e-4
    torch.testing.assert_close(made.double()[steady], scores[steady], atol=slack, rtol=1e-5)
    assert torch.equal(made.isfinite(), scores.isfinite())
    if seed % 4 == 1:
        norms = kernels.key_norms(keys, prefer=path)
        torch.testing.assert_close(norms.double(), keys.double().norm(dim=-1), atol=atol, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", range(8))
def test_two_hundred_random_shapes(path, group):
    for seed in range(25 * group, 25 * group + 25):
        check_case(seed, path)


# -- golden values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_golden_statistics(path):
    stats = kernels.key_stats(POINTS, prefer=path)
    assert stats.total.flatten().tolist() == pytest.approx([5.0, 4.5])
    assert stats.mean().flatten().tolist() == pytest.approx([1.0, 0.9])
    assert stats.squares.item() == pytest.approx(9 + 1 + 2 + 8 + 1.25)
    assert stats.count.item() == 5
    anchor = kernels.centroids(POINTS, unit=True, prefer=path)
    assert anchor.flatten().tolist() == pytest.approx([0.3040, 0.5723], abs=5e-5)


@pytest.mark.parametrize("path", PATHS)
def test_golden_scores(path):
    l2 = kernels.l2_scores(POINTS, kernels.centroids(POINTS), prefer=path)
    assert l2.flatten().tolist() == pytest.approx([2.193171, 1.004988, 0.1, 1.486607, 2.039608], abs=1e-6)
    cosine = kernels.cosine_scores(POINTS, kernels.centroids(POINTS, unit=True), prefer=path)
    assert cosine.flatten().tolist() == pytest.approx([-0.4691, -0.8832, -0.9562, -0.9562, 0.0246], abs=5e-5)
    assert kernels.key_norms(POINTS, prefer=path).flatten().tolist() == pytest.approx([3, 1, 2**0.5, 8**0.5, 1.25**0.5])


@pytest.mark.parametrize("path", PATHS)
def test_golden_windows(path):
    keys = torch.cat((POINTS, POINTS + torch.tensor([10.0, 0.0])), dim=2)
    whole = kernels.l2_scores(keys, kernels.centroids(keys, prefer=path), prefer=path)
    expected = [3.1321, 6.0008, 5.0010, 4.1485, 7.0114, 7.0576, 4.0012, 5.0010, 6.1000, 3.0265]
    assert whole.flatten().tolist() == pytest.approx(expected, abs=5e-5)
    bounds = [0, 5, 10]
    centroid = kernels.centroids(keys, bounds=bounds, prefer=path)
    halves = kernels.l2_scores(keys, centroid, bounds=bounds, prefer=path).flatten().tolist()
    first = [2.193171, 1.004988, 0.1, 1.486607, 2.039608]
    assert halves == pytest.approx([*first, *first], abs=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_far_centroids_cost_no_precision(path):
    """Keys of spread 1 around a centroid of norm 1e3 rank as in float64, which ``k^2 - 2 k mu + mu^2`` gets wrong."""
    generator = random.Random(0)
    keys = draw(generator, 1, 2, 600, 64) + 1e3 / 8
    double = keys.double()
    expected = (double - double.mean(2, keepdim=True)).norm(dim=-1)
    made = kernels.l2_scores(keys, kernels.centroids(keys, prefer=path), prefer=path)
    assert (made.double() - expected).abs().max() < 1e-4
    top = [scores.topk(150).indices.sort().values for scores in (made.double(), expected)]
    assert torch.equal(*top)
    mean = keys.mean(2, keepdim=True)
    expanded = keys.square().sum(-1) - 2 * (keys * mean).sum(-1) + mean.square().sum(-1)
    assert (expanded.clamp(min=0).sqrt().double() - expected).abs().max() > 1e-2


# -- invariants of one path -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_one_window_is_bit_identical_to_none(path):
    keys = draw(random.Random(1), 1, 2, 300, 64, dtype=torch.bfloat16)
    for unit, score in ((False, kernels.l2_scores), (True, kernels.cosine_scores)):
        one, none = (kernels.centroids(keys, bounds=b, unit=unit, prefer=path) for b in ([0, 300], None))
        assert torch.equal(one, none)
        assert torch.equal(score(keys, one, bounds=[0, 300], prefer=path), score(keys, none, prefer=path))


@pytest.mark.parametrize("path", PATHS)
def test_padding_changes_nothing(path):
    keys = draw(random.Random(2), 2, 2, 50, 40)
    keys[0, :, :13] = float("nan")  # what lies in padding must not matter
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, :13] = False
    centroid = kernels.centroids(keys, mask, prefer=path)
    alone = kernels.centroids(keys[:1, :, 13:], prefer=path)
    torch.testing.assert_close(centroid[:1], alone, atol=1e-6, rtol=1e-6)
    scores = kernels.l2_scores(keys, centroid, mask, n_sink=2, n_recent=3, prefer=path)
    expected = kernels.l2_scores(keys[:1, :, 13:], alone, n_sink=2, n_recent=3, prefer=path)
    assert bool((scores[0, :, :13] == -INF).all())
    torch.testing.assert_close(scores[:1, :, 13:], expected, atol=1e-5, rtol=1e-5)
    assert bool((scores[0, :, [13, 14, 47, 48, 49]] == INF).all())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("masked", [False, True])
def test_protection_of_short_rows(path, masked):
    keys = draw(random.Random(3), 2, 1, 6, 8)
    mask = torch.ones(2, 6, dtype=torch.bool) if masked else None
    if masked:
        mask[1] = torch.tensor([0, 0, 0, 0, 1, 0])
    scores = kernels.l2_scores(keys, kernels.centroids(keys), mask, n_sink=4, n_recent=32, prefer=path)
    assert scores[0].tolist() == [[INF] * 6]
    assert scores[1].tolist() == ([[-INF] * 4 + [INF, -INF]] if masked else [[INF] * 6])


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_valid_tokens(path):
    keys = draw(random.Random(4), 2, 2, 9, 16)
    mask = torch.tensor([[False] * 9, [True] * 9])
    stats = kernels.key_stats(keys, mask, prefer=path)
    assert stats.count.tolist() == [[[0.0], [0.0]], [[9.0], [9.0]]]
    assert stats.mean()[0].abs().max() == 0
    scores = kernels.l2_scores(keys, stats.mean(), mask, n_sink=4, n_recent=4, prefer=path)
    assert bool((scores[0] == -INF).all())


@pytest.mark.parametrize("path", PATHS)
def test_faulty_keys_score_last_and_leave_the_centroid_alone(path):
    keys = draw(random.Random(5), 1, 2, 40, 24)
    keys[0, 0, 3, 5], keys[0, 0, 7, 0], keys[0, 1] = float("nan"), INF, float("nan")
    clean = [t for t in range(40) if t not in (3, 7)]
    centroid = kernels.centroids(keys, prefer=path)
    torch.testing.assert_close(centroid[0, 0, 0], keys[0, 0, clean].mean(0), atol=1e-6, rtol=1e-5)
    for score in (kernels.l2_scores, kernels.cosine_scores):
        scores = score(keys, centroid, n_sink=4, n_recent=0, prefer=path)
        assert scores[0, 0, [3, 7]].tolist() == [-INF, -INF]
        assert bool((scores[0, 0, :3] == INF).all())
        assert bool(scores[0, 0, clean[3:]].isfinite().all())
        assert bool((scores[0, 1] == -INF).all())


@pytest.mark.parametrize("path", PATHS)
def test_keys_too_large_for_float32_squares_score_last(path):
    keys = draw(random.Random(6), 1, 1, 8, 4)
    centroid = kernels.centroids(keys)
    keys[0, 0, 2] = 3e30
    for score in (kernels.l2_scores, kernels.cosine_scores):
        scores = score(keys, centroid, prefer=path)
        assert scores[0, 0].isfinite().tolist() == [t != 2 for t in range(8)]
        assert scores[0, 0, 2] == -INF


@pytest.mark.parametrize("path", PATHS)
def test_equal_keys_score_zero_and_zero_keys_are_orthogonal(path):
    keys = torch.full((1, 1, 33, 8), 0.5)
    assert kernels.l2_scores(keys, kernels.centroids(keys, prefer=path), prefer=path).abs().max() == 0
    zeros = torch.zeros(1, 1, 5, 8)
    anchor = kernels.centroids(zeros, unit=True, prefer=path)
    assert anchor.abs().max() == 0
    assert kernels.cosine_scores(zeros, anchor, prefer=path).abs().max() == 0
    assert kernels.cosine_scores(zeros, torch.ones(1, 1, 1, 8), prefer=path).abs().max() == 0


@pytest.mark.parametrize("path", PATHS)
def test_expanded_keys(path):
    keys = draw(random.Random(7), 1, 1, 70, 40).expand(3, 2, 70, 40)
    stats = kernels.key_stats(keys, prefer=path)
    torch.testing.assert_close(stats.total[:, :, 0], keys.sum(2), atol=1e-4, rtol=1e-5)
    scores = kernels.l2_scores(keys, stats.mean(), prefer=path)
    assert all(torch.equal(scores[0, 0], scores[b, h]) for b in range(3) for h in range(2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (1, 1, 5, 0)])
def test_empty_input(path, shape):
    keys = torch.zeros(shape)
    stats = kernels.key_stats(keys, prefer=path)
    assert stats.total.shape == (*shape[:2], 1, shape[3])
    assert stats.squares.shape == stats.count.shape == (*shape[:2], 1)
    assert kernels.l2_scores(keys, stats.mean(), prefer=path).shape == shape[:3]
    assert kernels.key_norms(keys, prefer=path).shape == shape[:3]


@pytest.mark.parametrize("path", ["torch", "cpu"])
def test_float64_keys_are_computed_in_float64(path):
    keys = draw(random.Random(8), 1, 2, 100, 16).double() + 1e9
    centroid = kernels.centroids(keys, prefer=path)
    assert centroid.dtype == torch.float64
    expected = (keys - keys.mean(2, keepdim=True)).norm(dim=-1)
    made = kernels.l2_scores(keys, centroid, prefer=path)
    torch.testing.assert_close(made.double(), expected, atol=1e-5, rtol=1e-5)


def test_nothing_is_recorded_for_gradients():
    keys = draw(random.Random(9), 1, 1, 6, 4).requires_grad_()
    scores = kernels.l2_scores(keys, kernels.centroids(keys))
    kept, _ = kernels.gather_kv(keys, keys, torch.tensor([[[0, 3]]]))
    assert not scores.requires_grad
    assert not kept.requires_grad


# -- the CPU path's tiles and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 700, 8), (64, 2, 3, 16), (2, 9, 1300, 64), (1, 1, 9000, 128), (2, 3, 40, 1)])
@pytest.mark.parametrize("window", [None, 2, 50, 600])
def test_tiles_cover_all_keys_once_and_respect_windows(shape, window, monkeypatch):
    monkeypatch.setattr(layout, "_TILE_ELEMENTS", 2000)
    monkeypatch.setattr(layout, "_LEAST_TOKENS", 16)
    length = shape[2]
    bounds = (0, length) if window is None or window >= length else (*range(0, length, window), length)
    seen = torch.zeros(shape[:3], dtype=torch.int64)
    for tile in layout.cut(torch.empty(shape), bounds):
        part = tile.of_keys(torch.empty(shape))
        assert part.numel() <= max(2000, shape[3])
        seen[tile.rows, tile.heads, tile.tokens] += 1
        starts, width = bounds[tile.windows.start], part.shape[3]
        if tile.count > 1:
            assert all(
                bounds[w] == starts + i * width for i, w in enumerate(range(tile.windows.start, tile.windows.stop + 1))
            )
            assert (tile.tokens.start, tile.tokens.stop) == (starts, bounds[tile.windows.stop])
        else:
            assert starts <= tile.tokens.start < tile.tokens.stop <= bounds[tile.windows.stop]
    assert bool((seen == 1).all())


@pytest.mark.parametrize("unit", [False, True])
def test_results_do_not_depend_on_the_tile(unit, monkeypatch):
    keys = draw(random.Random(10), 2, 3, 500, 24)
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)) < 0.8
    keys[1, 2, 77, 3] = float("nan")
    bounds = [0, 100, 200, 300, 500]
    score = kernels.cosine_scores if unit else kernels.l2_scores
    results = []
    for size in (300, 5000, 1 << 20):
        monkeypatch.setattr(layout, "_TILE_ELEMENTS", size)
        centroid = kernels.centroids(keys, mask, bounds, unit=unit)
        results.append((centroid, score(keys, centroid, mask, bounds)))
    for centroid, scores in results[1:]:
        torch.testing.assert_close(centroid, results[0][0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(scores, results[0][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 16384), (torch.bfloat16, 32768)])
def test_extra_memory_stays_small(dtype, length):
    keys = torch.zeros(1, 8, length, 128, dtype=dtype)
    keys[..., 0] = torch.arange(length).to(dtype)
    values, indices = torch.zeros(1, 8, length, 64, dtype=dtype), torch.arange(0, length, 2).expand(1, 8, -1)

    def compress() -> None:
        for unit, score in ((False, kernels.l2_scores), (True, kernels.cosine_scores)):
            score(keys, kernels.centroids(keys, unit=unit))

    def compact() -> None:
        kernels.gather_kv(keys, values, indices, in_place=True)

    a_tenth = keys.numel() * keys.element_size() // 10
    assert peak_memory(compress).torch_bytes < a_tenth
    assert peak_memory(compact).torch_bytes < a_tenth


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_keys_masks_and_bounds():
    keys = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"\[batch, heads, tokens, dim\], not \(2, 8, 4\)"):
        kernels.key_stats(keys[0])
    with pytest.raises(TypeError, match=r"keys of dtype torch\.int32 are not supported; convert them"):
        kernels.centroids(keys.int())
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        kernels.key_norms(keys.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"mask has shape \(1, 7\); it must be \[batch, tokens\] = \(1, 8\)"):
        kernels.key_stats(keys, torch.ones(1, 7, dtype=torch.bool))
    for bounds in ([0, 4], [1, 8], [0, 4, 4, 8], [0, 5, 3, 8], [8], []):
        with pytest.raises(ValueError, match="ascending from 0 to 8"):
            kernels.key_stats(keys, bounds=bounds)
    with pytest.raises(ValueError, match=r"centroid has shape \(1, 2, 1, 4\).*= \(1, 2, 2, 4\)"):
        kernels.l2_scores(keys, torch.zeros(1, 2, 1, 4), bounds=[0, 4, 8])
    with pytest.raises(ValueError, match=r"anchor has shape \(2, 4\)"):
        kernels.cosine_scores(keys, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="n_sink=-1"):
        kernels.l2_scores(keys, torch.zeros(1, 2, 1, 4), n_sink=-1)


def test_float64_keys_have_no_triton_kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TypeError, match="float64 keys have no Triton kernel"):
        kernels.key_stats(torch.zeros(1, 1, 2, 2, dtype=torch.float64), prefer="triton")


def test_annotated_shapes_hold():
    """The shape annotations of the public functions, checked as the other modules' are (the hook skips kernels)."""
    from beartype import beartype

    keys, mask = draw(random.Random(11), 2, 3, 20, 8), torch.ones(2, 20, dtype=torch.bool)
    bare = {name: inspect.unwrap(getattr(kernels, name)) for name in kernels.__all__[2:]}
    checked = {name: jaxtyped(function, typechecker=beartype) for name, function in bare.items()}
    centroid = checked["centroids"](keys, mask, [0, 8, 20])
    assert checked["l2_scores"](keys, centroid, mask, [0, 8, 20]).shape == (2, 3, 20)
    assert checked["cosine_scores"](keys, centroid, mask, [0, 8, 20]).shape == (2, 3, 20)
    assert checked["key_norms"](keys).shape == (2, 3, 20)
    kept, _ = checked["gather_kv"](keys, keys[..., :5], torch.arange(4).expand(2, 3, 4))
    assert kept.shape == (2, 3, 4, 8)
    with pytest.raises(TypeCheckError):
        checked["l2_scores"](keys, centroid, mask[:, :3], [0, 8, 20])


# -- ahead of time ----------------------------------------------------------------------------------------------------


def test_kernels_compile_without_spills():
    pytest.importorskip("triton")
    reports = aot.compile("manifoldkv")
    assert {report.target for report in reports} == {"sm_80", "sm_90", "gfx942"}
    assert {report.name.split()[0] for report in reports} == {"key_stats", "scores", "gather"}
    for report in reports:
        assert report.error == "", report
        assert report.spills == 0, report
        assert report.stack_bytes == 0, report


def test_without_triton_the_other_paths_work():
    code = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == "triton" else find(name, *a)
import torch
from manifoldkv import kernels
keys = torch.arange(8.0).view(1, 1, 4, 2)
print([round(score, 4) for score in kernels.l2_scores(keys, kernels.centroids(keys)).flatten().tolist()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[4.2426,", "1.4142,", "1.4142,", "4.2426]"]
