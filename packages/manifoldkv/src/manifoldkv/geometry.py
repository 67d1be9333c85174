"""Which metric suits a model: the geometry of its key norms and directions.

The paper (arXiv 2602.08343) says that the best metric depends on key-norm geometry; its exact guideline isn't public.
The rule here follows from the identity ``||k - mu||^2 = (rho - m)^2 + 2 rho m (1 - cos theta)`` with ``rho = ||k||``
and ``m = ||mu||``: L2 adds what the radius says to what the angle says. It wins where the radius carries signal (a
heavy upper tail of norms, or radius and angle voting the same way) and loses where the two disagree.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from manifoldkv.selection import keep_mask

SKIPPED_TOKENS = 4  # attention sinks have norms of their own and would dominate the tails
_LEAST_TOKENS = 8


class TooFewTokensError(ValueError):
    """Fewer valid tokens than the statistics of a diagnosis need."""


@dataclass(frozen=True)
class DiagnoseRule:
    """Constants of the choice between ``"l2"`` and ``"cosine"``, applied in this order to the median over heads.

    Attributes:
        flat_cv: ``cv`` below it: all norms alike, the metrics rank alike, ``"l2"`` is the cheaper.
        tail, tail_ratio: ``upper > tail`` and ``upper > tail_ratio * lower``: radial outliers carry signal, ``"l2"``.
        agreement: ``agree`` at least this: radius and angle vote the same way, ``"l2"``. Else ``"cosine"``.
        min_tokens: fewer calibration tokens than this give a warning.
    """

    flat_cv: float = 0.05
    tail: float = 3.0
    tail_ratio: float = 1.5
    agreement: float = 0.1
    min_tokens: int = 256

    def choose(self, cv: float, agree: float, upper: float, lower: float) -> tuple[Literal["l2", "cosine"], str]:
        """The metric and the rule that fired, in words."""
        if cv < self.flat_cv:
            return (
                "l2",
                f"key norms are nearly constant (cv {cv:.3f} < {self.flat_cv}): the metrics rank alike, L2 is cheapest",
            )
        if upper > self.tail and upper > self.tail_ratio * lower:
            return "l2", (
                f"key norms have a heavy upper tail (upper {upper:.2f} > {self.tail} and > {self.tail_ratio} x lower "
                f"{lower:.2f}): radial outliers carry signal"
            )
        if agree >= self.agreement:
            return "l2", f"radius and angle vote the same way (agree {agree:.2f} >= {self.agreement})"
        return "cosine", (
            f"radius and angle disagree (agree {agree:.2f} < {self.agreement}) and the norms have no heavy upper tail "
            f"(upper {upper:.2f}): distance would favour the wrong keys"
        )


@dataclass(frozen=True)
class Geometry:
    """Key geometry of one layer, or the median over a model's heads.

    Attributes:
        cv: ``std(rho) / mean(rho)`` of the key norms.
        agree: Spearman correlation of ``rho`` with ``-cos(k, a)``, ``a`` the mean unit key.
        upper, lower: tails of ``rho`` in quartile ranges: ``(q99 - q50) / (q75 - q25)``, ``(q50 - q1) / (q75 - q25)``.
        overlap: share of tokens that the L2 and cosine selections at ratio 0.5 have in common.
        metric, reason: what :class:`DiagnoseRule` chose and why.
    """

    cv: float
    agree: float
    upper: float
    lower: float
    overlap: float
    metric: Literal["l2", "cosine"]
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Result of :func:`diagnose`: the model's choice, each layer's own, and the number of calibration tokens."""

    model: Geometry
    layers: tuple[Geometry, ...]
    tokens: int

    @property
    def metric(self) -> Literal["l2", "cosine"]:
        """The metric chosen for the whole model."""
        return self.model.metric

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"metric": self.metric, **asdict(self)}


def diagnose(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, rule: DiagnoseRule | None = None
) -> Diagnosis:
    """Run a causal language model once over calibration tokens and choose the metric for it.

    Args:
        model: a transformers causal language model; called with ``use_cache=True`` and a fresh cache.
        input_ids: ``[B, T]`` calibration tokens, best 256 or more of the text the model will see.
        attention_mask: ``[B, T]``, 0 at left padding.
        rule: other constants than the defaults.

    Raises:
        ValueError: fewer than 12 tokens (:class:`TooFewTokensError`), or a model whose cache holds no full-attention
            keys.
    """
    with torch.no_grad():
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
    cache = output.past_key_values
    layers = [
        layer.keys
        for layer in getattr(cache, "layers", [])
        if not getattr(layer, "is_sliding", False) and isinstance(getattr(layer, "keys", None), Tensor)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} returned a cache without full-attention keys: nothing to diagnose")
    return diagnose_keys(layers, attention_mask, rule)


