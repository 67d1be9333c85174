"""The rotation of a transformers model, read from its config."""

from __future__ import annotations

import importlib

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manifoldkv.rope import Rotary

_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # frequencies change with the length seen, so one rotation can't undo them


def rotary_of(config: PreTrainedConfig) -> Rotary:
    """Frequencies, scaling and pairing of the model's rotary embedding.

    Raises:
        ValueError: the model has no rotary embedding, or one whose frequencies depend on the length.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"space='pre' needs rotary position embedding, which {config.model_type} doesn't have; use space='post'")
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    kind = parameters.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT:
        raise ValueError(f"space='pre' can't undo rope_type={kind!r}, whose frequencies depend on the length; use space='post'")
    scaling = 1.0
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(dim * parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
        inv_freq = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rotary(inv_freq, float(scaling), _interleaved(config))


def _interleaved(config: PreTrainedConfig) -> bool:
    """Whether the model pairs neighbouring dimensions, asked of its own ``rotate_half``."""
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    rotate_half = getattr(module, "rotate_half", None)
    if rotate_half is None:
        raise ValueError(f"space='pre': {config.model_type} rotates its keys in a way of its own; use space='post'")
    rotated = rotate_half(torch.arange(4.0)).tolist()
    if rotated == [-2.0, -3.0, 0.0, 1.0]:
        return False
    if rotated == [-1.0, 0.0, -3.0, 2.0]:
        return True
    raise ValueError(f"space='pre': {config.model_type} pairs rotary dimensions in an unknown way; use space='post'")
