"""Whole models: replace linear layers by quantised ones, pack them, and turn them back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robuq.attention import install_attention_bits
from robuq.config import RobuQConfig
from robuq.linear import RobuQLinear, Rotated
from robuq.packed import CACHES, PackedLinear


def quantize(
    model: nn.Module,
    config: RobuQConfig | None = None,
    *,
    batches: Sequence[Any] | None = None,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> nn.Module:
    """Replace every matching linear layer by a trainable quantised one, in place.

    ``nn.Linear`` (its subclasses too, unless they have a forward of their own) and transformers' ``Conv1D`` are
    replaced where ``config.matches(name)``. A module that stands in several places is replaced once. A layer whose
    weight another module shares is left, with a warning, unless ``config.untie``. Layers of integer dtype are left. A
    model that is quantised already is not changed.

    Args:
        model: changed in place.
        config: settings.
        batches, forward_fn: calibration data, as for `robuq.measure_sensitivity`: with ``gain="auto"`` the gain is the
            one whose outputs are nearer to the model's own before quantising. Without them it stays at ``"mse"``, with
            a warning. Not used with another gain.

    Returns:
        The model; a new module if the model itself is a linear layer.

    Raises:
        ValueError: only one of ``batches`` and ``forward_fn``, or ``batches`` is empty.
    """
    from robuq.calibration import choose_gain, gain_left_at_mse, outputs

    config = config or RobuQConfig()
    if (batches is None) != (forward_fn is None) or (batches is not None and len(batches) == 0):
        raise ValueError("calibration needs both batches, at least one, and forward_fn")
    if isinstance(model, Rotated):
        return model
    fresh = config.gain == "auto" and not any(isinstance(module, Rotated) for module in model.modules())
    references = None
    if fresh and batches is not None and forward_fn is not None:
        references = outputs(model, batches, forward_fn)
    owners = _weight_owners(model)

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Rotated) or not (name == "" or config.matches(name)):
            return None
        linear = as_linear(module)
        if linear is None or not linear.weight.is_floating_point():
            return None
        others = [owner for owner in owners[id(linear_weight(module))] if owner != name]
        if others and not config.untie:
            warnings.warn(
                f"{name} shares its weight with {others[0]} and is left as it is; untie=True quantises it", stacklevel=3
            )
            return None
        return RobuQLinear.from_linear(linear, config, name)

    model = replace_modules(model, convert)
    if config.attn_bits is not None:
        install_attention_bits(model, config.attn_bits)
    if references is not None and batches is not None and forward_fn is not None:
        choose_gain(model, batches, forward_fn, references)
    elif fresh:
        gain_left_at_mse(stacklevel=2)
    return model


def freeze(model: nn.Module, cache: str | None = None) -> nn.Module:
    """Replace every trainable quantised layer by its packed form, in place: ``RobuQLinear`` to ``PackedLinear``.

    Args:
        model: changed in place.
        cache: None, or ``"int8"`` to keep unpacked weights too (four times the memory).

    Returns:
        The model (a new module if it is itself a layer).
    """
    if cache not in CACHES:
        raise ValueError(f"cache must be None or 'int8', got {cache!r}")

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        return PackedLinear.from_trained(module, cache) if isinstance(module, RobuQLinear) else None

    return replace_modules(model, convert)


def dequantize(model: nn.Module) -> nn.Module:
    """Replace every quantised layer by a plain ``nn.Linear`` with ``W = (alpha T + B A) H^T D``, in place.

    The linear layers are what the ternary ones stand for; activations are no longer quantised.
    """

    def convert(name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, RobuQLinear | PackedLinear):
            return None
        weight = module.weight
        dtype = module.weight_rot.dtype if isinstance(module, RobuQLinear) else weight.dtype
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype))
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias.detach().to(dtype).clone())
        return linear.train(module.training)

    return replace_modules(model, convert)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, RobuQLinear | PackedLinear]]:
    """Name and module of every quantised layer, each once, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, RobuQLinear | PackedLinear):
            yield name, module


def macs_per_token(model: nn.Module) -> dict[str, int]:
    """``n_l out_l`` of every quantised layer."""
    return {name: layer.in_features * layer.out_features for name, layer in quantised_layers(model)}


def replace_modules(model: nn.Module, convert: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Put ``convert(name, module)`` in a module's place wherever it is not None; one result a module.

    A module that stands in several places is converted under its first name.
    """
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    inside: tuple[str, ...] = ()
    for names in list(places.values()):
        if names[0].startswith(inside):
            continue  # part of a module that has been replaced
        replacement = convert(names[0], model.get_submodule(names[0]))
        if replacement is None:
            continue
        if names[0] == "":
            return replacement
        inside = (*inside, f"{names[0]}.")
        for name in names:  # at once, so that the replaced module is freed before the next one is converted
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, replacement)
    return model


def as_linear(module: nn.Module) -> nn.Linear | None:
    """The module as ``nn.Linear``, a transformers ``Conv1D`` transposed; None if it is something else."""
    if isinstance(module, nn.Linear):
        # torch's attention reads the weight of its output layer without calling it, so that one must stay.
        plain = type(module).forward is nn.Linear.forward
        return module if plain and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear) else None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None:
        source, bias = linear_weight(module), module._parameters["bias"]
        linear = nn.Linear(source.shape[0], source.shape[1], device="meta")
        linear.weight = nn.Parameter(source.detach().T.contiguous(), requires_grad=source.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        return linear.train(module.training)
    return None


def linear_weight(module: nn.Module) -> Tensor:
    """The weight tensor itself, whose identity tells whether it is shared."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(module).__name__}.weight is a {type(weight).__name__}, not a tensor")
    return weight


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the distinct modules that hold each tensor called ``weight``."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return owners


@torch.no_grad()
def packed_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each tensor once."""
    seen = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def quantised_names(model: nn.Module) -> list[str]:
    """Names of the quantised layers."""
    return [name for name, _ in quantised_layers(model)]
