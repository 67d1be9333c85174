"""Completion-level pruning: skip completions of low advantage at random, weight the kept ones by the inverse.

For a group of G completions with advantages A_i (computed on the full group, before any pruning) let
μ = (1/G) Σ |A_i|. Completion i is pruned with probability P_i = r_o if |A_i| < μ, else 0, and the estimate

    ĝ = (1/Z) Σ m_i w_i ∇ℓ_i,   w_i = 1/(1 − P_i),   Z fixed by the full batch,

has E_m[ĝ] = (1/Z) Σ ∇ℓ_i for any per-sample loss ℓ, clipped or not, with or without KL. Two things break it: dividing
by what was kept instead of Z, and letting w into the clip.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, Num
from torch import Tensor

from dppo.config import PruningConfig
from dppo.designs import (
    expected_count,
    floor_count,
    low_count,
    rank_in_stratum,
    remove_count,
    systematic,
    truncated_binomial,
    water_fill,
)
from dppo.draws import MaskGenerator, as_generator, combine, occurrences
from dppo.keys import int_ids

TOLERANCE = 1e-9  # of the largest |A| of the group; see `is_low`


@dataclass(frozen=True)
class PruneResult:
    """Which items stay, and the weight that makes up for the others.

    Attributes:
        keep: (B,) bool.
        weight: (B,) fp32, 1/(1−P) where kept, 0 where not.
        prob: (B,) fp32, the probability P with which the item was pruned; 1 only for terms that are exactly zero
            (and, in the biased mode "deterministic", for what was removed).
        free: (B,) bool, removed because its term is exactly zero.
        lengths: (B,) tokens, where given.
    """

    keep: Bool[Tensor, " batch"]
    weight: Float32[Tensor, " batch"]
    prob: Float32[Tensor, " batch"]
    free: Bool[Tensor, " batch"]
    lengths: Int64[Tensor, " batch"] | None = None

    @cached_property
    def stats(self) -> dict[str, float]:
        """n, kept, keep_fraction, free, ess, max_weight, and with lengths tokens, tokens_kept, token_fraction."""
        n, kept = len(self.keep), int(self.keep.sum())
        result = {
            "n": n,
            "kept": kept,
            "keep_fraction": kept / n if n else 1.0,
            "free": int(self.free.sum()),
            "ess": effective_sample_size(self.weight),
            "max_weight": float(self.weight.max()) if n else 0.0,
        }
        if self.lengths is not None:
            tokens, tokens_kept = int(self.lengths.sum()), int(self.lengths[self.keep].sum())
            result |= {
                "tokens": tokens,
                "tokens_kept": tokens_kept,
                "token_fraction": tokens_kept / tokens if tokens else 1.0,
            }
        return result


def effective_sample_size(weight: Num[Tensor, " batch"]) -> float:
    """(Σ w)² / Σ w²; 0 for no items."""
    total, square = float(weight.double().sum()), float(weight.double().square().sum())
    return total**2 / square if square else 0.0


@dataclass(frozen=True)
class Strata:
    """A batch seen by the designs: groups, scores, and which items are low, free, or certain.

    Attributes:
        group: (B,) dense group index 0 .. n_groups−1.
        key: (n_groups,) stable id of each group.
        place: (B,) how many members of its group stand before the item.
        score: (B,) fp64, what is compared with the group mean.
        low: (B,) bool, candidates for removal.
        free: (B,) bool, removed for nothing.
    """

    group: Int64[Tensor, " batch"]
    key: Int64[Tensor, " groups"]
    place: Int64[Tensor, " batch"]
    score: Float64[Tensor, " batch"]
    low: Bool[Tensor, " batch"]
    free: Bool[Tensor, " batch"]

    @property
    def n_groups(self) -> int:
        return len(self.key)

    @property
    def sample_ids(self) -> Int64[Tensor, " batch"]:
        """(B,) an id for each completion, out of its group's and its place in the group."""
        return combine(self.key[self.group], self.place)


