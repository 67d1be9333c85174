"""Settings of the vLLM plug-in: environment variables, or vLLM's own ``additional_config``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.manifoldkv")

METRICS = ("auto", "l2", "cosine", "cosine_mean", "knorm", "decomposed")
FALLBACK_METRIC = "cosine"
ENV_PREFIX = "MANIFOLDKV_"
CONFIG_KEY = "manifoldkv"
_MINIMUM = {"budget": 0, "sink": 0, "recent": 0, "interval": 1, "window": 2}


@dataclass(frozen=True)
class PluginConfig:
    """What the plug-in keeps of a request's cache, per layer and key-value head.

    Each field ``x`` is read from ``additional_config={"manifoldkv": {"x": ...}}``, else from the environment variable
    ``MANIFOLDKV_X``, else it is the default. ``MANIFOLDKV_BUDGET=0`` turns the plug-in off whatever else is set.

    Attributes:
        budget: tokens kept between the sinks and the recent window; 0 (default) is off. Rounded up to whole blocks.
        metric: ``l2``, ``cosine``, ``cosine_mean``, ``knorm``, ``decomposed`` (here radius-calibrated, as its exact
            form ranks like ``l2``), or ``auto`` (default): the metric named in ``diagnosis``, else ``cosine``.
        sink: first tokens of a request that always stay. Rounded up to whole blocks.
        recent: last tokens that always stay. Rounded up to whole blocks.
        interval: tokens between two evictions; a multiple of vLLM's block size.
        window: score against the centroid of windows of this many stored tokens; unset: one centroid.
        diagnosis: path of a JSON file with a ``"metric"`` entry, as ``manifoldkv diagnose MODEL --json`` prints.

    Raises:
        ValueError: a value out of range or of the wrong kind, or an unknown key; the message names it.
    """

    budget: int = 0
    metric: str = "auto"
    sink: int = 4
    recent: int = 32
    interval: int = 128
    window: int | None = None
    diagnosis: str | None = None

    def __post_init__(self) -> None:
        for field, low in _MINIMUM.items():
            value = getattr(self, field)
            if field == "window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{CONFIG_KEY}: {field}={value!r} must be an integer >= {low} (tokens)")
        if self.metric not in METRICS:
            raise ValueError(f"{CONFIG_KEY}: metric={self.metric!r} is not one of {', '.join(METRICS)}")
        if self.window is not None and self.metric == "knorm":
            raise ValueError(f"{CONFIG_KEY}: window={self.window} has no meaning for metric='knorm'; unset one of them")

    @property
    def enabled(self) -> bool:
        return self.budget > 0

    def resolved_metric(self) -> str:
        """The metric to score with: ``auto`` becomes the diagnosed one, or ``cosine`` with one line in the log."""
        if self.metric != "auto":
            return self.metric
        if self.diagnosis is None:
            logger.warning(
                "manifoldkv: MANIFOLDKV_METRIC is auto and no diagnosis is given; using %s. `manifoldkv diagnose MODEL "
                "--json > FILE` and MANIFOLDKV_DIAGNOSIS=FILE choose the metric that fits the model",
                FALLBACK_METRIC,
            )
            return FALLBACK_METRIC
        return _diagnosed(Path(self.diagnosis))


def _diagnosed(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_KEY}: the diagnosis file {path} can't be read as JSON: {error}") from error
    metric = found.get("metric") if isinstance(found, dict) else None
    if metric not in METRICS or metric == "auto":
        allowed = ", ".join(name for name in METRICS if name != "auto")
        raise ValueError(f'{CONFIG_KEY}: {path} must hold an object with "metric" one of {allowed}; it has {metric!r}')
    return metric


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields that are set in the environment, as PluginConfig takes them. An empty variable counts as unset."""
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for field in fields(PluginConfig):
        name = ENV_PREFIX + field.name.upper()
        text = environ.get(name, "").strip()
        if not text:
            continue
        if field.name in _MINIMUM:
            try:
                found[field.name] = int(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} must be an integer >= {_MINIMUM[field.name]} (tokens)") from None
        else:
            found[field.name] = text
    return found


def resolve(additional_config: Any = None, environ: Mapping[str, str] | None = None) -> PluginConfig:
    """The settings in force: ``additional_config["manifoldkv"]`` over the environment over the defaults."""
    settings = from_environment(environ)
    if settings.get("budget") == 0:
        return PluginConfig()
    given = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config[{CONFIG_KEY!r}] must be an object like {{"budget": 512}}, not {given!r}')
    known = {field.name for field in fields(PluginConfig)}
    if unknown := sorted(set(given) - known):
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] has no setting {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return PluginConfig(**{**settings, **given})
