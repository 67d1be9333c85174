"""Dynamic pruning for GRPO-type training: unbiased skipping of rollouts and prompts, packing, and an auditor.

Not Divergence PPO, nor Diffusion or Distributed PPO, which share the letters.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "PruningConfig": "config",
    "PromptHistory": "prompts",
    "prune_prompts": "prompts",
    "prune_completions": "pruning",
    "pack_window": "packing",
    "audit_unbiasedness": "audit",
    "DynamicPruningTrainer": "integrations.trl",
    "DynamicPruningConfig": "integrations.trl",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dppo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dppo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