def prune_completions(
    advantages: Float[Tensor, " batch"],
    groups: Int64[Tensor, " batch"] | Sequence[Any] | np.ndarray | int,
    cfg: PruningConfig | None = None,
    *,
    generator: MaskGenerator | torch.Generator | int,
    lengths: Int64[Tensor, " batch"] | None = None,
    sample_ids: Int64[Tensor, " batch"] | None = None,
    progress: float = 0.0,
) -> PruneResult:
    """Draws which completions of a batch are updated on.

    Args:
        advantages: (B,) any float dtype, any device, of any estimator, from the full groups.
        groups: the group size (consecutive groups), or (B,) group ids (ints or strings) in any order.
        cfg: options; default `PruningConfig()`.
        generator: `MaskGenerator(seed, step)`, a seed, or a torch.Generator.
        lengths: (B,) completion tokens; needed by score "abs_advantage_x_len" and by budget "tokens".
        sample_ids: (B,) int64 stable ids. Default: the group id and the position within the group, so the mask does
            not depend on the order of the groups when group ids are given.
        progress: share of training done, in [0, 1], for `cfg.anneal`.

    Returns:
        PruneResult on the device of `advantages`.

    Raises:
        ValueError: a NaN or infinite advantage, sizes that do not match, missing lengths.
    """
    cfg = cfg or PruningConfig()
    generator = as_generator(generator)
    strata = stratify(advantages, groups, cfg, lengths=lengths)
    if sample_ids is None:
        sample_ids = strata.sample_ids
    elif sample_ids.shape != advantages.shape:
        raise ValueError(f"sample_ids has shape {tuple(sample_ids.shape)}, advantages {tuple(advantages.shape)}")
    else:
        sample_ids = distinct(sample_ids)
    if not cfg.is_active(progress):
        keep, prob = ~strata.free, torch.zeros_like(strata.score)
        weight = torch.ones_like(prob)
    else:
        keep, prob, weight = _draw(strata, cfg, generator, sample_ids, lengths)
    keep = keep & ~strata.free
    return PruneResult(
        keep=keep,
        weight=torch.where(keep, weight, 0.0).float(),
        prob=torch.where(strata.free, 1.0, prob).float(),
        free=strata.free,
        lengths=lengths,
    )


def stratify(
    advantages: Float[Tensor, " batch"],
    groups: Int64[Tensor, " batch"] | Sequence[Any] | np.ndarray | int,
    cfg: PruningConfig,
    *,
    lengths: Int64[Tensor, " batch"] | None = None,
) -> Strata:
    """Checks the input and finds groups, scores, low and free items. Arguments as of `prune_completions`."""
    _check_advantages(advantages)
    if lengths is not None and lengths.shape != advantages.shape:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, advantages {tuple(advantages.shape)}")
    group, key, place = _group_index(groups, advantages)
    size = advantages.abs().double()
    score = _score(size, advantages, lengths, cfg)
    free = (advantages == 0) & cfg.free_zeros
    eps = max(TOLERANCE, 4 * torch.finfo(advantages.dtype).eps)
    low = is_low(score, group, len(key), tolerance=eps) & ~free
    return Strata(group, key, place, score, low, free)


def is_low(
    score: Float64[Tensor, " batch"], group: Int64[Tensor, " batch"], n_groups: int, *, tolerance: float = TOLERANCE
) -> Bool[Tensor, " batch"]:
    """score < mean of its group, strictly: by more than `tolerance` times the largest score of the group.

    The tolerance is at least four units of rounding of the advantages' own dtype, so a group whose advantages
    are ±a is not pruned because of how (r − r̄) was rounded.
    """
    count = torch.bincount(group, minlength=n_groups).clamp(min=1)
    mean = score.new_zeros(n_groups).index_add_(0, group, score) / count
    largest = score.new_zeros(n_groups).scatter_reduce_(0, group, score, "amax")
    return score < (mean - tolerance * largest)[group]


