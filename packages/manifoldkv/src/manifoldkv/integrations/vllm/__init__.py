"""vLLM plug-in: KV blocks go back to the pool while a request is running.

Installed next to vLLM 0.32, it is found through its entry point: ``MANIFOLDKV_BUDGET=1024 vllm serve MODEL`` is all
there is to do. Nothing is patched: it adds an attention backend, a KV-cache spec and a block manager through vLLM's own
registries.
"""

from manifoldkv.integrations.vllm.config import PluginConfig
from manifoldkv.integrations.vllm.plugin import register
from manifoldkv.integrations.vllm.schedule import Schedule

__all__ = ["PluginConfig", "Schedule", "register"]