@torch.no_grad()
def diagnose_keys(
    layers: Sequence[Float[Tensor, "batch heads tokens dim"]],
    mask: Shaped[Tensor, "batch tokens"] | None = None,
    rule: DiagnoseRule | None = None,
) -> Diagnosis:
    """:func:`diagnose` on keys at hand, one tensor a layer. The first 4 valid tokens of each row are left out."""
    if not layers:
        raise ValueError("no layers given: diagnose needs the keys of at least one")
    rule = rule or DiagnoseRule()
    rows: list[list[Tensor]] = [_head_statistics(keys, mask) for keys in layers]
    geometries = tuple(_summarise(torch.cat(stats), rule) for stats in rows)
    tokens = _valid_tokens(layers[0], mask)
    if tokens < rule.min_tokens:
        warnings.warn(
            f"the metric is chosen from {tokens} tokens; {rule.min_tokens} or more make the choice reliable",
            stacklevel=2,
        )
    return Diagnosis(_summarise(torch.cat([s for stats in rows for s in stats]), rule), geometries, tokens)


def _valid_tokens(keys: Tensor, mask: Tensor | None) -> int:
    return keys.shape[0] * keys.shape[2] if mask is None else int(mask.bool().sum())


def _head_statistics(keys: Tensor, mask: Tensor | None) -> list[Tensor]:
    """One ``[H, 5]`` tensor (cv, agree, upper, lower, overlap) per batch row with enough valid tokens."""
    found = []
    for row in range(keys.shape[0]):
        valid = keys[row] if mask is None else keys[row][:, mask[row].bool().to(keys.device)]
        valid = valid[:, valid.isfinite().all(-1).all(0)]  # a faulty token says nothing about the geometry
        if valid.shape[1] >= SKIPPED_TOKENS + _LEAST_TOKENS:
            found.append(_row_statistics(valid[:, SKIPPED_TOKENS:].float()))
    if not found:
        raise TooFewTokensError(
            f"{keys.shape[2]} tokens are too few to diagnose; give at least {SKIPPED_TOKENS + _LEAST_TOKENS} valid "
            "ones a row"
        )
    return found


def _row_statistics(keys: Float[Tensor, "heads tokens dim"]) -> Float[Tensor, "heads statistics"]:
    radius = keys.norm(dim=-1)
    unit = keys / radius.clamp(min=1e-12)[..., None]
    anchor = torch.nn.functional.normalize(unit.mean(1, keepdim=True), dim=-1)
    away = -(unit * anchor).sum(-1)
    distance = (keys - keys.mean(1, keepdim=True)).norm(dim=-1)
    q1, q25, q50, q75, q99 = torch.quantile(radius, radius.new_tensor([0.01, 0.25, 0.5, 0.75, 0.99]), dim=-1)
    spread = (q75 - q25).clamp(min=1e-12)
    half = max(keys.shape[1] // 2, 1)
    both = (keep_mask(distance, half) & keep_mask(away, half)).sum(-1) / half
    cv = radius.std(-1, correction=0) / radius.mean(-1).clamp(min=1e-12)
    return torch.stack((cv, _spearman(radius, away), (q99 - q50) / spread, (q50 - q1) / spread, both), dim=-1)


def _spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation along the last axis; 0 where one side is constant."""
    ranks = [x.argsort(dim=-1, stable=True).argsort(dim=-1).double() for x in (a, b)]
    centred = [r - r.mean(-1, keepdim=True) for r in ranks]
    norm = centred[0].norm(dim=-1) * centred[1].norm(dim=-1)
    constant = (a.amax(-1) == a.amin(-1)) | (b.amax(-1) == b.amin(-1))
    return ((centred[0] * centred[1]).sum(-1) / norm.clamp(min=1e-12)).masked_fill(constant, 0).float()


def _summarise(heads: Float[Tensor, "heads statistics"], rule: DiagnoseRule) -> Geometry:
    cv, agree, upper, lower, overlap = heads.quantile(
        0.5, dim=0
    ).tolist()  # the mean of the middle two of an even number
    metric, reason = rule.choose(cv, agree, upper, lower)
    return Geometry(cv, agree, upper, lower, overlap, metric, reason)
