"""Counter-based random numbers: one uniform for each (seed, step, sample id), the same on any device.

There is no state to advance, so a mask does not depend on the order of a batch, on the number of processes, or on
whether the run was interrupted. The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), in wrapping
64-bit integer arithmetic, which torch does alike on every device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 1 << 64


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= _WORD
    return value - _WORD if value >= _WORD >> 1 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """SplitMix64's finaliser: a bijection of 64-bit words whose output bits look independent of the input's."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def combine(a: Int64[Tensor, "*shape"] | int, b: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """One id out of two: mix64(mix64(a) + b)."""
    first = mix64(torch.tensor(_signed(a), device=b.device)) if isinstance(a, int) else mix64(a)
    return mix64(first + b)


@dataclass(frozen=True)
class MaskGenerator:
    """The source of all random numbers of one step.

    Args:
        seed: of the run.
        step: counter of the draw; any integer that differs between steps (the trainer's generation step).
        stream: separates uses within a step ("completions", "prompts", ...) so that they are independent.
    """

    seed: int
    step: int = 0
    stream: str = "completions"

    def at(self, step: int) -> MaskGenerator:
        """The same generator at another step."""
        return replace(self, step=step)

    def of(self, stream: str) -> MaskGenerator:
        """An independent generator of the same seed and step."""
        return replace(self, stream=stream)

    def key(self) -> int:
        """64 bits out of (seed, step, stream)."""
        text = f"{self.seed}/{self.step}/{self.stream}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

    def uniform(self, ids: Int64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        """One number in [0, 1) for each id, on a grid of 2⁻⁵³; equal ids give equal numbers."""
        return _shift_right(combine(self.key(), ids), 11).to(torch.float64) * 2.0**-53


def as_generator(generator: MaskGenerator | torch.Generator | int) -> MaskGenerator:
    """Accepts a MaskGenerator, a seed, or a torch.Generator (from which one seed is drawn, so it advances).

    Raises:
        TypeError: anything else.
    """
    if isinstance(generator, MaskGenerator):
        return generator
    if isinstance(generator, torch.Generator):
        seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
        return MaskGenerator(int(seed))
    if isinstance(generator, int) and not isinstance(generator, bool):
        return MaskGenerator(generator)
    raise TypeError(f"generator={generator!r}: a MaskGenerator, a torch.Generator or an integer seed is needed")


def occurrences(ids: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
    """How many equal ids stand before each position: 0 for the first of its kind."""
    order = torch.argsort(ids, stable=True)
    ordered = ids[order]
    position = torch.arange(len(ids), device=ids.device)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = torch.cummax(torch.where(is_first, position, 0), 0).values
    result = torch.empty_like(ids)
    result[order] = position - first
    return result
