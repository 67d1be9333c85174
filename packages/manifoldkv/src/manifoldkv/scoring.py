"""Scores of cached keys: how much each token deserves to stay (higher = keep)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from manifoldkv import kernels
from manifoldkv.config import KVConfig
from manifoldkv.geometry import diagnose_keys
from manifoldkv.rope import Rotary
from manifoldkv.selection import check_mask
from manifoldkv.windows import sliding_centroids, tumbling_bounds

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CHUNK_BYTES = 4 << 20  # of float32 work at a time: stays in a core's cache and far below the cache being scored


class NonFiniteKeysError(FloatingPointError):
    """Every valid key of a head is NaN, infinite or too large for float32. Attributes: ``layer``, ``head``."""

    def __init__(self, layer: int, head: int):
        super().__init__(layer, head)
        self.layer, self.head = layer, head

    def __str__(self) -> str:
        return (
            f"layer {self.layer}, key-value head {self.head}: every key is NaN, infinite or too large for float32; "
            "the model's forward pass is broken (try another dtype)"
        )


@torch.no_grad()
def score_keys(
    keys: Float[Tensor, "batch heads tokens dim"],
    cfg: KVConfig,
    mask: Shaped[Tensor, "batch tokens"] | None = None,
    *,
    n: int | None = None,
    positions: Int64[Tensor, "batch heads tokens"] | None = None,
    rotary: Rotary | None = None,
    layer: int = 0,
) -> Float[Tensor, "batch heads tokens"]:
    """Score each cached key of each key-value head; float32, higher is kept.

    With ``mu`` the mean of a head's valid keys (arXiv 2602.08343) and ``a`` the mean of its unit keys:

    - ``"l2"``: ``||k - mu||_2``, the paper's ManifoldKV.
    - ``"cosine"``: ``-cos(k, a)``, KeyDiff (arXiv 2504.15364). ``"cosine_mean"``: ``-cos(k, mu)``.
    - ``"decomposed"``: ``lambda_rad (rho - rho0)^2 + 2 lambda_ang rho_x m (1 - cos theta)`` with ``rho = ||k||``,
      ``m = ||mu||`` and ``theta`` the angle to ``mu``; the defaults give ``||k - mu||^2``.
    - ``"knorm"``: ``-||k||``. ``"streaming"``: recency. ``"random"``: uniform, one draw per head and position.
    - ``"auto"``: ``"l2"`` or ``"cosine"``, as :func:`manifoldkv.geometry.diagnose_keys` chooses for these very keys.

    Args:
        keys: ``[B, H, T, D]``, float32, bfloat16, float16 or float64, any strides. One score per key-value head.
        cfg: metric, windows and protection. Protected tokens (the first ``n_sink`` and the last ``n_recent`` valid
            ones) score ``+inf``, as many of them as fit into the number of kept tokens.
        mask: ``[B, T]``, bool or 0/1, true where valid; padding scores ``-inf`` and doesn't enter any centroid.
        n: tokens that will be kept, where it isn't ``cfg.keep_count(T)``.
        positions: logical position of each key among its row's valid tokens, where earlier ones were evicted. Used to
            find the sinks and to un-rotate; default: order of the valid tokens.
        rotary: the model's rotation, needed with ``space="pre"``.
        layer: of the model, named in errors and mixed into the ``"random"`` seed.

    Returns:
        float32 ``[B, H, T]``. A NaN or infinite key scores ``-inf``, protected or not.

    Raises:
        TypeError: keys that aren't floating point (fp8 included), or not a :class:`KVConfig`.
        ValueError: a wrong rank or mask shape; ``space="pre"`` without ``rotary``.
        NonFiniteKeysError: a head without a single finite valid key (a FloatingPointError).
    """
    _check(keys, cfg)
    batch, heads, length, _ = keys.shape
    if mask is not None:
        mask = check_mask(mask, batch, length).to(keys.device)
    if 0 in keys.shape:
        return keys.new_zeros((batch, heads, length), dtype=torch.float32)
    if cfg.metric == "auto":
        cfg = replace(cfg, metric=diagnose_keys([keys], mask).metric)
    if cfg.space == "pre":
        keys = _unrotated(keys, mask, positions, rotary)
    sinks, recent = cfg.protected(cfg.keep_count(length) if n is None else n)
    kept = _protected(mask, positions, (batch, heads, length), sinks, recent, keys.device)
    counted = mask
    if cfg.centroid == "evictable":
        counted = _evictable(kept, mask, keys)
    scores = _raw_scores(keys, cfg, mask, counted, positions, layer)
    return _finish(scores, kept, mask, layer)


def _check(keys: Tensor, cfg: KVConfig) -> None:
    if not isinstance(cfg, KVConfig):
        raise TypeError(f"cfg must be a KVConfig, not {type(cfg).__name__}")
    if not isinstance(keys, Tensor) or keys.ndim != 4:
        got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(f"keys must be a tensor of shape [batch, heads, tokens, dim], not {got}")
    if keys.dtype not in _FLOATS:
        raise TypeError(
            f"keys of dtype {keys.dtype} can't be scored; dequantise to one of {', '.join(map(str, _FLOATS))}"
        )


def _unrotated(keys: Tensor, mask: Tensor | None, positions: Tensor | None, rotary: Rotary | None) -> Tensor:
    if rotary is None:
        raise ValueError("space='pre' needs the model's rotation: give rotary=Rotary(inv_freq), or use space='post'")
    if positions is None:
        positions = _rank(mask, keys)[:, None]
    return rotary.undo(keys, positions)


def _rank(mask: Tensor | None, keys: Tensor) -> Int64[Tensor, "rows tokens"]:
    """Order of each token among its row's valid ones, from 0 (padding before them: 0)."""
    if mask is None:
        return torch.arange(keys.shape[2], device=keys.device)[None]
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _protected(
    mask: Tensor | None,
    positions: Tensor | None,
    shape: tuple[int, int, int],
    sinks: int,
    recent: int,
    device: torch.device,
) -> Bool[Tensor, "batch heads tokens"] | None:
    """True at the sinks and the recent tokens; ``None`` where nothing is protected."""
    if sinks == recent == 0:
        return None
    batch, heads, length = shape
    valid = torch.ones((1, length), dtype=torch.bool, device=device) if mask is None else mask
    rank, count = valid.cumsum(-1) - 1, valid.sum(-1, keepdim=True)
    late = (rank >= count - recent)[:, None]
    early = (rank < sinks)[:, None] if positions is None else positions.to(device) < sinks
    return ((late | early) & valid[:, None]).expand(batch, heads, length)


