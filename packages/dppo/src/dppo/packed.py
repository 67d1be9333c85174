"""Kept sequences as packed rows, ready for one forward pass: tokens, positions, what to predict where.

With shared prompts a prompt is stored once for its completions. A causal model's states of the prompt do not depend on
what follows, so this is exact: the last prompt token predicts the first token of each completion, every other
completion token is predicted by the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dppo.kernels.layout import PackedLayout
from dppo.packing import Overflow, Packing, pack_window


@dataclass(frozen=True)
class PackedRow:
    """One row of a packing.

    Attributes:
        input_ids, position_ids: (1, T).
        layout: segments and prefixes, for attention.
        predict: (N,) positions whose output predicts a completion token; a shared prompt's last position repeats.
        target: (N,) the tokens predicted.
        items: the items of the row; counts: (len(items),) completion tokens of each, in the order of `predict`.
    """

    input_ids: Int64[Tensor, "1 tokens"]
    position_ids: Int64[Tensor, "1 tokens"]
    layout: PackedLayout
    predict: Int64[Tensor, " targets"]
    target: Int64[Tensor, " targets"]
    items: list[int]
    counts: list[int]


def pack_sequences(
    prompts: Sequence[Int64[Tensor, " prompt"]],
    completions: Sequence[Int64[Tensor, " completion"]],
    *,
    capacity: int | None = None,
    window: int = 64,
    share_prompts: bool = True,
    overflow: Overflow = "own_row",
) -> tuple[Packing, list[PackedRow]]:
    """Packs prompt-completion pairs.

    Args:
        prompts: token ids of each pair's prompt, at least one token each; equal prompts are shared.
        completions: token ids of each pair's completion; may be empty.
        capacity: tokens a row; default: everything in one row.
        window: look-ahead of `pack_window`.
        share_prompts: store equal prompts once a row.
        overflow: see `pack_window`.

    Returns:
        The packing and its rows, on the device of the sequences.

    Raises:
        ValueError: an empty prompt, or unequal numbers of prompts and completions.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; one of each is needed")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; its first completion token would have nothing to be predicted from")
    keys = [tuple(p.tolist()) for p in prompts] if share_prompts else [(i,) for i in range(len(prompts))]
    prompt_sizes = [len(p) for p in prompts]
    sizes = [len(c) for c in completions]
    if capacity is None:
        capacity = max(sum(sizes) + sum(prompt_sizes), 1)
    packing = pack_window(sizes, capacity, window, prefix_ids=keys, prefix_lengths=prompt_sizes, overflow=overflow)
    by_key = dict(zip(keys, prompts, strict=True))
    bounds = np.searchsorted([s.row for s in packing.segments], np.arange(len(packing.rows) + 1)).tolist()
    return packing, [_row(packing, *ends, by_key, completions) for ends in pairwise(bounds)]


def _row(packing: Packing, first: int, end: int, prompts: dict, completions: Sequence[Tensor]) -> PackedRow:
    """The row of the segments first .. end−1, renumbered from 0."""
    segments = packing.segments[first:end]
    pieces, positions, predict, target, items, counts = [], [], [], [], [], []
    prefix_start, prefix_length, at = [], [], 0
    for s in segments:
        owner = segments[s.prefix - first] if s.prefix >= 0 else None
        before = owner.length if owner else 0
        prefix_start.append(owner.start if owner else 0)
        prefix_length.append(before)
        piece = completions[s.item][: s.length] if owner else prompts[s.group]
        pieces.append(piece)
        positions.append(torch.arange(before, before + s.length))
        if owner:
            items.append(s.item)
            counts.append(s.length)
            places = torch.arange(at - 1, at + s.length - 1)
            if s.length:
                places[0] = owner.start + owner.length - 1
            predict.append(places)
            target.append(piece)
        at += s.length
    device = pieces[0].device
    bounds = torch.tensor([0] + [s.length for s in segments]).cumsum(0)
    layout = PackedLayout(bounds, torch.tensor(prefix_start), torch.tensor(prefix_length))
    return PackedRow(
        torch.cat(pieces)[None], torch.cat(positions)[None].to(device), layout,
        torch.cat(predict).to(device), torch.cat(target), items, counts,
    )  # fmt: skip
