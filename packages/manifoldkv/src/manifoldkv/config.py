"""Settings of key-value cache compression, validated at the door."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Metric = Literal["auto", "l2", "cosine", "cosine_mean", "knorm", "decomposed", "random", "streaming"]
Phase = Literal["prefill", "chunked", "decode", "both"]
Allocation = Literal["global", "per_window"]
WindowKind = Literal["tumbling", "sliding"]
Centroid = Literal["all", "evictable"]
Space = Literal["post", "pre"]
HeadBudget = Literal["uniform", "adaptive"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "metric": get_args(Metric),
    "phase": get_args(Phase),
    "allocation": get_args(Allocation),
    "kind": get_args(WindowKind),
    "centroid": get_args(Centroid),
    "space": get_args(Space),
    "head_budget": get_args(HeadBudget),
}
_INTEGERS: dict[str, int] = {"n_sink": 0, "n_recent": 0, "interval": 1, "seed": 0}
_WINDOWED_METRICS = ("auto", "l2", "cosine", "cosine_mean", "decomposed")


@dataclass(frozen=True)
class KVConfig:
    """How a key-value cache is compressed.

    Attributes:
        metric: scorer of the cached keys; see :func:`manifoldkv.score_keys`. ``"auto"`` lets
            :func:`manifoldkv.diagnose` choose between ``"l2"`` and ``"cosine"`` from the geometry of the keys.
        compression_ratio: share ``r`` of the tokens that is *removed*, in [0, 1): ``n = max(int(T (1 - r)), 1)`` of
            ``T`` tokens are kept per head. Exclusive with ``budget``.
        budget: tokens kept per key-value head, an integer >= 1. Exclusive with ``compression_ratio``.
        window: tokens per window for local centroids (WindowedManifoldKV), >= 2; ``None`` uses one global centroid.
        kind: ``"tumbling"`` windows (each key is scored in its own window; a last window shorter than ``window / 2``
            joins the one before) or ``"sliding"`` (centroid of the trailing ``window`` keys).
        allocation: with tumbling windows, ``"global"`` keeps the best of all windows together, ``"per_window"``
            gives each window its proportional share of the budget.
        centroid: ``"all"`` averages every valid key (the paper's rule), ``"evictable"`` leaves the protected ones out.
        n_sink, n_recent: number of first and of last valid tokens that are always kept, inside the budget. Where the
            budget is smaller than both together, the recent ones win, then the earliest sinks. 0 and 0 is the paper's
            rule.
        space: score the keys as cached (``"post"``, after rotary embedding) or un-rotated (``"pre"``).
        head_budget: ``"uniform"`` keeps the same number in every head, ``"adaptive"`` shares a layer's budget among its
            heads.
        phase: when to evict: once after the prompt (``"prefill"``), after each chunk of a prompt (``"chunked"``), while
            decoding (``"decode"``), or after the prompt and while decoding (``"both"``).
        interval: while decoding, evict whenever ``interval`` tokens more than the budget are stored; >= 1.
        seed: of the ``"random"`` metric.
        lambda_rad, lambda_ang, rho0, rho_x: weights and references of the ``"decomposed"`` metric. ``rho0`` is
            ``"centroid"`` (norm of the centroid) or ``"mean"`` (mean key norm), ``rho_x`` is ``"self"`` (each key's own
            norm) or ``"mean"``. The defaults give the squared L2 distance exactly; ``rho0 = rho_x = "mean"`` is the
            radius-calibrated form.
        per_layer: with ``metric="auto"``, choose for each layer by itself rather than once for the model.

    Raises:
        ValueError: a value out of range; the message names the field, the value and what is allowed.
        TypeError: a number of the wrong type.
    """

    metric: Metric = "auto"
    compression_ratio: float | None = None
    budget: int | None = None
    window: int | None = None
    allocation: Allocation = "global"
    n_sink: int = 4
    n_recent: int = 32
    space: Space = "post"
    head_budget: HeadBudget = "uniform"
    phase: Phase = "prefill"
    interval: int = 128
    seed: int = 0
    kind: WindowKind = "tumbling"
    centroid: Centroid = "all"
    lambda_rad: float = 1.0
    lambda_ang: float = 1.0
    rho0: Literal["centroid", "mean"] = "centroid"
    rho_x: Literal["self", "mean"] = "self"
    per_layer: bool = False

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        _check_choice("rho0", self.rho0, ("centroid", "mean"))
        _check_choice("rho_x", self.rho_x, ("self", "mean"))
        for field, low in _INTEGERS.items():
            _check_integer(field, getattr(self, field), low)
        for field in ("lambda_rad", "lambda_ang"):
            _check_number(field, getattr(self, field), 0.0, math.inf)
        self._check_size()
        if self.window is not None:
            _check_integer("window", self.window, 2)
            if self.metric not in _WINDOWED_METRICS:
                raise ValueError(
                    f"window={self.window} has no meaning for metric={self.metric!r}, which uses no centroid; "
                    f"use one of {', '.join(_WINDOWED_METRICS)}, or window=None"
                )
        if self.kind == "sliding":
            self._check_sliding()
        if not isinstance(self.per_layer, bool):
            raise TypeError(f"per_layer={self.per_layer!r} must be True or False, not {type(self.per_layer).__name__}")
        if self.allocation == "per_window" and (self.window is None or self.kind != "tumbling"):
            raise ValueError(
                "allocation='per_window' needs tumbling windows: give window=N (tokens) and kind='tumbling'"
            )
        if self.allocation == "per_window" and self.head_budget == "adaptive":
            raise ValueError("allocation='per_window' and head_budget='adaptive' both divide the budget; choose one")

    def _check_size(self) -> None:
        if self.compression_ratio is not None and self.budget is not None:
            raise ValueError(
                f"compression_ratio={self.compression_ratio} and budget={self.budget} were both given; give one of them"
            )
        if self.compression_ratio is not None:
            _check_number("compression_ratio", self.compression_ratio, 0.0, 1.0)
        if self.budget is not None:
            _check_integer("budget", self.budget, 1)

    def _check_sliding(self) -> None:
        if self.window is None:
            raise ValueError("kind='sliding' needs window=N (tokens); or use kind='tumbling'")
        if self.centroid != "all":
            raise ValueError(
                f"kind='sliding' averages every key of its window, so centroid={self.centroid!r} has no meaning; "
                "use centroid='all'"
            )
        if self.metric == "decomposed":
            raise ValueError("metric='decomposed' needs tumbling windows: use kind='tumbling'")

    def keep_count(self, length: int) -> int:
        """Number of tokens kept per head of ``length`` tokens: ``max(int(T (1 - r)), 1)`` or ``min(budget, T)``.

        With neither ``compression_ratio`` nor ``budget`` set every token is kept. ``length`` 0 gives 0.
        """
        if length < 0:
            raise ValueError(f"length={length} is negative; it is a number of tokens, 0 or more")
        if length == 0:
            return 0
        if self.budget is not None:
            return min(self.budget, length)
        if self.compression_ratio is not None:
            return max(int(length * (1 - self.compression_ratio)), 1)
        return length

    def protected(self, keep: int) -> tuple[int, int]:
        """Protected ``(sinks, recent)`` of ``keep`` kept tokens: the recent first, then the earliest sinks."""
        recent = min(self.n_recent, keep)
        return min(self.n_sink, keep - recent), recent


def _check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(choices)}")


def _check_integer(field: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}={value!r} must be an integer >= {low}, not {type(value).__name__}")
    if value < low:
        raise ValueError(f"{field}={value} must be an integer >= {low}")


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field}={value!r} must be a number in [{low:g}, {high:g}), not {type(value).__name__}")
    if not low <= value < high:  # also refuses NaN
        raise ValueError(f"{field}={value} must be in [{low:g}, {high:g})")
