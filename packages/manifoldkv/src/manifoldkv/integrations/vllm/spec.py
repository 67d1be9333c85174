"""The KV-cache spec of a compressed layer: full attention, plus the eviction schedule both processes compute with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from manifoldkv.config import KVConfig
from manifoldkv.integrations.vllm.config import PluginConfig
from manifoldkv.integrations.vllm.manager import ManifoldKVManager
from manifoldkv.integrations.vllm.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ManifoldKVSpec(FullAttentionSpec):
    """Full attention whose middle blocks are compacted and given back while the request runs.

    Attributes:
        schedule: which tokens are stored after how many computed ones.
        scoring: metric and windows; the protected tokens are a matter of the schedule, not of the scores.
        max_in_flight_tokens: tokens of the steps that may be scheduled and not yet processed.
        max_in_flight_steps: those steps; with 1, every step is processed before the next one is scheduled.
    """

    schedule: Schedule
    scoring: KVConfig
    max_in_flight_tokens: int
    max_in_flight_steps: int

    def admission_blocks(self, max_in_flight_tokens: int) -> int:
        """Most blocks a request ever holds: ``ceil((S + M + W + I + in flight) / b)``."""
        return -(-self.schedule.peak_tokens(max_in_flight_tokens) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Memory of the longest request: bounded by the schedule, not by the model's length."""
        dense = super().max_memory_usage_bytes(vllm_config)
        return min(dense, self.admission_blocks(vllm_config.max_in_flight_tokens) * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[ManifoldKVSpec]) -> ManifoldKVSpec:  # type: ignore[override]
        """One spec for the layers of a group. AssertionError (vLLM's sign for "not together") where they differ."""
        first = specs[0]
        for spec in specs:
            same = isinstance(spec, ManifoldKVSpec) and _extras(spec) == _extras(first)
            if not same:
                raise AssertionError("layers of one KV cache group must share one manifoldkv schedule and metric")
        base = FullAttentionSpec.merge(specs)
        settings = {field.name: getattr(base, field.name) for field in fields(FullAttentionSpec) if field.init}
        return cls(**settings, **_extras(first))


def _extras(spec: ManifoldKVSpec) -> dict[str, Any]:
    return {
        name: getattr(spec, name) for name in ("schedule", "scoring", "max_in_flight_tokens", "max_in_flight_steps")
    }


def compressible(spec: Any) -> bool:
    """Whether a layer's spec is plain full attention in floating point, the only kind that is compressed."""
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
        and spec.kv_quant_mode == KVQuantMode.NONE
        and spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.tokens_per_state == 1
    )


def compressed(spec: FullAttentionSpec, plugin: PluginConfig, vllm_config: Any) -> ManifoldKVSpec:
    """The same layer with the plug-in's schedule and scoring."""
    schedule = Schedule.rounded(
        sink=plugin.sink, budget=plugin.budget, recent=plugin.recent, interval=plugin.interval, block=spec.block_size
    )
    settings = {field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec) if field.init}
    return ManifoldKVSpec(
        **settings,
        schedule=schedule,
        scoring=scoring(plugin, schedule.middle),
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        max_in_flight_steps=vllm_config.max_concurrent_batches,
    )


@cache
def scoring(plugin: PluginConfig, middle: int) -> KVConfig:
    """Scoring of the middle region: ``middle`` tokens stay, nothing is protected by score. Made once, said once."""
    settings: dict[str, Any] = {"metric": plugin.resolved_metric(), "window": plugin.window}
    if settings["metric"] == "decomposed":
        settings.update(rho0="mean", rho_x="mean")
    return KVConfig(budget=middle, n_sink=0, n_recent=0, **settings)


def register() -> None:
    """Bind the spec to its manager in this process. Safe to repeat.

    The built-in specs go first: vLLM fills its registry only while it is empty. The spec is a base of its own, so that
    vLLM never puts a compressed layer into one group (one set of blocks) with a layer that must keep all of its tokens.
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ManifoldKVSpec, ManifoldKVManager, uniform_type_base_spec=ManifoldKVSpec)


register()  # here, so that a process which only unpickles a spec knows its manager too
