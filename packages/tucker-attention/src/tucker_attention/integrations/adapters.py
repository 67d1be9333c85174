"""Train the cores alone, and keep them as an adapter of a few kilobytes; the factors stay those of the base model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from icml26_shared.errors import UserError
from tucker_attention.attention import TuckerAttention

CORES = ("C", "Ct", "U1", "V1", "query_map", "key_map", "value_map", "output_map")


def freeze_factors(model: nn.Module, *, head_factors: bool = True) -> list[str]:
    """Leave only the cores of Tucker layers trainable (with the head factors U1, V1 unless those are left out).

    Returns:
        Names of the trainable parameters.

    Raises:
        ValueError: the model has no Tucker layer.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, TuckerAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no Tucker layer; convert_model() makes them")
    wanted = {name for name in CORES if head_factors or name not in ("U1", "V1")}
    trainable = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        parameter.requires_grad_(owner in layers and last in wanted)
        if parameter.requires_grad:
            trainable.append(name)
    return trainable


def core_state(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def save_cores(model: nn.Module, path: str | Path) -> Path:
    """Write the trainable cores as one safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    from icml26_shared.checkpoint import atomic_path

    state = {name: tensor.contiguous().cpu() for name, tensor in core_state(model).items()}
    if not state:
        raise ValueError("no parameter is trainable: call freeze_factors() first")
    with atomic_path(path) as temporary:
        save_file(state, temporary, metadata={"format": "pt", "what": "tucker cores"})
    return Path(path)


def load_cores(model: nn.Module, path: str | Path) -> nn.Module:
    """Put saved cores into a model of the same ranks.

    Raises:
        UserError: a damaged file, or names and shapes that the model does not have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    own = dict(model.named_parameters())
    wrong = [name for name, t in state.items() if name not in own or own[name].shape != t.shape]
    if wrong or not state:
        raise UserError(f"{path} does not belong to this model: {', '.join(wrong[:3]) or 'it is empty'}")
    model.load_state_dict(state, strict=False)
    return model
