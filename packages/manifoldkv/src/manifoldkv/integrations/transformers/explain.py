"""Which tokens a head kept, and why: its scores over the prompt's text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Trace:
    """What a layer saw at its first eviction: ``[B, H, T]`` each, on the CPU.

    ``radial = (rho - m)^2`` and ``angular = 2 rho m (1 - cos theta)`` add up to the squared distance from the centroid
    (``rho`` the key's norm, ``m`` the centroid's, ``theta`` the angle between them).
    """

    scores: Float[Tensor, "batch heads tokens"]
    radial: Float[Tensor, "batch heads tokens"]
    angular: Float[Tensor, "batch heads tokens"]
    kept: Bool[Tensor, "batch heads tokens"]
    metric: str

    @classmethod
    def of(cls, keys: Tensor, scores: Tensor, kept: Tensor, mask: Tensor | None, metric: str) -> Trace:
        """Split the squared distance from the mean of the valid keys into its two parts."""
        keys = keys.float()
        weight = torch.ones_like(scores) if mask is None else mask[:, None].expand_as(scores).float()
        weight = weight * keys.isfinite().all(-1)
        centroid = (keys.nan_to_num(0, 0, 0) * weight[..., None]).sum(2, keepdim=True) / weight.sum(-1)[
            ..., None, None
        ].clamp(min=1)
        radius, m = keys.norm(dim=-1), centroid.norm(dim=-1)
        radial = (radius - m).square()
        angular = (keys - centroid).square().sum(-1) - radial
        return cls(scores.cpu(), radial.cpu(), angular.clamp(min=0).cpu(), kept.cpu(), metric)


@dataclass(frozen=True)
class Explanation:
    """One head's decision over a prompt; ``str()`` shows the text with evicted spans marked, then the scores."""

    layer: int
    head: int
    metric: str
    tokens: tuple[str, ...]
    kept: tuple[bool, ...]
    scores: tuple[float, ...]
    radial: tuple[float, ...]
    angular: tuple[float, ...]

    def text(self) -> str:
        """The prompt, with each evicted span as ``[-span-]``."""
        parts, inside = [], False
        for token, kept in zip(self.tokens, self.kept, strict=True):
            if kept == inside:  # the state changes here
                parts.append("-]" if inside else "[-")
                inside = not inside
            parts.append(token)
        return "".join(parts) + ("-]" if inside else "")

    def rows(self, limit: int | None = None) -> list[tuple[int, str, bool, float, float, float]]:
        """``(position, token, kept, score, radial, angular)``, best score first, ``limit`` from each end."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))
        if limit is not None and len(order) > 2 * limit:
            order = order[:limit] + order[-limit:]
        fields = (self.tokens, self.kept, self.scores, self.radial, self.angular)
        return [(i, *(field[i] for field in fields)) for i in order]  # type: ignore[misc]

    def __str__(self) -> str:
        kept = sum(self.kept)
        lines = [
            f"layer {self.layer}, key-value head {self.head}, metric {self.metric}: "
            f"{kept} of {len(self.kept)} tokens kept (evicted ones in [- -])",
            self.text(),
            "",
            f"{'position':>8}  {'kept':4}  {'score':>10}  {'radial':>10}  {'angular':>10}  token",
        ]
        for position, token, is_kept, score, radial, angular in self.rows(10):
            mark = "yes" if is_kept else "no"
            lines.append(f"{position:>8}  {mark:4}  {score:>10.4g}  {radial:>10.4g}  {angular:>10.4g}  {token!r}")
        return "\n".join(lines)


def explain(
    trace: Trace, ids: Tensor, padded: Tensor | None, tokenizer: Any, layer: int, head: int, row: int
) -> Explanation:
    """The trace of one head as text: ``ids`` are the tokens it saw ``[B, T]``, ``padded`` the pads in front ``[B]``."""
    rows, heads, length = trace.scores.shape
    if not 0 <= head < heads:
        raise ValueError(f"head={head} is not one of the {heads} key-value heads (0 ... {heads - 1})")
    if not 0 <= row < rows:
        raise ValueError(f"row={row} is not one of the {rows} rows of the batch (0 ... {rows - 1})")
    start = 0 if padded is None else int(padded[row])

    def numbers(tensor: Tensor) -> tuple[Any, ...]:
        return tuple(tensor[row, head, start:].tolist())

    tokens = tuple(_pieces(tokenizer, ids[row, start:length].tolist()))
    parts = (numbers(trace.kept), numbers(trace.scores), numbers(trace.radial), numbers(trace.angular))
    return Explanation(layer, head, trace.metric, tokens, *parts)


def _pieces(tokenizer: Any, ids: list[int]) -> Iterator[str]:
    """What each token adds to the text of the one before it: decoded alone, many lose the space in front."""
    for place, token in enumerate(ids):
        alone = tokenizer.decode([token])
        before = tokenizer.decode([ids[place - 1]]) if place else ""
        both = tokenizer.decode(ids[place - 1 : place + 1]) if place else alone
        yield both[len(before) :] if both.startswith(before) else alone
