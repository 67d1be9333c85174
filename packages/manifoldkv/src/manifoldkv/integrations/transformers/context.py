"""``with compress(model, ...)``: every generation inside runs on a compressed cache."""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from dataclasses import fields
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from manifoldkv.config import KVConfig
from manifoldkv.geometry import Diagnosis
from manifoldkv.integrations.transformers.cache import (
    ManifoldCache,
    MetricChoice,
    UnsupportedModelError,
    check_supported,
)
from manifoldkv.integrations.transformers.explain import Explanation, explain
from manifoldkv.integrations.transformers.layer import LayerStats
from manifoldkv.integrations.transformers.ragged import CURRENT, register_attention

_ACTIVE = "_manifoldkv_active"
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def compress(model: nn.Module, cfg: KVConfig | None = None, *, trace: bool = False, **settings: Any) -> Compression:
    """Compress the key-value cache of everything the model generates inside a ``with``.

    ::

        with compress(model, compression_ratio=0.5, metric="auto") as kv:
            out = model.generate(**inputs)
        print(kv.stats())

    Works for ``model.generate``, pipelines on top of it, and bare ``model(...)`` calls; a call that brings no cache (or
    an empty ``DynamicCache``) gets a fresh :class:`ManifoldCache`, one that brings a ``ManifoldCache`` keeps it.
    Left-padded batches are served from the call's ``attention_mask``.

    Args:
        model: a transformers decoder or encoder-decoder (whose cross-attention stays untouched), or a PEFT wrapper of
            one.
        cfg: a :class:`KVConfig`; or give its fields as keyword arguments.
        trace: keep the scores of the prompt (12 bytes a token and head), so that ``kv.explain`` can show them.

    Raises:
        ValueError: no ratio and no budget, a value out of range, an unsupported model (:class:`UnsupportedModelError`);
            and, inside: an empty prompt, right padding, a 4-D mask, another kind of cache, assisted generation.
        RuntimeError: the model is already inside a ``compress``.
    """
    if cfg is not None and settings:
        raise ValueError(f"give either cfg or single settings, not both (got cfg and {', '.join(sorted(settings))})")
    known = {field.name for field in fields(KVConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return Compression(model, KVConfig(**settings) if cfg is None else cfg, trace)


class Compression:
    """The ``with`` object of :func:`compress`: swaps caches while active, restores the model on the way out."""

    def __init__(self, model: nn.Module, cfg: KVConfig, trace: bool = False):
        given: Any = model
        self.model: Any = given.get_base_model() if hasattr(given, "get_base_model") else given
        if not hasattr(self.model, "config") or not hasattr(self.model.config, "get_text_config"):
            raise TypeError(f"compress() takes a transformers model, not {type(model).__name__}")
        if not isinstance(cfg, KVConfig):
            raise TypeError(f"cfg must be a KVConfig, not {type(cfg).__name__}")
        accepted = inspect.signature(self.model.forward).parameters
        if "input_ids" in accepted and "past_key_values" not in accepted:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} takes no past_key_values: there is nothing to compress"
            )
        self.cfg = cfg
        self._config = self.model.config.get_text_config(decoder=True)
        check_supported(self._config, cfg)
        if cfg.head_budget == "adaptive":
            self._check_per_head()
        self.choice = MetricChoice(cfg)
        self.cache: ManifoldCache | None = None
        self._trace = trace
        self._read: list[Tensor | None] = []  # token ids that the cache has seen up to its first eviction, for explain
        self._undo = ExitStack()

    def _check_per_head(self) -> None:
        used = self.model.config._attn_implementation
        if used != "sdpa" or getattr(self._config, "attn_logit_softcapping", None):
            raise ValueError(
                f"head_budget='adaptive' masks each head by itself and needs plain attention with "
                f"attn_implementation='sdpa', not {used!r}{' with soft-capping' if used == 'sdpa' else ''}; "
                "use head_budget='uniform'"
            )
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                "head_budget='adaptive' isn't defined for encoder-decoder models; use head_budget='uniform'"
            )

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Compression:
        if getattr(self.model, _ACTIVE, False):
            raise RuntimeError(
                "this model is already inside compress(); nested compression isn't defined, leave the outer one first"
            )
        with ExitStack() as undo:  # a failure on the way in undoes what was done so far
            setattr(self.model, _ACTIVE, True)
            undo.callback(delattr, self.model, _ACTIVE)
            undo.callback(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
            undo.callback(CURRENT.set, None)
            if hasattr(self.model, "generate"):
                self._patch_generate(undo)
            if self.cfg.head_budget == "adaptive":
                self._install_per_head_attention(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _install_per_head_attention(self, undo: ExitStack) -> None:
        usual = self.model.config._attn_implementation
        self.model.set_attn_implementation(register_attention())
        undo.callback(self.model.set_attn_implementation, usual)

    def _patch_generate(self, undo: ExitStack) -> None:
        original = self.model.generate
        own = self.model.__dict__.get("generate")
        settings = self.model.generation_config

        @functools.wraps(original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            self._check_generate({**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs})
            return original(*args, **kwargs)

        def restore() -> None:
            del self.model.generate
            if own is not None:
                self.model.generate = own

        self.model.generate = generate
        undo.callback(restore)
        if getattr(settings, "cache_implementation", None) is not None:  # some checkpoints ask for a static cache
            undo.callback(setattr, settings, "cache_implementation", settings.cache_implementation)
            settings.cache_implementation = None

    def _check_generate(self, given: dict[str, Any]) -> None:
        settings = given.get("generation_config") or self.model.generation_config

        def setting(name: str) -> Any:
            return given.get(name, getattr(settings, name, None))

        assisted = [name for name in _ASSISTED if setting(name)]
        if assisted:
            raise ValueError(
                "assisted generation rolls the cache back past evicted tokens, so it can't run on a compressed cache; "
                f"drop {' and '.join(assisted)}"
            )
        implementation = setting("cache_implementation")
        if implementation is not None:
            raise ValueError(f"cache_implementation={implementation!r} can't be combined with compress(); leave it out")
        for name in ("inputs", "input_ids", "inputs_embeds"):
            _refuse_empty(given.get(name))
            if setting("prefill_chunk_size") and hasattr(given.get(name), "shape"):
                self._check_chunks(setting("prefill_chunk_size"), given[name].shape[1])

    def _check_chunks(self, size: int, length: int) -> None:
        phase = self.cfg.phase
        if size >= length or phase == "chunked" or (phase == "decode" and self.cfg.budget is not None):
            return
        why = (
            "takes its share of the whole; use a budget"
            if phase == "decode"
            else "evicts once after all of it; use prefill in one go"
        )
        raise ValueError(f"prefill_chunk_size={size} splits the prompt, but phase={phase!r} {why}, or phase='chunked'")

    # -- each forward -------------------------------------------------------------------------------------------------

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if kwargs.get("use_cache") is False:
            return (), kwargs
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        for name in (f"{prefix}input_ids", f"{prefix}inputs_embeds"):
            _refuse_empty(kwargs.get(name))
        cache = self._cache_for(kwargs.get("past_key_values"))
        kwargs["past_key_values"] = cache[0]
        mask = kwargs.get(f"{prefix}attention_mask")
        if mask is not None:
            cache[1].set_padding_mask(mask)
        if self._trace:
            if cache[1] is not self.cache:
                self._read = []
            if all(layer.trace is None for layer in cache[1].manifold_layers):
                self._read.append(kwargs.get(f"{prefix}input_ids"))
        self.cache = cache[1]
        CURRENT.set(cache[1])
        return (), kwargs

    def _cache_for(self, given: Any) -> tuple[Cache, ManifoldCache]:
        """The cache to run with and the compressed cache in it."""
        if isinstance(given, ManifoldCache):
            if given.cfg.head_budget == "adaptive" != self.cfg.head_budget:
                raise ValueError(
                    "the given cache has budgets per head; run it inside compress(model, head_budget='adaptive', ...)"
                )
            return given, given
        if isinstance(given, EncoderDecoderCache):
            if not isinstance(given.self_attention_cache, ManifoldCache):
                given.self_attention_cache = self._replacement(given.self_attention_cache)
            return given, given.self_attention_cache
        fresh = self._replacement(given)
        if self.model.config.is_encoder_decoder:
            return EncoderDecoderCache(fresh, DynamicCache(config=self._config)), fresh
        return fresh, fresh

    def _replacement(self, given: Any) -> ManifoldCache:
        if given is not None and type(given) is not DynamicCache:
            raise ValueError(
                f"{type(given).__name__} can't be compressed; pass no past_key_values, a DynamicCache that is still "
                "empty, or a ManifoldCache"
            )
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(
                f"past_key_values already holds {given.get_seq_length()} tokens uncompressed; start inside compress() "
                "with no cache, or pass a ManifoldCache"
            )
        per_head = self.cfg.head_budget == "adaptive"
        return ManifoldCache(self._config, self.cfg, choice=self.choice, per_head=per_head, trace=self._trace)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def diagnosis(self) -> Diagnosis | None:
        """How ``metric="auto"`` chose; ``None`` with another metric or before the first prompt."""
        return self.choice.diagnosis

    def stats(self) -> list[LayerStats]:
        """One entry per compressed layer of the last cache used: lengths, bytes, evictions, metric.

        Raises:
            RuntimeError: nothing ran inside the ``with`` yet.
        """
        if self.cache is None:
            raise RuntimeError("nothing has run inside compress() yet, so there is no cache to report on")
        return self.cache.stats()

    def explain(self, layer: int, head: int, tokenizer: Any, row: int = 0) -> Explanation:
        """Which tokens of the last prompt a head kept and evicted, with the radial and angular part of each score.

        It is the first eviction that is shown; with ``phase="decode"`` the tokens generated before it are part of it
        (and beam search, which moves rows meanwhile, isn't followed).

        ``print(kv.explain(0, 0, tokenizer))`` shows the prompt's text with the evicted spans in brackets.

        Args:
            layer, head: index of the layer in the model and of the key-value head.
            tokenizer: turns the prompt's tokens into text.
            row: of the batch.

        Raises:
            RuntimeError: without ``compress(..., trace=True)``, nothing was evicted yet, or a prompt without token ids.
            ValueError: no such layer, head or row.
        """
        if not self._trace:
            raise RuntimeError("explain() needs the scores of the prompt: use compress(model, ..., trace=True)")
        layers = {own.index: own for own in self.cache.manifold_layers} if self.cache is not None else {}
        if layers and layer not in layers:
            raise ValueError(f"layer={layer} is not a compressed layer; those are {', '.join(map(str, layers))}")
        own = layers.get(layer)
        if own is None or own.trace is None:
            raise RuntimeError("nothing has been evicted inside compress() yet, so there is nothing to explain")
        ids = [part for part in self._read if part is not None]
        if len(ids) < len(self._read):
            raise RuntimeError("the prompt was given as inputs_embeds, so explain() has no tokens to show")
        return explain(own.trace, torch.cat(ids, dim=1), own.padded, tokenizer, layer, head, row)


def _refuse_empty(prompt: Any) -> None:
    if prompt is not None and hasattr(prompt, "shape") and len(prompt.shape) >= 2 and 0 in prompt.shape[:2]:
        raise ValueError(f"the prompt is empty (shape {tuple(prompt.shape)}); give at least one token")