def _draw(
    strata: Strata, cfg: PruningConfig, generator: MaskGenerator, ids: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(keep, P, weight where kept) of the configured design."""
    low, rate = strata.low, cfg.completion_rate
    if cfg.mode == "systematic":
        inclusion = systematic_inclusion(strata, cfg, lengths)
        keep = systematic_keep(inclusion, ids, generator)
        return keep, 1 - inclusion, 1 / inclusion
    if cfg.mode == "deterministic":
        warn_deterministic()
        removed = floor_count(rate, low_count(low, strata.group, strata.n_groups))
        keep = ~low | (rank_in_stratum(strata.score, low, strata.group) >= removed[strata.group])
        return keep, (~keep).double(), torch.where(low, 1 / (1 - rate), 1.0)
    uniform = generator.uniform(ids)
    if cfg.mode == "bernoulli" and not cfg.min_keep_per_group:
        prob = torch.where(low, rate, 0.0).double()
        return uniform >= prob, prob, 1 / (1 - prob)
    removed, inclusion = counted_design(strata, cfg, generator)
    keep = remove_count(uniform, low, strata.group, removed)
    inclusion = torch.where(low, inclusion[strata.group], 1.0)
    return keep, 1 - inclusion, 1 / inclusion


def counted_design(strata: Strata, cfg: PruningConfig, generator: MaskGenerator) -> tuple[Tensor, Tensor]:
    """For designs that first fix how many low items of a group go: (number removed, inclusion probability), by
    group."""
    n_low = low_count(strata.low, strata.group, strata.n_groups)
    least = least_kept(strata, cfg, n_low)
    if cfg.mode == "fixed":
        removed = torch.minimum(floor_count(cfg.completion_rate, n_low), n_low - least)
        return removed, 1 - removed / n_low.clamp(min=1)
    cumulative = truncated_binomial(n_low, least, 1 - cfg.completion_rate)
    uniform = generator.of(f"{generator.stream}/count").uniform(strata.key)
    kept = (cumulative <= uniform[:, None]).sum(1).clamp(max=n_low)
    inclusion = torch.where(n_low > 0, expected_count(cumulative) / n_low.clamp(min=1), 1.0)
    return n_low - kept, inclusion


def least_kept(strata: Strata, cfg: PruningConfig, n_low: Tensor) -> Tensor:
    """How many low items of each group must stay so that the group keeps min_keep_per_group non-free ones."""
    certain = low_count(~strata.low & ~strata.free, strata.group, strata.n_groups)
    return (cfg.min_keep_per_group - certain).clamp(min=0).minimum(n_low)


def systematic_inclusion(strata: Strata, cfg: PruningConfig, lengths: Tensor | None) -> Float64[Tensor, " batch"]:
    """π of mode "systematic": the same expected cost 1−r of the non-free items, spent where scores are large."""
    alive = ~strata.free
    if cfg.budget == "tokens":
        if lengths is None:
            raise ValueError("budget='tokens' needs lengths, the completion tokens of each item")
        cost = lengths.double().clamp(min=1)
    else:
        cost = torch.ones_like(strata.score)
    inclusion = torch.ones_like(strata.score)
    budget = (1 - cfg.completion_rate) * float(cost[alive].sum())
    inclusion[alive] = water_fill(strata.score[alive], cost[alive], budget)
    return inclusion


def systematic_order(ids: Tensor, generator: MaskGenerator) -> Int64[Tensor, " batch"]:
    """The order in which a systematic draw runs through the items: by a hash of the id, whatever the batch order."""
    return torch.argsort(generator.of(f"{generator.stream}/order").uniform(ids), stable=True)


def systematic_keep(inclusion: Tensor, ids: Tensor, generator: MaskGenerator) -> Bool[Tensor, " batch"]:
    """One systematic draw with the start hashed out of (seed, step)."""
    start = float(generator.of(f"{generator.stream}/start").uniform(torch.zeros(1, dtype=torch.int64)))
    return systematic(inclusion, systematic_order(ids, generator), start)


def warn_deterministic() -> None:
    """The warning of the biased mode."""
    warnings.warn(
        "mode='deterministic' removes the lowest advantages for certain and is biased; it is there for ablations. "
        "Use mode='fixed' for the same constant cost without bias",
        UserWarning,
        stacklevel=4,
    )


def distinct(ids: Tensor) -> Tensor:
    """Ids made distinct by their occurrence, so that duplicates draw independently (a tie would favour one of them)."""
    return combine(ids, occurrences(ids))


def _check_advantages(advantages: Tensor) -> None:
    if not isinstance(advantages, Tensor) or not advantages.is_floating_point():
        raise TypeError(f"advantages must be a floating point tensor, got {getattr(advantages, 'dtype', advantages)!r}")
    if advantages.dim() != 1:
        raise ValueError(f"advantages must have shape (batch,), one a completion, got {tuple(advantages.shape)}")
    finite = torch.isfinite(advantages)
    if not bool(finite.all()):
        bad = int(torch.argmin(finite.int()))
        raise ValueError(
            f"advantage of sample {bad} is {float(advantages[bad])}; exclude unscorable completions or give them 0"
        )


def _group_index(groups: Any, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dense index of each item, stable key of each group, place of each item in its group)."""
    n, device = len(advantages), advantages.device
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1 or n % groups:
            raise ValueError(f"group_size={groups} does not divide the batch of {n} completions")
        key = torch.arange(n // groups, device=device)
        return key.repeat_interleave(groups), key, torch.arange(n, device=device) % groups
    ids = int_ids(groups, device)
    if ids.shape != advantages.shape:
        raise ValueError(f"group ids have shape {tuple(ids.shape)}, advantages {tuple(advantages.shape)}")
    key, index = torch.unique(ids, return_inverse=True)
    return index, key, occurrences(index)


def _score(size: Tensor, advantages: Tensor, lengths: Tensor | None, cfg: PruningConfig) -> Float64[Tensor, " batch"]:
    if callable(cfg.score):
        score = torch.as_tensor(cfg.score(advantages, lengths), device=size.device).double()
        if score.shape != size.shape or not bool((torch.isfinite(score) & (score >= 0)).all()):
            raise ValueError("score: the callable must return one finite number >= 0 for each completion")
        return score
    if cfg.score == "abs_advantage":
        return size
    if lengths is None:
        raise ValueError("score='abs_advantage_x_len' needs lengths, the completion tokens of each item")
    return size * lengths.double()
