"""transformers: a quantiser for ``AutoModel.from_pretrained``, and a callback for ``Trainer``.

Importing this module registers ``quant_method="robuq"``::

    import robuq.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(folder_that_robuq_saved)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from icml26_shared.errors import require
from robuq.attention import install_attention_bits
from robuq.integrations.schedule import BitSchedule
from robuq.packed import PackedLinear
from robuq.storage import QUANT_METHOD, build_skeleton, check_description, check_layer_tensors
from robuq.surgery import quantised_layers

require("transformers", "transformers")

from transformers import TrainerCallback  # noqa: E402
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402


@register_quantization_config(QUANT_METHOD)
class RobuQQuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What ``config.json`` says under ``quantization_config``: the description that robuq wrote."""

    def __init__(self, **described: Any) -> None:
        described.pop("quant_method", None)
        self.quant_method = QUANT_METHOD
        for key, value in described.items():
            setattr(self, key, value)

    @property
    def described(self) -> dict[str, Any]:
        """The description, checked.

        Raises:
            RobuqFormatError: another format or version, or parts are missing.
        """
        plain = {key: value for key, value in self.__dict__.items() if key != "quant_method"}
        return check_description(plain, "config.json: quantization_config")


@register_quantizer(QUANT_METHOD)
class RobuQHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts packed layers into the model before its weights are read, and checks them after."""

    requires_calibration = True
    quantization_config: RobuQQuantizationConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        described = self.quantization_config.described
        build_skeleton(model, described, "config.json")
        strict = getattr(model, "_keep_in_fp32_modules_strict", None)
        model._keep_in_fp32_modules_strict = {*(strict or ()), "alpha"}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        described = self.quantization_config.described
        for name, layer in quantised_layers(model):
            if isinstance(layer, PackedLinear):
                _restore_types(layer)
                tensors = {f"{name}.{key}": value for key, value in layer.state_dict().items()}
                check_layer_tensors(name, layer, tensors, "the checkpoint")
        if described.get("attn_bits") is not None:
            install_attention_bits(model, described["attn_bits"])
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """``save_pretrained`` of transformers writes the packed layers too."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed layers are for inference; ``robuq.quantize`` trains."""
        return False


def _restore_types(layer: PackedLinear) -> None:
    """transformers casts all floating point tensors to the model's type; these have their own."""
    layer.alpha = layer.alpha.float()
    if layer.A is not None and layer.B is not None:
        layer.A, layer.B = layer.A.to(torch.bfloat16), layer.B.to(torch.bfloat16)


class RobuQTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Warm-up at 4 bits, sensitivity, plan, and packing at the end, inside ``transformers.Trainer``.

    Args:
        avg_bits: average activation bits of the plan.
        batches: calibration batches.
        forward_fn: ``forward_fn(model, batch)`` gives the output; default ``model(**batch)``.
        warm: steps before the plan.
        bits: candidates.
        freeze_to: folder for the packed model at the end; None packs the model in place only.
        freeze: pack at the end.
    """

    def __init__(
        self,
        avg_bits: float,
        batches: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        *,
        warm: int = 1000,
        bits: tuple[int, ...] = (1, 2, 3, 4),
        freeze: bool = True,
        freeze_to: str | Path | None = None,
    ) -> None:
        call = forward_fn or (lambda model, batch: model(**batch))
        self.schedule = BitSchedule(avg_bits, batches, call, warm=warm, bits=bits, freeze=freeze, folder=freeze_to)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the bits of the warm-up; a resumed run takes its plan from the checkpoint's folder."""
        self.schedule.begin(kwargs["model"], state.global_step, Path(args.output_dir))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the warm-up: measure and plan."""
        self.schedule.step(kwargs["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pack."""
        self.schedule.end(kwargs["model"])
