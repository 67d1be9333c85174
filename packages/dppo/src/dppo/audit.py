"""Is this pruning unbiased for this loss on this batch? By enumeration of all masks, or by sampling them.

The auditor asks nothing of the pruning but its distribution over weight vectors, so it judges the unbiased designs and
the popular biased ones (CPPO, GRESO, lowest-first removal) alike, and the user's own loss function as it stands,
its normaliser included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from dppo.config import PruningConfig
from dppo.designs import floor_count, low_count
from dppo.draws import MaskGenerator, as_generator
from dppo.pruning import Strata, least_kept, stratify, systematic_inclusion, systematic_order

MAX_MASKS = 2**16
CONFIDENCE = 4.0  # standard errors


@dataclass(frozen=True)
class Component:
    """One independent part of a design.

    Attributes:
        members: (k,) positions in the batch that its outcomes act on.
        probability: (outcomes,).
        factor: (outcomes, k) factor of each member's weight, 0 where removed.
        saves_rollouts: decided before generation (prompt level), so that removed members are not generated.
    """

    members: Tensor
    probability: Float64[Tensor, " outcomes"]
    factor: Float64[Tensor, "outcomes members"]
    saves_rollouts: bool = False


class Design(Protocol):
    """Anything whose distribution over weights is known: a product of independent components."""

    def components(self, batch: Mapping[str, Any]) -> list[Component]:
        """The components for a batch with "advantages" and "groups"."""
        ...


@dataclass(frozen=True)
class DynamicPruning:
    """The design of a PruningConfig. `batch["prompt_low"]`, one bool a group (in the order of the sorted group ids),
    says which prompts are low; without it there is no prompt level."""

    cfg: PruningConfig

    def components(self, batch: Mapping[str, Any]) -> list[Component]:
        strata = stratify(batch["advantages"], batch["groups"], self.cfg, lengths=batch.get("lengths"))
        result = _completion_components(strata, self.cfg, batch)
        result += _prompt_components(strata, self.cfg, batch.get("prompt_low"))
        free = torch.nonzero(strata.free).flatten()
        if len(free):
            result.append(Component(free, torch.ones(1).double(), torch.zeros(1, len(free)).double()))
        return result


def _completion_components(strata: Strata, cfg: PruningConfig, batch: Mapping[str, Any]) -> list[Component]:
    if cfg.mode == "systematic":
        return [_systematic_component(strata, cfg, batch)]
    if cfg.mode == "bernoulli" and not cfg.min_keep_per_group:
        return [bernoulli(i[None], cfg.completion_rate) for i in torch.nonzero(strata.low).flatten()]
    n_low = low_count(strata.low, strata.group, strata.n_groups)
    least = least_kept(strata, cfg, n_low)
    result = []
    for index in range(strata.n_groups):
        members = torch.nonzero(strata.low & (strata.group == index)).flatten()
        if not len(members):
            continue
        if cfg.mode == "bernoulli":
            result.append(_conditioned(members, cfg.completion_rate, int(least[index])))
            continue
        removed = int(floor_count(cfg.completion_rate, n_low[index]))
        if cfg.mode == "deterministic":
            result.append(_lowest_first(members, strata.score[members], removed, cfg.completion_rate))
        else:
            result.append(fixed_removal(members, min(removed, len(members) - int(least[index]))))
    return result


def _prompt_components(strata: Strata, cfg: PruningConfig, low: Any) -> list[Component]:
    if low is None:
        return []
    low_groups = torch.nonzero(torch.as_tensor(low)).flatten()
    if not len(low_groups):
        return []
    rows = [torch.nonzero(strata.group == g).flatten() for g in low_groups]
    if cfg.mode == "bernoulli":
        return [replace(bernoulli(members, cfg.prompt_rate), saves_rollouts=True) for members in rows]
    if cfg.mode != "fixed":
        raise ValueError(f"the prompt level is audited with mode 'bernoulli' or 'fixed', not {cfg.mode!r}")
    pick = fixed_removal(torch.arange(len(rows)), int(floor_count(cfg.prompt_rate, torch.tensor(len(rows)))))
    spread = torch.cat([torch.full((len(members),), g) for g, members in enumerate(rows)])
    return [Component(torch.cat(rows), pick.probability, pick.factor[:, spread], saves_rollouts=True)]


def bernoulli(members: Tensor, rate: float, *, reweight: bool = True) -> Component:
    """All members stay (weight 1/(1−rate)) or go together, with probability `rate`."""
    up = 1 / (1 - rate) if reweight else 1.0
    factor = torch.tensor([[up], [0.0]], dtype=torch.float64).expand(2, len(members))
    return Component(members, torch.tensor([1 - rate, rate], dtype=torch.float64), factor)


def fixed_removal(members: Tensor, removed: int) -> Component:
    """Each subset of `removed` members goes with equal probability; the others weigh n/(n − removed)."""
    n = len(members)
    count = math.comb(n, removed)
    _check_masks(count)
    factor = torch.full((count, n), n / (n - removed) if removed < n else 0.0, dtype=torch.float64)
    for row, gone in enumerate(itertools.combinations(range(n), removed)):
        factor[row, list(gone)] = 0
    return Component(members, torch.full((count,), 1 / count, dtype=torch.float64), factor)


def _conditioned(members: Tensor, rate: float, least: int) -> Component:
    """Independent draws given that at least `least` members stay; weights by the true inclusion probability."""
    n = len(members)
    _check_masks(2**n)
    keep = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=torch.float64)
    kept = keep.sum(1)
    mass = torch.where(kept >= least, (1 - rate) ** kept * rate ** (n - kept), 0.0)
    mass = mass / mass.sum()
    inclusion = float((mass * kept).sum()) / n
    return Component(members[:], mass[mass > 0], keep[mass > 0] / inclusion)


def _lowest_first(members: Tensor, score: Tensor, removed: int, rate: float) -> Component:
    factor = torch.full((1, len(members)), 1 / (1 - rate), dtype=torch.float64)
    factor[0, torch.argsort(score, stable=True)[:removed]] = 0
    return Component(members, torch.ones(1, dtype=torch.float64), factor)


def _systematic_component(strata: Strata, cfg: PruningConfig, batch: Mapping[str, Any]) -> Component:
    """The start runs through [0, 1); masks change only where it passes the fractional part of a partial sum of π."""
    inclusion = systematic_inclusion(strata, cfg, batch.get("lengths"))
    ids = batch.get("sample_ids")
    if ids is None:
        ids = strata.sample_ids
    order = systematic_order(ids, as_generator(batch.get("generator", 0)))
    certain = inclusion >= 1
    ends = torch.cumsum(torch.where(certain, 0.0, inclusion)[order], 0)
    cuts = torch.unique(torch.cat([ends % 1, torch.tensor([0.0, 1.0], dtype=torch.float64)]))
    starts, width = (cuts[1:] + cuts[:-1]) / 2, cuts[1:] - cuts[:-1]
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    hit = torch.ceil(ends - starts[:, None]) > torch.ceil(begins - starts[:, None])
    keep = torch.empty_like(hit)
    keep[:, order] = hit
    factor = (keep | certain).double() / inclusion
    return Component(torch.arange(len(inclusion)), width, factor)


def enumerate_weights(components: Sequence[Component], n: int) -> tuple[Tensor, Tensor]:
    """All outcomes: (probability (M,), weights (M, n)).

    Raises:
        ValueError: more than 2^16 outcomes.
    """
    total = math.prod(len(part.probability) for part in components)
    _check_masks(total)
    probability, weight = torch.ones(1, dtype=torch.float64), torch.ones(1, n, dtype=torch.float64)
    for part in components:
        outcomes = len(part.probability)
        probability = (probability[:, None] * part.probability).flatten()
        weight = weight.repeat_interleave(outcomes, 0)
        weight[:, part.members] *= part.factor.repeat(len(weight) // outcomes, 1)
    return probability, weight


def sample_weights(components: Sequence[Component], n: int, draws: int, generator: MaskGenerator) -> Tensor:
    """(draws, n) independent weight vectors."""
    rng = torch.Generator().manual_seed(generator.key() % 2**63)
    weight = torch.ones(draws, n, dtype=torch.float64)
    for part in components:
        pick = torch.multinomial(part.probability, draws, replacement=True, generator=rng)
        weight[:, part.members] *= part.factor[pick]
    return weight


def _check_masks(count: int) -> None:
    if count > MAX_MASKS:
        raise ValueError(f"{count} masks are too many to enumerate (at most {MAX_MASKS}); give n=10_000 to sample them")


@dataclass(frozen=True)
class AuditReport:
    """What the auditor found.

    Attributes:
        unbiased: whether E[ĝ] = g, exactly (up to rounding) if enumerated, within four standard errors if sampled.
        exact: whether all masks were enumerated.
        masks: how many.
        additive: whether the loss was seen to be a weighted sum over samples with a fixed normaliser.
        full: (P,) g, the full batch's gradient.
        mean: (P,) E[ĝ] or its estimate.
        variance: (P,) of ĝ over masks.
        bias: ‖E[ĝ] − g‖. relative_bias: bias/‖g‖. standard_error: of the bias, 0 if exact.
        variance_inflation: 1 + tr Var_mask[ĝ] / tr Var_batch[g], the latter estimated from the groups' own
            gradients; NaN with fewer than two groups or a loss that is not additive.
        ess: mean effective sample size (Σw)²/Σw².
        rollouts_kept, completions_kept, tokens_kept: expected shares of completions generated, of completions
            updated on, and of completion tokens updated on (NaN without lengths).
    """

    unbiased: bool
    exact: bool
    masks: int
    additive: bool
    full: Float64[Tensor, " params"]
    mean: Float64[Tensor, " params"]
    variance: Float64[Tensor, " params"]
    bias: float
    relative_bias: float
    standard_error: float
    variance_inflation: float
    ess: float
    rollouts_kept: float
    completions_kept: float
    tokens_kept: float

    def to_dict(self) -> dict[str, Any]:
        """The scalars, for JSON."""
        skip = ("full", "mean", "variance")
        return {name: value for name, value in vars(self).items() if name not in skip}


LossFunction = Callable[[Sequence[Tensor], Mapping[str, Any], Tensor], Tensor]


def audit_unbiasedness(
    loss_fn: LossFunction,
    params: Iterable[Tensor],
    batch: Mapping[str, Any],
    cfg: PruningConfig | Design,
    n: Literal["enumerate"] | int = "enumerate",
    *,
    generator: MaskGenerator | torch.Generator | int = 0,
) -> AuditReport:
    """Compares the expected gradient under pruning with the full batch's.

    Args:
        loss_fn: (params, batch, weight (B,)) -> scalar loss of the completions with weight > 0, each weighted; with
            all weights 1 it must be the full batch's loss.
        params: tensors with requires_grad (e.g. `model.parameters()`).
        batch: has "advantages" (B,) and "groups" (a group size, or (B,) ids); optional "lengths" (B,), "prompt_low"
            (one bool a group: which prompts may be skipped), "sample_ids"; anything else is loss_fn's own.
        cfg: the pruning: a PruningConfig, or any `Design` such as those of `dppo.baselines`.
        n: "enumerate" (at most 2^16 masks), or the number of masks to sample.
        generator: of the sampled masks.

    Raises:
        ValueError: too many masks to enumerate, no parameter that requires a gradient, fewer than 2 samples.
    """
    parameters = [p for p in params if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter requires a gradient")
    design = DynamicPruning(cfg) if isinstance(cfg, PruningConfig) else cfg
    components = design.components(batch)
    size = len(batch["advantages"])
    if n == "enumerate":
        probability, weights = enumerate_weights(components, size)
    else:
        if not isinstance(n, int) or n < 2:
            raise ValueError(f"n={n!r}: 'enumerate' or a number of masks >= 2 is needed")
        weights = sample_weights(components, size, n, as_generator(generator).of("audit"))
        probability = torch.full((n,), 1 / n, dtype=torch.float64)

    def gradient(weight: Tensor) -> Tensor:
        loss = loss_fn(parameters, batch, weight.to(parameters[0].dtype))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return torch.cat([g.flatten() for g in parts]).double()

    full = gradient(torch.ones(size))
    per_sample = torch.stack([gradient(row) for row in torch.eye(size)])
    additive = _is_additive(gradient, per_sample, weights, _rounding(parameters))
    mean, variance = _moments(gradient, per_sample if additive else None, probability, weights, len(full))
    rollouts = 1 - sum(
        float((part.probability @ (part.factor == 0).double()).sum()) for part in components if part.saves_rollouts
    ) / max(size, 1)
    return _report(batch, probability, weights, full, mean, variance, n == "enumerate",
                   per_sample if additive else None, _rounding(parameters), rollouts)  # fmt: skip


def _rounding(parameters: Sequence[Tensor]) -> float:
    """Relative size below which a bias is rounding: 1e-12 in double precision, 1e-6 in single, 2e-2 below that."""
    return {torch.float64: 1e-12, torch.float32: 1e-6}.get(parameters[0].dtype, 2e-2)


def _is_additive(
    gradient: Callable[[Tensor], Tensor], per_sample: Tensor, weights: Tensor, rounding: float, probes: int = 8
) -> bool:
    """Whether gradient(w) = Σ w_i gradient(e_i) at some of the masks, spread over them."""
    rows = np.unique(np.linspace(0, len(weights) - 1, probes).astype(int))
    scale = float(per_sample.norm()) * 10 + 1e-300
    return all(float((gradient(weights[r]) - weights[r] @ per_sample).norm()) <= 10 * rounding * scale for r in rows)


def _moments(
    gradient: Callable[[Tensor], Tensor], per_sample: Tensor | None, probability: Tensor, weights: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the estimate over the masks (weighted Welford over chunks)."""
    chunk = max(1, 2**22 // max(size, 1)) if per_sample is not None else 1
    mass, mean, square = 0.0, torch.zeros(size).double(), torch.zeros(size).double()
    for start in range(0, len(weights), chunk):
        p, w = probability[start : start + chunk], weights[start : start + chunk]
        g = w @ per_sample if per_sample is not None else gradient(w[0])[None]
        part = float(p.sum())
        if part == 0:
            continue
        part_mean = (p[:, None] * g).sum(0) / part
        part_square = (p[:, None] * (g - part_mean).square()).sum(0)
        shift, mass = part_mean - mean, mass + part
        mean = mean + shift * (part / mass)
        square = square + part_square + shift.square() * part * (mass - part) / mass
    return mean, square / mass


def _report(
    batch: Mapping[str, Any], probability: Tensor, weights: Tensor, full: Tensor, mean: Tensor, variance: Tensor,
    exact: bool, per_sample: Tensor | None, rounding: float, rollouts: float,
) -> AuditReport:  # fmt: skip
    bias, scale = float((mean - full).norm()), float(full.norm())
    error = 0.0 if exact else float((variance.sum() / (len(weights) - 1)).sqrt())
    allowed = rounding * max(scale, float(variance.sum().sqrt())) + CONFIDENCE * error
    strata = stratify(batch["advantages"], batch["groups"], PruningConfig(free_zeros=False))
    kept = (weights > 0).double()
    total = weights.sum(1)
    ess = torch.nan_to_num(total.square() / weights.square().sum(1))
    lengths = batch.get("lengths")
    tokens = float("nan")
    if lengths is not None and int(lengths.sum()):
        tokens = float(probability @ (kept @ lengths.double())) / float(lengths.sum())
    return AuditReport(
        unbiased=bias <= allowed, exact=exact, masks=len(weights), additive=per_sample is not None,
        full=full, mean=mean, variance=variance, bias=bias,
        relative_bias=bias / scale if scale else (0.0 if bias == 0 else float("inf")),
        standard_error=error, variance_inflation=_inflation(per_sample, strata, variance),
        ess=float(probability @ ess), rollouts_kept=rollouts,
        completions_kept=float(probability @ kept.mean(1)), tokens_kept=tokens,
    )  # fmt: skip


def _inflation(per_sample: Tensor | None, strata: Strata, variance: Tensor) -> float:
    """1 + tr Var_mask / tr Var_batch, where the batch's gradient is a sum of n independent groups' gradients."""
    if per_sample is None or strata.n_groups < 2:
        return float("nan")
    groups = torch.zeros(strata.n_groups, per_sample.shape[1]).double().index_add_(0, strata.group, per_sample)
    batch_variance = float(groups.var(0).sum()) * strata.n_groups
    return 1 + float(variance.sum()) / batch_variance if batch_variance else float("nan")
