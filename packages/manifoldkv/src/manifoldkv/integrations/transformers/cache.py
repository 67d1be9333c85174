"""A transformers cache that forgets the tokens nearest the key centroid."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from manifoldkv.config import KVConfig
from manifoldkv.geometry import DiagnoseRule, Diagnosis, TooFewTokensError, diagnose_keys
from manifoldkv.integrations.transformers.layer import LayerStats, ManifoldLayer
from manifoldkv.integrations.transformers.ragged import RaggedLayer
from manifoldkv.integrations.transformers.rotary import rotary_of
from manifoldkv.integrations.transformers.saved import load_cache, save_cache

_BY_SLOT = {  # attention depends on the slot of a key rather than on its position: eviction would shift it
    "bloom",
    "cpmant",
    "gpt_neo",
    "longt5",
    "mpt",
    "mt5",
    "pop2piano",
    "prophetnet",
    "switch_transformers",
    "t5",
    "udop",
    "umt5",
    "xlnet",
}
_WITHOUT_CACHE = {"reformer", "rwkv", "xlstm"}


class UnsupportedModelError(ValueError):
    """The model's attention or cache can't be compressed by eviction; the message names what stands in the way."""


class MetricChoice:
    """The metric of a model or of each layer; with ``"auto"``, chosen from the first prompt's own keys.

    Kept across caches by :func:`manifoldkv.compress`, so that all prompts inside one ``with`` use the same metric once
    a prompt long enough has been seen.
    """

    def __init__(self, cfg: KVConfig, rule: DiagnoseRule | None = None):
        self.cfg, self.rule = cfg, rule or DiagnoseRule()
        self.diagnosis: Diagnosis | None = None
        self.settled: str | None = None if cfg.metric == "auto" else cfg.metric

    def of_model(self, layers: list[ManifoldLayer]) -> str:
        """Choose once from the keys of all layers."""
        if self.settled is None:
            self.diagnosis = self._diagnose(layers)
            if self.diagnosis is None:
                return "l2"
            if self.diagnosis.tokens < self.rule.min_tokens:
                return self.diagnosis.metric  # too short a prompt to settle it for the next ones
            self.settled = self.diagnosis.metric
        return self.settled

    def of_layer(self, layer: ManifoldLayer) -> str:
        """Choose for one layer from its own keys."""
        found = self._diagnose([layer])
        return "l2" if found is None else found.metric

    def _diagnose(self, layers: list[ManifoldLayer]) -> Diagnosis | None:
        """``None``, with a warning, where a prompt has fewer tokens than the statistics need."""
        try:
            return diagnose_keys([layer.keys for layer in layers], layers[0].valid_mask(), self.rule)
        except TooFewTokensError as error:
            warnings.warn(
                f"metric='auto' can't be chosen from so short a prompt ({error}); the paper's 'l2' is used for it",
                stacklevel=2,
            )
            return None


class ManifoldCache(Cache):
    """Drop-in ``past_key_values`` that keeps ``n`` tokens per key-value head of every full-attention layer.

    Layers that are sliding, chunked or linear by the model's ``layer_types`` keep transformers' own class. No hooks:
    pass it to ``forward`` or ``generate``. A cache serves one batch; make a fresh one for the next.

    Args:
        config: of the model (or of its decoder).
        cfg: what to keep; ``compression_ratio`` or ``budget`` must be set.
        padding_mask: ``[B, T]`` of a left-padded batch, 1 where valid. :func:`manifoldkv.compress` reads it from the
            call.
        choice: shared metric choice, used by :func:`manifoldkv.compress`.
        per_head: the caller runs the model with the per-head attention that ``head_budget="adaptive"`` needs; set by
            :func:`manifoldkv.compress`.
        trace: keep each layer's scores at the first eviction, for ``explain``.

    Raises:
        UnsupportedModelError: no full-attention layer, latent (MLA) or indexed attention, or a bias by slot (ALiBi,
            T5).
        ValueError: neither ratio nor budget, or a budget beyond the model's context.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cfg: KVConfig,
        padding_mask: Tensor | None = None,
        choice: MetricChoice | None = None,
        per_head: bool = False,
        trace: bool = False,
    ):
        if not isinstance(cfg, KVConfig):
            raise TypeError(f"cfg must be a KVConfig, not {type(cfg).__name__}")
        decoder = config.get_text_config(decoder=True)
        check_supported(decoder, cfg)
        if cfg.head_budget == "adaptive" and not per_head:
            raise ValueError(
                "head_budget='adaptive' needs a mask per head, which compress(model, ...) installs; use it"
            )
        kind_of_layer = RaggedLayer if cfg.head_budget == "adaptive" else ManifoldLayer
        self.cfg = cfg
        self.model_config = decoder
        self.choice = choice or MetricChoice(cfg)
        self.padding_mask: Tensor | None = None
        rotary = rotary_of(decoder) if cfg.space == "pre" else None
        layers = _stock_layers(decoder)
        for index, stock in enumerate(layers):
            if type(stock) is DynamicLayer:
                layers[index] = kind_of_layer(cfg, index, self._metric_for, self._padding_of_step, rotary)
        for layer in layers:
            if isinstance(layer, ManifoldLayer):
                layer.tracing = trace
        super().__init__(layers=layers)
        if padding_mask is not None:
            self.set_padding_mask(padding_mask)

    # -- padding ------------------------------------------------------------------------------------------------------

    def set_padding_mask(self, mask: Tensor | None) -> None:
        """Note which columns of the batch are padding, ``[B, T]`` with 0 there; only left padding can be served."""
        if mask is None:
            self.padding_mask = None
            return
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
            raise ValueError(
                f"attention_mask has {got}; compression needs the 2-D mask [batch, tokens] with 1 at tokens"
            )
        valid = mask.bool()
        if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
            raise ValueError(
                "attention_mask has 0 after 1 (right padding or a hole): compression needs left padding; set "
                "tokenizer.padding_side='left' and tokenise again"
            )
        self.padding_mask = None if bool(valid.all()) else valid

    def _padding_of_step(self, start: int, step: int, keys: Tensor) -> Tensor | None:
        """Padding slots per row among the columns ``[start, start + step)``; ``None`` where there is no padding."""
        if self.padding_mask is None:
            return None
        if self.padding_mask.shape[0] != keys.shape[0]:
            raise ValueError(
                f"the padding mask has {self.padding_mask.shape[0]} rows, but the step has {keys.shape[0]}; "
                "give the mask of this batch"
            )
        return (~self.padding_mask[:, start : start + step]).sum(-1).to(keys.device)

    # -- metric -------------------------------------------------------------------------------------------------------

    @property
    def manifold_layers(self) -> list[ManifoldLayer]:
        """The layers that are compressed."""
        return [layer for layer in self.layers if isinstance(layer, ManifoldLayer)]

    def _metric_for(self, layer: ManifoldLayer) -> str | None:
        """Metric of a layer that wants to evict now; ``None`` defers it to the end of the step.

        ``"auto"`` chooses for the whole model and so must have seen the keys of every layer.
        """
        if layer.evictions and layer.metric_used != "auto":
            return layer.metric_used
        if layer.choose is not None:
            return layer.label
        if self.choice.settled is not None:
            return self.choice.settled
        if self.cfg.per_layer:
            return self.choice.of_layer(layer)
        return None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a step's keys and values to a layer; returns all that the step attends."""
        full = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layers = self.manifold_layers
        if layers and self.layers[layer_idx] is layers[-1]:
            waiting = [layer for layer in layers if layer.waiting is not None]
            if waiting:
                metric = self.choice.of_model(waiting)
                for layer in waiting:
                    layer.evict(layer.waiting or 1, metric)
        return full

    # -- from and to elsewhere ----------------------------------------------------------------------------------------

    @classmethod
    def from_dense(
        cls,
        dense: DynamicCache,
        config: PreTrainedConfig,
        cfg: KVConfig,
        padding_mask: Tensor | None = None,
        choice: MetricChoice | None = None,
        choose: Callable[[int, Tensor], Tensor] | None = None,
        label: str = "custom",
    ) -> ManifoldCache:
        """Compress a prompt that was prefilled into a ``DynamicCache``, which stays as it is.

        The result equals a prefill into a :class:`ManifoldCache`, since eviction runs after the prompt's attention; so
        one prefill serves any number of settings.

        Args:
            choose: another rule than the metric: from ``(layer index, keys [B, H, T, D])`` to ascending indices
                ``[B, H, n]``.
            label: what ``stats`` calls that rule.
        """
        cache = cls(config, cfg, padding_mask, choice)
        if len(dense.layers) != len(cache.layers):
            raise ValueError(f"the dense cache has {len(dense.layers)} layers, the model {len(cache.layers)}")
        for index, layer in enumerate(dense.layers):
            own = cache.layers[index]
            if isinstance(own, ManifoldLayer):
                own.choose, own.label = choose, label
                cache.update(layer.keys, layer.values, index)
            else:
                cache.layers[index] = copy.deepcopy(layer)
        return cache

    @classmethod
    def stack(cls, caches: Sequence[ManifoldCache]) -> ManifoldCache:
        """The rows of several caches of one model in one cache, to decode them as a batch.

        Raises:
            ValueError: caches of different logical or stored lengths, with padding, or with budgets per head.
        """
        first = caches[0]
        lengths = {tuple((layer.logical, layer.stored) for layer in cache.manifold_layers) for cache in caches}
        if len(lengths) > 1 or any(
            cache.padding_mask is not None or cache.cfg.head_budget == "adaptive" for cache in caches
        ):
            raise ValueError("only caches of equal lengths, without padding and with uniform budgets can be stacked")
        stacked = copy.copy(first)
        stacked.layers = [copy.copy(layer) for layer in first.layers]
        for index, layer in enumerate(stacked.layers):
            parts = [cache.layers[index] for cache in caches]
            layer.keys = torch.cat([part.keys for part in parts])
            layer.values = torch.cat([part.values for part in parts])
            if isinstance(layer, ManifoldLayer):
                layer.positions = torch.cat([part.stored_positions() for part in parts])
        return stacked

    def save(self, path: str | Path) -> Path:
        """Write the cache to a safetensors file; see :func:`~manifoldkv.integrations.transformers.saved.save_cache`."""
        return save_cache(self, path)

    @staticmethod
    def load(path: str | Path, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> ManifoldCache:
        """Read a saved cache; see :func:`~manifoldkv.integrations.transformers.saved.load_cache`."""
        return load_cache(path, config, dtype)

    # -- reports ------------------------------------------------------------------------------------------------------

    def stats(self) -> list[LayerStats]:
        """One entry per compressed layer."""
        return [layer.stats() for layer in self.manifold_layers]

    def reset(self) -> None:
        super().reset()
        self.padding_mask = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from every layer, or from none.

        Raises:
            CacheTrimError: some layer has evicted tokens that the crop would bring back.
        """
        layers = self.manifold_layers
        for layer in layers:
            layer.check_crop(tokens_to_remove)
        for layer in self.layers:  # stock layers have reasons of their own to refuse
            if not isinstance(layer, ManifoldLayer):
                layer.crop(tokens_to_remove)
        for layer in layers:
            layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask.index_select(0, beam_idx.to(self.padding_mask.device))


def check_supported(decoder: PreTrainedConfig, cfg: KVConfig) -> None:
    """Refuse a model or a budget that can't be served, by name."""
    if cfg.compression_ratio is None and cfg.budget is None:
        raise ValueError(
            "nothing to compress to: give compression_ratio (share removed) or budget (tokens kept per head)"
        )
    context = getattr(decoder, "max_position_embeddings", None)
    if cfg.budget is not None and isinstance(context, int) and cfg.budget > context:
        raise ValueError(
            f"budget={cfg.budget} is larger than the model's context of {context} tokens, so nothing would ever be "
            f"evicted; give a budget in [1, {context}]"
        )
    kind = decoder.model_type
    if kind in _BY_SLOT or getattr(decoder, "alibi", False):
        raise UnsupportedModelError(
            f"{kind}: attention depends on the slot of a key (ALiBi, relative buckets or a local window), which "
            "eviction would shift"
        )
    if kind in _WITHOUT_CACHE or getattr(decoder, "num_hidden_layers", None) is None:
        raise UnsupportedModelError(
            f"{kind} doesn't keep its state in a transformers Cache: there is nothing to compress"
        )
    if kind == "mllama_text_model":
        raise UnsupportedModelError(f"{kind}: cross-attention shares the cache, so its layers differ in length")
    if getattr(decoder, "kv_lora_rank", None):
        raise NotImplementedError(
            f"{kind}, layer 0: latent (MLA) caches aren't supported; eviction needs per-head keys"
        )
    layers = _stock_layers(decoder)
    names = getattr(decoder, "layer_types", None) or [
        "sliding_attention" if getattr(layer, "is_sliding", False) else type(layer).__name__ for layer in layers
    ]
    for index, layer in enumerate(layers):
        if isinstance(layer, DynamicLayer) and type(layer) is not DynamicLayer and not layer.is_sliding:
            raise UnsupportedModelError(
                f"{kind}, layer {index}: cache type {names[index]!r} holds more than keys and values"
            )
    if all(type(layer) is not DynamicLayer for layer in layers):
        raise UnsupportedModelError(
            f"{kind} has no full-attention layer (its layers are {', '.join(sorted(set(names)))}): there is nothing to "
            "compress"
        )


def _stock_layers(decoder: PreTrainedConfig) -> list[Any]:
    """The layers of transformers' own cache for this model; those of full attention are exactly ``DynamicLayer``."""
    try:
        return DynamicCache(config=decoder).layers
    except KeyError as error:
        raise UnsupportedModelError(f"{decoder.model_type}: cache type {error} isn't supported") from error


__all__ = ["ManifoldCache", "MetricChoice", "UnsupportedModelError", "check_supported"]
