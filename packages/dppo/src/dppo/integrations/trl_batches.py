"""Pruned rollouts as micro-batches, and packed log-probabilities in the shape TRL works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dppo.integrations.transformers import packed_attention_of, packed_logps
from dppo.kernels import PackedLayout
from dppo.packed import PackedRow, pack_sequences

PROMPT_KEYS = ("prompt_ids", "prompt_mask")


def assign(batch: dict[str, Any], keep: Tensor, micro_batches: int) -> list[list[int]]:
    """Which kept row goes into which micro-batch: nearly equal tokens each.

    Longest first, each into the micro-batch with the fewest tokens that has a row free (a micro-batch never has more
    rows than it would without pruning).

    Args:
        batch: TRL's output of a generation. keep: (B,) rows to keep. micro_batches: how many.
    """
    tokens = (batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist()
    kept = torch.nonzero(keep).flatten().tolist()
    room = len(keep) // micro_batches
    bins: list[list[int]] = [[] for _ in range(micro_batches)]
    load = [0] * micro_batches
    for row in sorted(kept, key=lambda r: (-tokens[r], r)):
        lightest = min((b for b in range(micro_batches) if len(bins[b]) < room), key=lambda b: (load[b], b))
        bins[lightest].append(row)
        load[lightest] += tokens[row]
    return [sorted(rows) for rows in bins]


def micro_batch(batch: dict[str, Any], chosen: list[int], weight: Tensor, rows: int) -> dict[str, Any]:
    """The chosen rows as a batch like TRL's, padding cut to what they need, filled up to `rows` rows.

    The rows that fill up have one prompt token, no completion token and weight 0: they contribute nothing. With as many
    rows in every process (at least one), each makes the same passes and collective operations of the same
    sizes, and none waits for another.

    Args:
        batch: tensors by row, and scalars. chosen: rows. weight: (B,) total weight of each row. rows: at least
            len(chosen) and 1.

    Returns:
        TRL's keys, and "row_weight" (rows,), "full_rows" (B, a scalar tensor).
    """
    size, device = len(weight), weight.device
    fill = rows - len(chosen)
    index = torch.tensor(chosen + [0] * fill, device=device)
    result: dict[str, Any] = {}
    for name, value in batch.items():
        by_row = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        result[name] = value[index] if by_row else value
    real = torch.arange(rows, device=device) < len(chosen)
    result["completion_mask"] = result["completion_mask"] * real[:, None]
    result["prompt_mask"] = result["prompt_mask"].masked_fill(~real[:, None], 0)
    result["prompt_mask"][~real, -1] = 1
    result["row_weight"] = torch.where(real, weight[index], 0.0).float()
    result["full_rows"] = torch.tensor(float(size), device=device)
    return _trimmed(result)


def _trimmed(batch: dict[str, Any]) -> dict[str, Any]:
    """Without the columns that are padding in every row."""
    used = torch.nonzero(batch["completion_mask"].any(0)).flatten()
    width = int(used[-1]) + 1 if len(used) else 1
    present = torch.nonzero(batch["prompt_mask"].any(0)).flatten()
    first = int(present[0]) if len(present) else batch["prompt_mask"].shape[1] - 1
    full = batch["completion_mask"].shape[1]
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        if name in PROMPT_KEYS:
            batch[name] = value[:, first:]
        elif value.shape[1] == full:
            batch[name] = value[:, :width]
    return batch


@dataclass
class PackStats:
    """Valid tokens and room of the packed rows since the last `take`."""

    tokens: int = 0
    room: int = 0

    def take(self) -> float:
        """Density; forgets what was counted."""
        density = self.tokens / self.room if self.room else 1.0
        self.tokens = self.room = 0
        return density


def _empty_row(input_ids: Tensor, item: int) -> PackedRow:
    """A packed row of one token that predicts nothing."""
    start, none = input_ids[:1, :1], input_ids.new_zeros(0)
    return PackedRow(start, torch.zeros_like(start), PackedLayout(torch.tensor([0, 1])), none, none, [item], [0])


def packed_log_probabilities(
    model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *, capacity: int | None, window: int,
    share_prompts: bool, temperature: float, entropy: bool, autocast: Callable[[], Any], stats: PackStats, config: Any,
    most_rows: Callable[[int], int],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What TRL's padded forward pass returns, (rows, logits_to_keep), from packed rows; 0 at padding.

    `config` is the unwrapped model, whose attention is switched for the call; `model` is called, so that DDP sees it.
    `most_rows` is given the number of packed rows and returns the largest of all processes: each makes as many
    passes, since a pass may hold collective operations (DDP's buffers, sharded weights) that wait for all.
    """
    split = input_ids.shape[1] - logits_to_keep
    prompts = [ids[:split][mask[:split].bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
    places = [torch.nonzero(mask[split:]).flatten() for mask in attention_mask]
    completions = [ids[split:][place] for ids, place in zip(input_ids, places, strict=True)]
    packing, rows = pack_sequences(prompts, completions, capacity=capacity, window=window, share_prompts=share_prompts)
    fill = [_empty_row(input_ids, -1 - n) for n in range(most_rows(len(rows)) - len(rows))] if capacity else []
    with packed_attention_of(config), autocast():
        logps, entropies = packed_logps(model, [*fill, *rows], temperature=temperature, entropy=entropy)
    stats.tokens += packing.tokens
    stats.room += int(packing.widths.sum()) if capacity else packing.tokens

    def spread(values: dict[int, Tensor]) -> Tensor:
        lines = []
        for item, place in enumerate(places):
            line = torch.zeros(logits_to_keep, device=input_ids.device, dtype=values[item].dtype)
            lines.append(line.index_put((place,), values[item]))
        # Zero, and a part of the graph: the backward pass goes through as many passes on every process too.
        return torch.stack(lines) + sum(values[row.items[0]].sum() for row in fill)

    return spread(logps), spread(entropies) if entropy else None
