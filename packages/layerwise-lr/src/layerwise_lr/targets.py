"""The ratios that a measurement asks for."""

from __future__ import annotations

from collections.abc import Mapping

from layerwise_lr.assignment import assign_ratios, shrink
from layerwise_lr.config import LLRConfig
from layerwise_lr.layers import block_of
from layerwise_lr.measurement import LayerReport


def fitted_ratios(reports: Mapping[str, LayerReport], config: LLRConfig) -> dict[str, float]:
    """Ratios of the fitted matrices. A saturated alpha counts as the largest of the others, so that it does not squash
    them.
    """
    fitted = {name: report for name, report in reports.items() if report.fitted}
    values = {name: float(getattr(report, config.metric)) for name, report in fitted.items()}
    if config.metric in ("alpha", "alphahat"):
        top = max((v for name, v in values.items() if not fitted[name].saturated), default=config.alpha_max)
        values = {name: top if fitted[name].saturated else value for name, value in values.items()}
    if config.shrink:
        values = shrink(values, {name: fitted[name].sigma for name in values})
    blocks = block_of if config.within_block else None
    return assign_ratios(values, config.s1, config.s2, config.assign, inverse=config.inverse, block_of=blocks)


def embedding_ratio(fitted: Mapping[str, float], config: LLRConfig) -> float:
    """Of embeddings and head, which are not fitted: that of the largest alpha, the base rate, or a given one."""
    if not isinstance(config.embed, str):
        return config.embed
    if config.embed == "base" or not fitted:
        return 1.0
    return min(fitted.values()) if config.inverse else max(fitted.values())
