"""What the plug-in can't serve, said by name when the engine starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manifoldkv.integrations.vllm.config import PluginConfig


def check_engine(vllm_config: Any, plugin: PluginConfig) -> None:
    """Raise ValueError naming everything in the engine's settings that can't go with evicted blocks."""
    _raise([*_features(vllm_config), *_block_size(vllm_config, plugin)])


def check_layers(vllm_config: Any, layers: Iterable[Any]) -> None:
    """Raise ValueError where a model's layers make eviction unsafe. ``layers`` are its attention layers."""
    layers = list(layers)
    found = []
    if any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers):
        found.append("layers that share another layer's KV cache (their attention of a step runs after its eviction)")
    if any(getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None for layer in layers):
        found.append("ALiBi (its bias needs every key's place, which eviction changes)")
    windowed = any(getattr(layer, "sliding_window", None) is not None for layer in layers)
    if windowed and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        found.append("sliding-window layers without the hybrid KV cache manager (--disable-hybrid-kv-cache-manager)")
    _raise(found)


def _features(vllm_config: Any) -> list[str]:
    from vllm.utils.torch_utils import is_quantized_kv_cache

    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    checks = {
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "KV connectors, disaggregation, offloading (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "decode context parallelism (--decode-context-parallel-size > 1)": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism (--prefill-context-parallel-size > 1)": parallel.prefill_context_parallel_size > 1,
        f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype})": is_quantized_kv_cache(cache.cache_dtype),
        # vLLM 0.32 has none left: the flag is accepted with a warning and never reaches this field (0.33 drops both).
        "cascade attention (--no-disable-cascade-attn)": not getattr(model, "disable_cascade_attn", True),
        "reference sliding-window attention": getattr(model, "rswa_window", None) is not None,
        "bidirectional attention over multimodal prefixes": bool(getattr(model, "is_mm_prefix_lm", False)),
        "diffusion language models": getattr(vllm_config, "diffusion_config", None) is not None,
        "HiSparse": getattr(vllm_config.attention_config, "hisparse_config", None) is not None,
    }
    return [name for name, given in checks.items() if given]


def _block_size(vllm_config: Any, plugin: PluginConfig) -> list[str]:
    block = vllm_config.cache_config.block_size
    if not block or plugin.interval % block == 0:
        return []
    return [
        f"a block size of {block} tokens that doesn't divide the eviction interval of {plugin.interval} (set "
        f"MANIFOLDKV_INTERVAL to a multiple of {block}, or --block-size to a divisor of {plugin.interval})"
    ]


def _raise(found: list[str]) -> None:
    if found:
        names = "; ".join(found)
        raise ValueError(f"manifoldkv can't serve with {names}. Change that, or turn it off with MANIFOLDKV_BUDGET=0")
