"""Who may look at whom: one mask from a mask, a key mask and causality."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(n: int, m: int, device: torch.device) -> Tensor:
    """bool [n, m], True where query i may see key j: ``j <= i + m - n`` (the last query sees all keys)."""
    rows = torch.arange(n, device=device)[:, None] + (m - n)
    return torch.arange(m, device=device)[None, :] <= rows


def combine_masks(
    mask: Tensor | None, key_mask: Tensor | None, causal: bool, n: int, m: int, device: torch.device
) -> Tensor | None:
    """One mask, bool (True: may look) or additive, that broadcasts to [B, H, n, m]; None where all may look.

    Args:
        mask: bool or additive, four-dimensional.
        key_mask: bool [B, m], True for real keys.
        causal: hide later keys.
    """
    allowed = None
    if causal and n > 1:
        allowed = causal_mask(n, m, device)[None, None]
    if key_mask is not None:
        keys = key_mask[:, None, None, :]
        allowed = keys if allowed is None else allowed & keys
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, float("-inf"))
