"""Where a key or a value lies inside a block of the paged cache, found out by writing through vLLM's own operation.

The CPU backend doesn't store blocks row by row (keys are transposed, and with AMX both keys and values are permuted);
other backends have layouts of their own. So nothing is assumed: known numbers are written through the operation that
vLLM writes with, read back raw, and the permutation this shows is verified on random data before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WriteOp = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # key [T,H,D], value [T,H,Dv], cache [N,H,b,D+Dv], slots [T]
_DIGIT = 128  # every number below it is exact in bfloat16, float16 and float32


class LayoutError(RuntimeError):
    """The cache isn't a permutation of the keys and values written into it."""


@dataclass(frozen=True)
class BlockLayout:
    """Permutation between a raw block and its keys ``[H, b, D]`` and values ``[H, b, Dv]``.

    Attributes:
        position: int64; element ``i`` of keys then values, both flattened, lies at ``position[i]`` of the flat block.
        inverse: int64; its inverse.
        heads, block, dim: shape of a block's keys; the values have the rest of the block.
    """

    position: Tensor
    inverse: Tensor
    heads: int
    block: int
    dim: int

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[R, H, n b, D]`` and values ``[R, H, n b, Dv]`` of the blocks ``[R, n]`` of ``cache``, as copies."""
        rows, count = blocks.shape
        flat = cache[blocks.reshape(-1)].reshape(rows * count, -1)[:, self.position]
        split = self.heads * self.block * self.dim
        return self._tokens(flat[:, :split], rows, count), self._tokens(flat[:, split:], rows, count)

    def write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, shaped as :meth:`read` returns them, into the blocks ``[R, n]``: all or nothing."""
        flat = torch.cat([self._flat(keys, blocks), self._flat(values, blocks)], dim=1)
        cache[blocks.reshape(-1)] = flat[:, self.inverse].reshape(-1, *cache.shape[1:])

    def _tokens(self, flat: Tensor, rows: int, count: int) -> Tensor:
        parts = flat.reshape(rows, count, self.heads, self.block, -1)
        return parts.transpose(1, 2).reshape(rows, self.heads, count * self.block, -1)

    def _flat(self, tokens: Tensor, blocks: Tensor) -> Tensor:
        rows, count = blocks.shape
        parts = tokens.reshape(rows, self.heads, count, self.block, -1).transpose(1, 2)
        return parts.reshape(rows * count, -1)


def derive(write: WriteOp, cache: Tensor, dim: int) -> BlockLayout:
    """Find and verify the layout of caches shaped and strided like ``cache``.

    Args:
        write: vLLM's own operation.
        cache: ``[blocks, H, b, D + Dv]``; only its shape, strides, dtype and device are used, never its contents.
        dim: ``D``, the size of a key.

    Raises:
        LayoutError: what was written doesn't come back as a permutation, or random data doesn't survive the round trip.
    """
    _, heads, block, cell = cache.shape
    scratch = _scratch(cache)
    numbers = torch.arange(heads * block * cell, device=cache.device)
    found = torch.zeros_like(numbers)
    present = torch.zeros_like(numbers)
    place = 1
    while place <= numbers.numel():
        digits = (numbers // place) % _DIGIT + 1  # + 1: a place nobody writes to stays 0 and shows
        raw = _written(write, scratch, digits.to(cache.dtype), heads, block, dim).round().to(torch.int64)
        present += raw <= 0
        found += (raw - 1).clamp(min=0) * place
        place *= _DIGIT
    if bool(present.any()) or not torch.equal(found.sort().values, numbers):
        shape = f"{heads} heads, {block} tokens and {cell} numbers each"
        raise LayoutError(f"a block of {shape} is not a permutation of what was written into it")
    layout = BlockLayout(position=found.argsort(), inverse=found, heads=heads, block=block, dim=dim)
    _verify(write, scratch, layout, cell - dim)
    return layout


def _scratch(cache: Tensor) -> Tensor:
    """Three empty blocks with the strides of ``cache``."""
    scratch = torch.empty_strided((3, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    return scratch.zero_()


def _written(write: WriteOp, scratch: Tensor, numbers: Tensor, heads: int, block: int, dim: int) -> Tensor:
    """Raw block 1 after ``numbers`` (keys ``[H, b, D]`` then values ``[H, b, Dv]``) were written into it."""
    scratch.zero_()
    split = heads * block * dim
    key = numbers[:split].view(heads, block, dim).transpose(0, 1).contiguous()
    value = numbers[split:].view(heads, block, -1).transpose(0, 1).contiguous()
    slots = torch.arange(block, 2 * block, dtype=torch.int64, device=scratch.device)
    write(key, value, scratch, slots)
    return scratch[1].reshape(-1).float()


def _verify(write: WriteOp, scratch: Tensor, layout: BlockLayout, value_dim: int) -> None:
    """Random tokens in scrambled order over two blocks: read back, moved through the layout, and read again."""
    heads, block, dim = layout.heads, layout.block, layout.dim
    generator = torch.Generator().manual_seed(0)
    slots = (torch.randperm(2 * block, generator=generator) + block).to(scratch.device)
    key, value = (torch.randn(2 * block, heads, size, generator=generator).to(scratch) for size in (dim, value_dim))
    scratch.zero_()
    write(key, value, scratch, slots)
    order = slots.argsort()
    expected = [tokens[order].transpose(0, 1)[None] for tokens in (key, value)]
    blocks = torch.tensor([[1, 2]], device=scratch.device)
    raw = scratch.clone()
    back = layout.read(scratch, blocks)
    if not all(torch.equal(a, b) for a, b in zip(back, expected, strict=True)) or bool(scratch[0].any()):
        raise LayoutError("random keys and values don't come back as they were written")
    scratch[1:] = 0
    layout.write(scratch, blocks, *back)
    if not torch.equal(scratch, raw):
        raise LayoutError("writing keys and values back doesn't restore the blocks")