def _evictable(kept: Tensor | None, mask: Tensor | None, keys: Tensor) -> Tensor | None:
    """Keys that enter the centroid under ``centroid="evictable"``, ``[B, H, T]``; all valid ones where all are kept."""
    if kept is None:
        return mask
    valid = torch.ones_like(kept) if mask is None else mask[:, None].expand_as(kept)
    free = valid & ~kept
    return torch.where(free.any(-1, keepdim=True), free, valid)


def _raw_scores(
    keys: Tensor, cfg: KVConfig, mask: Tensor | None, counted: Tensor | None, positions: Tensor | None, layer: int
) -> Tensor:
    """Scores before protection and padding, ``[B, H, T]`` float32; not finite at faulty keys, anything at padding."""
    batch, heads, length, _ = keys.shape
    if cfg.metric in ("random", "streaming"):
        order = _rank(mask, keys)[:, None] if positions is None else positions.to(keys.device)
        order = order.expand(batch, heads, length)
        scores = _draws(order, cfg.seed * 1_000_003 + layer) if cfg.metric == "random" else order.float()
        return scores.masked_fill(~keys.isfinite().all(-1), torch.nan)
    if cfg.metric == "knorm":
        return -kernels.key_norms(keys)
    if counted is not None and counted.ndim == 3:  # a mask per head: heads become rows
        rows = (
            keys.flatten(0, 1)[:, None],
            None if mask is None else mask.repeat_interleave(heads, 0),
            counted.flatten(0, 1),
        )
        return _centroid_scores(*rows, cfg).view(batch, heads, length)
    return _centroid_scores(keys, mask, counted, cfg)


def _draws(order: Int64[Tensor, "batch heads tokens"], seed: int) -> Float[Tensor, "batch heads tokens"]:
    """One uniform draw per head and position. It stays a token's own, so repeated evictions keep a uniform sample."""
    draws = torch.rand((int(order.max()) + 1, order.shape[1]), generator=torch.Generator().manual_seed(seed))
    return draws.T.to(order.device).expand(order.shape[0], -1, -1).gather(-1, order)


def _centroid_scores(keys: Tensor, mask: Tensor | None, counted: Tensor | None, cfg: KVConfig) -> Tensor:
    if cfg.window is None or keys.shape[2] <= cfg.window:
        return _metric_scores(keys, cfg, [0, keys.shape[2]], counted)
    if mask is None or bool(mask.all()):
        return _window_scores(keys, counted, cfg)
    scores = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for row in range(keys.shape[0]):  # windows start at a row's first valid token, so padding never shifts them
        at = mask[row].nonzero()[:, 0]
        own = None if counted is None else counted[row : row + 1, at]
        scores[row : row + 1, :, at] = _window_scores(keys[row : row + 1, :, at], own, cfg)
    return scores


