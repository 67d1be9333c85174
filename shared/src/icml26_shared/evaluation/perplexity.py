"""Perplexity of a causal language model over a text longer than its window, every token counted exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Perplexity", "sliding_window_perplexity", "windows"]


@dataclass(frozen=True)
class Perplexity:
    """Total negative log-likelihood in nats, and the number of tokens it is over."""

    nll: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Mean negative log-likelihood in nats a token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(nll / tokens)`."""
        return math.exp(self.per_token)


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut `length` tokens into windows: `(begin, end, first)`, where tokens `first .. end-1` are scored in
    `begin .. end-1`.

    Every token but the very first is scored once, with at least `window - stride` tokens before it (fewer only near
    the start of the text).
    """
    if window < 2 or not 1 <= stride < window:
        raise ValueError(
            f"need window >= 2 and 1 <= stride < window, got window {window} and stride {stride}: a token is scored "
            "from the one before it, so windows overlap by at least one"
        )
    scored = 1
    begin = 0
    while scored < length:
        end = min(begin + window, length)
        yield begin, end, scored
        scored = end
        begin += stride


def sliding_window_perplexity(
    model: Any,
    ids: torch.Tensor | Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Perplexity of `model` over one token sequence: `exp(-1/(T-1) * sum_{t=1}^{T-1} log p(x_t | x_<t, window))`.

    Args:
        model: a causal language model of transformers; called as `model(input_ids=[1, n], use_cache=False).logits`.
        ids: token ids, shape [T] or [1, T], T >= 2. The first token is given, not scored.
        window: tokens a forward pass sees. Default: the model's `max_position_embeddings`, at most T.
        stride: tokens by which the window moves on, below `window`; smaller gives more context and costs more.
            Default: half the window.
        progress: called with the number of tokens scored by each window.

    Returns:
        The summed negative log-likelihood (accumulated in float64 from float32 log-probabilities) and T - 1 tokens.

    Raises:
        ValueError: fewer than two tokens, more than one row, or an impossible window or stride.
    """
    import torch

    tokens = torch.as_tensor(ids, device=model.device)
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise ValueError(f"ids must be one row of at least two tokens, got shape {tuple(tokens.shape)}")
    length = tokens.numel()
    if window is None:
        window = max(2, min(length, int(getattr(model.config, "max_position_embeddings", length))))
    total, count = 0.0, 0
    with torch.inference_mode():
        for begin, end, first in windows(length, window, max(1, window // 2) if stride is None else stride):
            logits = model(input_ids=tokens[None, begin:end], use_cache=False).logits[0]
            total += _nll(logits[first - begin - 1 : end - begin - 1], tokens[first:end])
            count += end - first
            if progress is not None:
                progress(end - first)
    return Perplexity(total, count)


def _nll(logits: torch.Tensor, targets: torch.Tensor, rows: int = 256) -> float:
    """Summed cross entropy, a few rows at a time: a float32 copy of all logits may be larger than the model."""
    from torch.nn.functional import cross_entropy

    parts = zip(logits.split(rows), targets.split(rows), strict=True)
    return sum(cross_entropy(part.float(), target, reduction="none").double().sum().item() for part, target in parts)
