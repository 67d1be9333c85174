"""Compaction of contiguous and paged caches: every path against indexing one by one, safety in place, bad input."""

from __future__ import annotations

import random

import pytest
import torch

from icml26_shared.kernels import has_triton
from manifoldkv import kernels

INTERPRETED = [
    pytest.mark.triton_interpreter,
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
PATHS = ["torch", "cpu", pytest.param("triton", marks=INTERPRETED)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(generator: random.Random, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """Random entries in memory laid out in one of three ways."""
    made = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(generator.randrange(2**31)))).to(dtype)
    kind = generator.choice(["plain", "swapped", "strided"])
    if kind == "swapped":
        return made.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "strided":
        wide = torch.zeros(*shape[:2], 2 * shape[2], shape[3] + 3, dtype=dtype)
        wide[:, :, ::2, 1:-2] = made
        return wide[:, :, ::2, 1:-2]
    return made


def ascending(generator: random.Random, batch: int, heads: int, length: int, kept: int) -> torch.Tensor:
    rows = [sorted(generator.sample(range(length), kept)) for _ in range(batch * heads)]
    return torch.tensor(rows, dtype=torch.int64).view(batch, heads, kept)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_gather_equals_indexing(path, in_place):
    for seed in range(20):
        generator = random.Random(seed)
        batch, heads = generator.choice([(1, 1), (2, 3), (1, 4)])
        length = generator.choice([1, 2, 17, 65, 130, 300])
        kept = generator.choice([0, 1, length // 2, length])
        dtype = generator.choice([*DTYPES, torch.float64, torch.int8])
        dims = generator.choice([(64, 64), (80, 80), (1, 40), (256, 128), (72, 96)])
        keys, values = (draw(generator, batch, heads, length, dim, dtype=dtype) for dim in dims)
        indices = ascending(generator, batch, heads, length, kept)
        expected = [
            torch.stack([torch.stack([x[b, h][indices[b, h]] for h in range(heads)]) for b in range(batch)])
            for x in (keys, values)
        ]
        before = (keys.clone(), values.clone())
        made = kernels.gather_kv(keys, values, indices, in_place=in_place, prefer=path)
        for new, wanted, source, old in zip(made, expected, (keys, values), before, strict=True):
            assert torch.equal(new, wanted)
            if in_place:
                assert new.data_ptr() == source.data_ptr() or new.numel() == 0
                assert new.stride() == source[:, :, :kept].stride()
            else:
                assert torch.equal(source, old)
                assert new.is_contiguous()


@pytest.mark.parametrize("path", ["torch", "cpu"])
def test_long_in_place_moves_overlap_safely(path, monkeypatch):
    monkeypatch.setattr("manifoldkv.kernels.gather._MOVE_BYTES", 4 * 7 * 8)
    keys = torch.arange(1000.0).view(1, 1, 1000, 1).expand(1, 2, 1000, 8).contiguous()
    indices = torch.cat((torch.arange(5), torch.arange(6, 1000))).expand(
        1, 2, -1
    )  # all but one: every row moves by one
    made, _ = kernels.gather_kv(keys, keys.clone(), indices, in_place=True, prefer=path)
    assert torch.equal(made[0, 0, :, 0], indices[0, 0].float())
    assert torch.equal(made[0, 1, :, 7], indices[0, 0].float())


def paged_case(seed: int):
    generator = random.Random(seed)
    rows, heads, size = generator.choice([(1, 1, 4), (3, 2, 16), (2, 3, 8)])
    blocks_per_row = generator.choice([1, 3, 7])
    start = generator.choice([0, 0, size // 2])
    dims = generator.choice([(64, 64), (40, 72), (128, 80)])
    blocks = list(range(rows * blocks_per_row + 3))
    generator.shuffle(blocks)
    table = torch.tensor(blocks[: rows * blocks_per_row], dtype=torch.int32).view(rows, blocks_per_row)
    caches = [draw(generator, len(blocks), size, heads, d, dtype=generator.choice(DTYPES)) for d in dims]
    capacity = blocks_per_row * size
    kept = generator.randrange(capacity - start) + 1 if capacity > start else 0
    indices = start + ascending(generator, rows, heads, capacity - start, kept)
    lengths = torch.tensor([generator.randrange(kept + 1) for _ in range(rows)], dtype=torch.int32)
    if generator.random() < 0.3:
        lengths = None
    else:
        for row in range(rows):
            indices[row, :, int(lengths[row]) :] = -1
    return caches, table, indices, lengths, start


@pytest.mark.parametrize("path", PATHS)
def test_paged_gather_equals_moving_tokens_one_by_one(path):
    for seed in range(16):
        caches, table, indices, lengths, start = paged_case(seed)
        expected = [cache.clone() for cache in caches]
        size = caches[0].shape[1]
        for cache, source in zip(expected, caches, strict=True):
            for row in range(indices.shape[0]):
                for head in range(indices.shape[1]):
                    for j in range(indices.shape[2] if lengths is None else int(lengths[row])):
                        old, new = int(indices[row, head, j]), start + j
                        moved = source[int(table[row, old // size]), old % size, head]
                        cache[int(table[row, new // size]), new % size, head] = moved
        kernels.gather_kv_paged(*caches, table, indices, lengths, start=start, prefer=path)
        for made, wanted in zip(caches, expected, strict=True):
            assert torch.equal(made, wanted)


def test_bad_indices():
    keys = torch.zeros(1, 1, 8, 4)
    for wrong in ([3, 2], [2, 2], [-1, 2], [0, 8]):
        with pytest.raises(ValueError, match="indices must ascend in each head, from at least 0 to at most 7"):
            kernels.gather_kv(keys, keys, torch.tensor([[wrong]]))
    with pytest.raises(ValueError, match="must agree in batch and heads"):
        kernels.gather_kv(keys, torch.zeros(1, 1, 7, 4), torch.tensor([[[0]]]))
    with pytest.raises(ValueError, match="must have 3 dimensions"):
        kernels.gather_kv(keys, keys, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must be int64, not torch\.int32"):
        kernels.gather_kv(keys, keys, torch.tensor([[[0]]], dtype=torch.int32))
    with pytest.raises(ValueError, match="9 indices for 8 tokens"):
        kernels.gather_kv(keys, keys, torch.zeros(1, 1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="values are an expanded view"):
        kernels.gather_kv(keys, torch.zeros(1, 1, 8, 1).expand(1, 1, 8, 4), torch.tensor([[[0]]]), in_place=True)


def test_bad_paged_input():
    cache = torch.zeros(4, 2, 1, 4)
    table = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="at least start=1 and stay below the 4 tokens"):
        kernels.gather_kv_paged(cache, cache.clone(), table, torch.tensor([[[0, 1]]]), start=1)
    with pytest.raises(ValueError, match="stay below the 4 tokens"):
        kernels.gather_kv_paged(cache, cache.clone(), table, torch.tensor([[[0, 4]]]))
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 2\]"):
        kernels.gather_kv_paged(cache, cache.clone(), table, torch.tensor([[[0, 1]]]), torch.tensor([3]))
    with pytest.raises(ValueError, match="must agree in blocks, block size, heads and rows"):
        kernels.gather_kv_paged(cache, cache.clone(), table, torch.zeros(1, 2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="caches must have 4 dimensions"):
        kernels.gather_kv_paged(cache[0], cache, table, torch.tensor([[[0]]]))
