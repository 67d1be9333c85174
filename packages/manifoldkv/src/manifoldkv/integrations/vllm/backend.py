"""Attention backends that evict: a stock backend with three methods overridden."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport

from manifoldkv.integrations.vllm import config, layout, metadata, metrics, refuse
from manifoldkv.integrations.vllm.impl import EvictingImpl
from manifoldkv.integrations.vllm.spec import ManifoldKVSpec, compressed, compressible

logger = logging.getLogger("vllm.manifoldkv")
_building: list[Any] = []  # the configuration of the model built last: vLLM asks for its specs outside any context


@cache
def evicting_backend(stock_path: str) -> type:
    """The backend at ``stock_path`` (``"module.Class"``), evicting where the engine's settings say so."""
    stock: Any = resolve_obj_by_qualname(stock_path)
    builder = _builder(stock.get_builder_cls())

    class Backend(stock):  # type: ignore[misc, valid-type]
        """Stock attention; layers with full attention get a ManifoldKVSpec when the plug-in is on."""

        @staticmethod
        def get_impl_cls() -> Any:
            _note_engine()
            return _impl(stock.get_impl_cls())

        @staticmethod
        def get_builder_cls() -> Any:
            return builder

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            return _customized(cls, super().customize_spec(spec))

    Backend.__name__ = Backend.__qualname__ = f"ManifoldKV{stock.__name__}"
    return Backend


@cache
def _impl(stock: type) -> type:
    return type(f"ManifoldKV{stock.__name__}", (EvictingImpl, stock), {})


@cache
def _builder(stock: Any) -> type:
    class Builder(stock):
        """Builds the stock metadata of the step without gaps, and attaches the step's evictions to it."""

        def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(kv_cache_spec, *args, **kwargs)
            self._manifoldkv = kv_cache_spec if isinstance(kv_cache_spec, ManifoldKVSpec) else None
            if self._manifoldkv is not None:
                _check_kernel_block(self._manifoldkv)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            if isinstance(kv_cache_spec, ManifoldKVSpec):
                return AttentionCGSupport.NEVER  # whole-step graphs would skip the evictions; piecewise ones stay
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
        ) -> Any:
            spec = self._manifoldkv
            if spec is None:
                return super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
            common, plan = metadata.compact(common_attn_metadata, spec.schedule, spec.scoring, spec.block_size)
            # 0, whatever was given: no shared prefix is read apart (cascade attention, which is refused at start).
            built = super().build(0, common, fast_build, **kwargs)
            if plan is not None:
                setattr(built, metadata.ATTRIBUTE, plan)
            return built

    # A block table alone can't be exchanged: the lengths depend on the row's gap too.
    Builder.supports_update_block_table = False
    Builder.__name__ = Builder.__qualname__ = f"ManifoldKV{stock.__name__}"
    return Builder


def _check_kernel_block(spec: ManifoldKVSpec) -> None:
    if spec.schedule.block % spec.block_size:
        raise ValueError(
            f"manifoldkv rounded its schedule to blocks of {spec.schedule.block} tokens, but the kernels use blocks of "
            f"{spec.block_size}; set --block-size to {spec.block_size}"
        )


def _note_engine() -> None:
    """Remember the engine being built, and refuse it early (before its weights load) where it can't be served."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return
    _building[:] = [vllm_config]
    plugin = config.resolve(vllm_config.additional_config)
    if plugin.enabled:
        refuse.check_engine(vllm_config, plugin)


def _customized(backend: Any, spec: Any) -> Any:
    """The layer's spec, compressed where the plug-in is on and the layer is of the kind it serves."""
    vllm_config = get_current_vllm_config_or_none() or (_building[0] if _building else None)
    if vllm_config is None or not compressible(spec):
        return spec
    plugin = config.resolve(vllm_config.additional_config)
    if not plugin.enabled:
        return spec
    refuse.check_engine(vllm_config, plugin)
    layer_type: Any = AttentionLayerBase
    refuse.check_layers(vllm_config, get_layers_from_vllm_config(vllm_config, layer_type).values())
    made = compressed(spec, plugin, vllm_config)
    _announce(made)
    return made if _cpu_layout_known(backend, spec, vllm_config) else spec


@cache
def _announce(spec: ManifoldKVSpec) -> None:
    schedule = spec.schedule
    logger.info(
        "manifoldkv: keeping %d sink, %d middle (%s) and %d recent tokens per head, evicting every %d tokens; at most "
        "%d blocks of %d tokens per request",
        schedule.sink,
        schedule.middle,
        spec.scoring.metric,
        schedule.recent,
        schedule.interval,
        spec.admission_blocks(spec.max_in_flight_tokens),
        spec.block_size,
    )


def _cpu_layout_known(backend: Any, spec: Any, vllm_config: Any) -> bool:
    """Whether blocks of this shape can be read and written; else eviction stays off, before any block was promised."""
    if backend.get_name() != "CPU_ATTN":
        return True  # derived and verified on the device, at a layer's first eviction
    try:
        shape = (spec.num_kv_heads, spec.head_size, spec.block_size)
        _verify_cpu_layout(*shape, spec.dtype, vllm_config.cache_config.cache_dtype)
    except Exception:  # noqa: BLE001 - a layout that isn't understood means a dense cache, not a dead server
        metrics.log_once(logger, "the layout of the KV cache isn't understood; eviction is off")
        return False
    return True


@cache
def _verify_cpu_layout(heads: int, dim: int, block: int, dtype: Any, cache_dtype: str) -> None:
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block, dim, cache_dtype)

    def write(key: Any, value: Any, cells: Any, slots: Any) -> None:
        halves = cells.view(cells.shape[0], heads, block * 2, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, kv_cache_dtype=cache_dtype)

    layout.derive(write, torch.empty((3, heads, block, 2 * dim), dtype=dtype), dim)
