"""The rotation of a transformers model, read from its config."""

from __future__ import annotations

import importlib

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manifoldkv.rope import Rotary

_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # frequencies change with the length seen, so one rotation can't undo them
_SOME_LAYERS_ONLY = {  # the other layers, mostly those of full attention, have no position embedding at all
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone_moe",
    "granite_swa",
    "granitemoe_swa",
    "llama4_text",
    "muse_glimmer",
    "smollm3",
}


def rotary_of(config: PreTrainedConfig) -> Rotary:
    """Frequencies, scaling and pairing of the rotary embedding of the model's full-attention layers.

    Raises:
        ValueError: the model has no rotary embedding, uses it in some layers only, with positions in several dimensions
            (images), or with frequencies that depend on the length.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(
            f"space='pre' needs rotary position embedding, which {config.model_type} doesn't have; use space='post'"
        )
    if config.model_type in _SOME_LAYERS_ONLY:
        raise ValueError(f"space='pre': {config.model_type} rotates the keys of some layers only; use space='post'")
    nested = "full_attention" in parameters
    if nested:  # parameters, and with them head sizes, differ by layer type
        parameters, config = parameters["full_attention"], config.per_layer_config["full_attention"]
    kind = parameters.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT:
        raise ValueError(
            f"space='pre' can't undo rope_type={kind!r}, whose frequencies depend on the length; use space='post'"
        )
    if "mrope_section" in parameters:
        raise ValueError(
            f"space='pre' can't undo the {config.model_type} rotation by time, height and width; use space='post'"
        )
    scaling = 1.0
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(dim * parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
        inv_freq = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    else:
        layer_type = {"layer_type": "full_attention"} if nested else {}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **layer_type)
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
