"""Presses: the scorers in the shape that NVIDIA's kvpress (Apache-2.0) uses, with or without it installed.

Where kvpress is importable they are ``ScorerPress`` subclasses, so its wrappers (``AdaKVPress``, ``BlockPress``,
``DecodingPress``), pipeline and leaderboard script take them. Where it isn't, a small base with the same behaviour
serves ``with press(model): ...`` on transformers >= 5.16, which kvpress 0.5 doesn't run on.
"""

from __future__ import annotations

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from manifoldkv.config import KVConfig
from manifoldkv.kernels import gather_kv
from manifoldkv.scoring import score_keys
from manifoldkv.selection import select

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn")  # an attention layer has one of them
_CACHE_NAMES = ("past_key_values", "layer_past")  # how an attention layer's forward calls its cache


class Press(ABC):
    """What these presses do by themselves, with kvpress or without: select in order, and know a prompt when they see
    one.

    ``compression_ratio`` is the share removed. A forward is a prompt when the layer's cache was empty before it.
    """

    compression_ratio: float

    @abstractmethod
    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        """Scores ``[B, H, T]`` of the cached keys ``[B, H, T, D]``, higher is kept."""

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> tuple[Tensor, Tensor]:
        """The kept keys and values, in their original order."""
        kept = KVConfig(compression_ratio=self.compression_ratio).keep_count(keys.shape[2])
        if self.compression_ratio == 0:
            return keys, values
        indices = select(self.score(module, hidden_states, keys, values, attentions, kwargs), kept)
        return gather_kv(keys, values, indices, check=False)

    def forward_hook(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Compress one layer's cache after its prompt was attended."""
        cache = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if cache is None:
            return output
        layer = cache.layers[module.layer_idx]  # type: ignore[index]
        if getattr(layer, "is_sliding", False):  # bounded already
            return output
        if layer.keys.shape[2] != hidden_states.shape[1]:  # tokens were cached before this forward: not the prompt
            return output
        _refuse_padding(kwargs.get("attention_mask"))
        attentions = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if type(layer).__name__.endswith("QuantizedLayer"):
            raise ValueError("a quantised cache can't be compressed by a press; use a DynamicCache")
        layer.keys, layer.values = self.compress(module, hidden_states, layer.keys, layer.values, attentions, kwargs)
        return output


def _refuse_padding(mask: Tensor | None) -> None:
    """A press can't tell padding from tokens, and the shorter cache would slide under the model's 2-D mask."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return
    last = mask if mask.ndim == 2 else mask[:, :, -1]  # the last query attends all that isn't padding
    if bool((last < 0).any() if last.is_floating_point() else (last == 0).any()):
        raise ValueError("a press can't serve a padded batch; use manifoldkv.compress, or prompts of equal length")


class LocalPress(Press):
    """A press where kvpress isn't there: hooks on the attention layers, for as long as the ``with`` lasts."""

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        """Compress the prompts that run inside the ``with``."""
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is an encoder-decoder: use manifoldkv.compress instead of a press"
            )
        hooks = [
            module.register_forward_hook(self.forward_hook, with_kwargs=True)
            for module in model.modules()
            if getattr(module, "layer_idx", None) is not None
            and any(hasattr(module, name) for name in _KEY_PROJECTIONS)
        ]
        if not hooks:
            raise ValueError(
                f"{type(model).__name__} has no attention layers that a press knows; use manifoldkv.compress instead"
            )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _base() -> type:
    """:class:`Press` on kvpress's ``ScorerPress`` where that imports, else :class:`LocalPress`."""
    try:
        from kvpress.presses.scorer_press import ScorerPress
    except ImportError as error:
        if importlib.util.find_spec("kvpress") is not None:  # it pins an older transformers than may be there
            warnings.warn(
                f"kvpress is installed but can't be imported ({error}); presses work alone, without its wrappers",
                stacklevel=2,
            )
        return LocalPress

    class KVPress(Press, ScorerPress):
        """Known to kvpress, compressing as :class:`Press` does."""

    return KVPress


_Base: Any = _base()


@dataclass
class ManifoldKVPress(_Base):
    """Keep the keys farthest from the centroid of their head (arXiv 2602.08343).

    Args:
        compression_ratio: share of the tokens removed, in [0, 1).
        metric: a metric of :func:`manifoldkv.score_keys`; ``"l2"`` is the paper's.
        n_sink, n_recent: first and last tokens always kept, inside the budget; 0 and 0 is the paper's rule.

    Raises:
        ValueError: a value out of range.
    """

    compression_ratio: float = 0.0
    metric: str = "l2"
    n_sink: int = 0
    n_recent: int = 0

    def __post_init__(self) -> None:
        self._config()

    def _config(self) -> KVConfig:
        return KVConfig(
            metric=self.metric,  # type: ignore[arg-type]
            compression_ratio=self.compression_ratio,
            n_sink=self.n_sink,
            n_recent=self.n_recent,
        )

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        """Scores ``[B, H, T]`` of the cached keys."""
        return score_keys(keys, self._config(), layer=int(getattr(module, "layer_idx", 0) or 0))


@dataclass
class WindowedManifoldKVPress(ManifoldKVPress):
    """:class:`ManifoldKVPress` with a centroid per window of ``window`` tokens (WindowedManifoldKV)."""

    window: int = 4096

    def _config(self) -> KVConfig:
        return replace(super()._config(), window=self.window)


__all__ = ["LocalPress", "ManifoldKVPress", "WindowedManifoldKVPress"]
