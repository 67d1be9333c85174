"""PEFT: low-rank adapters on the cores of Tucker layers, saved and loaded by PEFT itself.

::

    model = get_peft_model(converted, cores_config(converted, r=4))
    model.save_pretrained("adapter")                              # the adapter alone
    model = PeftModel.from_pretrained(from_pretrained("base"), "adapter")

To train whole cores instead, see `tucker_attention.integrations.adapters`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from icml26_shared.errors import require
from tucker_attention.attention import TuckerAttention
from tucker_attention.integrations.adapters import CORES

peft = require("peft", "peft", distribution="tucker-attention")


def cores_config(model: nn.Module, *, r: int = 8, head_factors: bool = False, **options: Any) -> Any:
    """A ``LoraConfig`` whose targets are the cores of the model's Tucker layers, and nothing else.

    Args:
        model: a converted model.
        r: rank of the update of every slice of a core.
        head_factors: adapt U1 and V1 too.
        options: further arguments of ``LoraConfig``; dropout and DoRA are not for parameters.

    Raises:
        ValueError: no Tucker layer, none with cores that are parameters, or targets among the options.
    """
    named = {"target_modules", "target_parameters"} & options.keys()
    if named:
        raise ValueError(f"cores_config chooses the targets itself; leave out {', '.join(sorted(named))}")
    wanted = [name for name in CORES if head_factors or name not in ("U1", "V1")]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TuckerAttention)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no Tucker layer; convert_model() makes them")
    targets = [
        f"{layer}.{name}"
        for layer, module in layers.items()
        for name, _ in module.named_parameters(recurse=False)
        if name in wanted
    ]
    if not targets:
        raise ValueError(
            f"the cores of {type(model).__name__} are blocks of the identity, not parameters, as after an exact "
            "conversion; convert with ranks, energy or budget"
        )
    return peft.LoraConfig(r=r, target_modules=[], target_parameters=targets, **options)
