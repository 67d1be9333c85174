"""Ternary codes at two bits: four to a byte, element i in bits 2 (i % 4) of byte i // 4, as ``T + 1`` in {0, 1, 2}."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Int8, UInt8
from torch import Tensor

INVALID = 3


def pack_ternary(codes: Int8[Tensor, "out n"]) -> UInt8[Tensor, "out bytes"]:
    """Pack T in {-1, 0, 1}, [out, n], into uint8 [out, ceil(n / 4)]; the tail is filled with code 1, a zero weight.

    Raises:
        ValueError: values other than -1, 0, 1.
    """
    if codes.numel() and (int(codes.min()) < -1 or int(codes.max()) > 1):
        raise ValueError(f"ternary codes are -1, 0 or 1, got {int(codes.min())} to {int(codes.max())}")
    shifted = torch.nn.functional.pad((codes + 1).to(torch.uint8), (0, -codes.shape[1] % 4), value=1)
    four = shifted.reshape(codes.shape[0], -1, 4)
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def unpack_ternary(packed: UInt8[Tensor, "out bytes"], n: int) -> Int8[Tensor, "out n"]:
    """T int8 [out, n] of :func:`pack_ternary`, through a table of 256 words: one lookup gives four weights."""
    words = _table(packed.device)[packed.to(torch.int32)]
    return words.view(torch.int8).reshape(packed.shape[0], -1)[:, :n]


def has_invalid(packed: Tensor) -> bool:
    """Whether some code is 3, which means nothing."""
    return bool((packed & (packed >> 1) & 0x55).any())


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """int32 [256]: the four weights of a byte as four int8."""
    # The device is named throughout: hosts make models with "meta" as torch's default device.
    byte = torch.arange(256, dtype=torch.int32, device="cpu")[:, None]
    four = ((byte >> torch.tensor([0, 2, 4, 6], dtype=torch.int32, device="cpu")) & 3) - 1
    return four.to(torch.int8).contiguous().view(torch.int32).reshape(256).to(device)
