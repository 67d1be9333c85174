"""What the paper and its users compare with: other rules for which cached tokens stay.

KeyDiff, key norm, StreamingLLM and random selection are metrics of :func:`manifoldkv.score_keys`; SnapKV needs the
queries.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldkv.config import KVConfig

SNAPKV_WINDOW = 64
SNAPKV_KERNEL = 5


def keydiff(compression_ratio: float) -> KVConfig:
    """KeyDiff (arXiv 2504.15364): drop the keys most similar to the mean unit key. No protected tokens."""
    return KVConfig(metric="cosine", compression_ratio=compression_ratio, n_sink=0, n_recent=0)


def key_norm(compression_ratio: float) -> KVConfig:
    """Key norm (arXiv 2406.11430): drop the keys of largest norm. No protected tokens."""
    return KVConfig(metric="knorm", compression_ratio=compression_ratio, n_sink=0, n_recent=0)


def streaming_llm(compression_ratio: float, n_sink: int = 4) -> KVConfig:
    """StreamingLLM (arXiv 2309.17453): keep the first ``n_sink`` tokens and the most recent ones."""
    return KVConfig(metric="streaming", compression_ratio=compression_ratio, n_sink=n_sink, n_recent=0)


def random_selection(compression_ratio: float, seed: int = 0) -> KVConfig:
    """Uniformly random tokens. No protected tokens."""
    return KVConfig(metric="random", compression_ratio=compression_ratio, n_sink=0, n_recent=0, seed=seed)


@torch.no_grad()
def snapkv_scores(
    keys: Float[Tensor, "batch kv_heads tokens dim"],
    queries: Float[Tensor, "batch heads window dim"],
    kernel: int = SNAPKV_KERNEL,
    scaling: float | None = None,
) -> Float[Tensor, "batch kv_heads tokens"]:
    """SnapKV (arXiv 2404.14469): attention that the last queries pay to each earlier key.

    ``s_j = avgpool_kernel(mean_{i in window} softmax_j(q_i . k_j / sqrt(d)))``, causal inside the window, averaged over
    the query heads of each key-value head. The window's own tokens score ``+inf``: they are always kept.

    Args:
        keys: rotated keys of the prompt.
        queries: rotated queries of its last ``window`` tokens, ``window < tokens``.
        kernel: odd width of the average pool along the tokens.
        scaling: factor on ``q . k``; default ``1 / sqrt(dim)``.

    Raises:
        ValueError: the window isn't shorter than the prompt, or the query heads aren't a multiple of the key-value
            heads.
    """
    batch, kv_heads, length, dim = keys.shape
    heads, window = queries.shape[1], queries.shape[2]
    if window >= length:
        raise ValueError(f"SnapKV's window of {window} queries must be shorter than the {length} tokens of the prompt")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads can't be shared by {kv_heads} key-value heads")
    grouped = queries.float().view(batch, kv_heads, heads // kv_heads, window, dim)
    logits = grouped @ keys.float()[:, :, None].mT * (dim**-0.5 if scaling is None else scaling)
    future = torch.ones((window, window), dtype=torch.bool, device=keys.device).triu(1)
    logits[..., -window:].masked_fill_(future, -torch.inf)
    attention = logits.softmax(-1)[..., :-window].mean(dim=-2)
    pooled = torch.nn.functional.avg_pool1d(attention.flatten(0, 1), kernel, stride=1, padding=kernel // 2)
    scores = pooled.view(batch, kv_heads, heads // kv_heads, length - window).mean(dim=2)
    return torch.nn.functional.pad(scores, (0, window), value=torch.inf)