def _window_scores(keys: Tensor, counted: Tensor | None, cfg: KVConfig) -> Tensor:
    if cfg.kind == "tumbling" or keys.shape[2] <= (cfg.window or 0):
        return _metric_scores(keys, cfg, tumbling_bounds(keys.shape[2], cfg.window), counted)
    return _sliding_scores(keys, cfg)


def _metric_scores(keys: Tensor, cfg: KVConfig, bounds: list[int], counted: Tensor | None) -> Tensor:
    """Scores against the centroid of each token's tumbling window (one window: the global centroid)."""
    centroid = kernels.centroids(keys, bounds=bounds, mask=counted, unit=cfg.metric == "cosine")
    if cfg.metric == "l2":
        return kernels.l2_scores(keys, centroid, bounds=bounds)
    if cfg.metric in ("cosine", "cosine_mean"):
        return kernels.cosine_scores(keys, centroid, bounds=bounds)
    radius = kernels.key_norms(keys)
    scores = torch.empty_like(radius)
    for j, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = None if counted is None else counted[:, start:stop]
        scores[..., start:stop] = _decomposed(
            keys[:, :, start:stop], radius[..., start:stop], centroid[:, :, j : j + 1], own, cfg
        )
    return scores


def _decomposed(
    keys: Tensor, radius: Tensor, centroid: Float[Tensor, "batch heads 1 dim"], counted: Tensor | None, cfg: KVConfig
) -> Tensor:
    """``lambda_rad (rho - rho0)^2 + lambda_ang rho_x m ||k/rho - mu/m||^2``: the angular part without cancellation,

    since ``2 (1 - cos theta) = ||k/rho - mu/m||^2``.
    """
    m = centroid.norm(dim=-1)
    weights = torch.ones_like(radius) if counted is None else counted[:, None].to(radius)
    weights = weights * radius.isfinite()
    mean = radius.where(radius.isfinite(), 0).mul(weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(
        min=1
    )
    rho0 = m if cfg.rho0 == "centroid" else mean
    rho_x = radius if cfg.rho_x == "self" else mean
    direction = torch.nn.functional.normalize(centroid, dim=-1)
    angular = torch.empty_like(radius)
    step = max(_CHUNK_BYTES // (4 * keys.shape[0] * keys.shape[1] * keys.shape[3]), 1)
    for start in range(0, keys.shape[2], step):
        part = slice(start, start + step)
        unit = keys[:, :, part].float() / radius[:, :, part].clamp(min=1e-30)[..., None]
        angular[:, :, part] = (unit - direction).square().sum(-1)
    return cfg.lambda_rad * (radius - rho0).square() + cfg.lambda_ang * rho_x * m * angular


def _sliding_scores(keys: Tensor, cfg: KVConfig) -> Tensor:
    clean = keys.where(keys.isfinite().all(-1, keepdim=True), 0)
    scores = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    for start, stop, centroid in sliding_centroids(clean, cfg.window or 0, unit=cfg.metric == "cosine"):
        part = keys[:, :, start:stop].float()
        if cfg.metric == "l2":
            scores[..., start:stop] = (part - centroid).norm(dim=-1)
        else:
            scores[..., start:stop] = -torch.nn.functional.cosine_similarity(part, centroid, dim=-1)
    return scores


def _finish(scores: Tensor, kept: Tensor | None, mask: Tensor | None, layer: int) -> Tensor:
    """Protection, padding and faulty keys, in the order of precedence: padding and faulty last."""
    finite = scores.isfinite()
    faulty = None if bool(finite.all()) else ~finite
    if kept is not None:
        scores = scores.masked_fill(kept, torch.inf)
    if faulty is not None:
        scores = scores.masked_fill(faulty, -torch.inf)
        _refuse_empty_heads(faulty, mask, layer)
    return scores if mask is None else scores.masked_fill(~mask[:, None], -torch.inf)


def _refuse_empty_heads(faulty: Tensor, mask: Tensor | None, layer: int) -> None:
    valid = torch.ones_like(faulty) if mask is None else mask[:, None].expand_as(faulty)
    empty = ((faulty | ~valid).all(-1) & valid.any(-1)).nonzero()
    if len(empty):
        raise NonFiniteKeysError(layer, int(empty[0, 1]))
