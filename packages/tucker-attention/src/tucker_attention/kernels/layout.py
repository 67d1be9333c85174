"""Sizes that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WIDEST = 256  # of key and value latents, in a kernel
# Numbers of the output's core that a program holds at a time; beyond, heads are written and contracted outside.
_CORE = 2**14


@dataclass(frozen=True)
class Launch:
    """Tiles of the forward kernel, and whether it contracts to the output's rank itself."""

    blocks: dict[str, int]
    warps: int
    stages: int
    fused: bool


def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two from ``n``, at least ``least``."""
    return max(least, 1 << max(0, n - 1).bit_length())


def launch_for(r3: int, s3: int, s2: int, keys_turn: bool = False) -> Launch:
    """Tiles for these widths, smaller where keys are rotated on load; none spills on sm_80, sm_90 and gfx942."""
    wide = max(power_of_two(r3), power_of_two(s3))
    heads = 2 if wide <= 128 else 1
    blocks = {"BLOCK_H": heads, "BLOCK_Q": 16 if keys_turn or 64 < wide <= 128 else 32, "BLOCK_N": 32, "BLOCK_R": 32}
    fused = s2 > 0 and heads * power_of_two(s3) * power_of_two(s2) <= _CORE
    return Launch(blocks, 4 if wide <= 128 else 8, 1, fused)


def gradient_launch(r3: int, s3: int, of: Literal["queries", "keys"]) -> Launch:
    """Tiles of a gradient kernel for these widths."""
    wide = max(power_of_two(r3), power_of_two(s3))
    block = 32 if wide <= 128 else 16
    rows = 64 if wide <= 64 and of == "queries" else block
    return Launch({"BLOCK_M": rows, "BLOCK_N": block}, 4 if wide <= 128 else 8, 1, False)
