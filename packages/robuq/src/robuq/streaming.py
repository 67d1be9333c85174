"""Quantise a checkpoint on disk layer by layer: never more than one floating point layer beside the packed model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from icml26_shared.console import progress
from robuq.attention import install_attention_bits
from robuq.calibration import choose_gain, gain_left_at_mse
from robuq.config import RobuQConfig
from robuq.errors import RobuqFormatError
from robuq.linear import RobuQLinear
from robuq.packed import PackedLinear
from robuq.storage import Factory, meta_parameters
from robuq.surgery import as_linear, linear_weight, replace_modules

Readers = Mapping[str, Callable[[], Tensor]]
_PICKLED = (".pt", ".pth", ".bin")


def quantize_checkpoint(
    checkpoint: str | Path,
    config: RobuQConfig,
    factory: Factory,
    *,
    dtype: torch.dtype | None = None,
    batches: Sequence[Any] | None = None,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    references: Sequence[Tensor] | None = None,
) -> nn.Module:
    """A packed model straight from a floating point checkpoint.

    Args:
        checkpoint: a folder with safetensors files (with or without an index), one such file, or a ``.pt`` file as DiT
            is published: read with torch's restricted loader (tensors only), memory-mapped.
        config: settings.
        factory: makes the unquantised model; called with its parameters on the meta device.
        dtype: of what is not quantised; default as stored.
        batches, forward_fn: calibration data for ``gain="auto"``, see `robuq.calibration.choose_gain`. Without them it
            stays at ``"mse"``, with a warning.
        references: outputs of the unquantised model on the batches, where somebody has them; None: the packed model's
            own with unquantised activations.

    Returns:
        The packed model in eval mode.

    Raises:
        FileNotFoundError: no such checkpoint.
        RobuqFormatError: damaged files, or tensors missing or of another shape.
        ValueError: only one of ``batches`` and ``forward_fn``.
    """
    if (batches is None) != (forward_fn is None):
        raise ValueError("calibration needs both batches and forward_fn")
    readers = open_checkpoint(Path(checkpoint))
    with meta_parameters():
        model = factory()
    names = _resolve(model, readers)
    linears = {name for name, module in model.named_modules() if as_linear(module) is not None and config.matches(name)}

    with progress("quantising", max(1, len(linears))) as bar:

        def convert(name: str, module: nn.Module) -> nn.Module | None:
            if name not in linears:
                return None
            tied = [other for other, found in names.items() if found == names[f"{name}.weight"]]
            if len(tied) > 1 and not config.untie:
                bar.advance()
                return None
            packed = _pack(name, module, config, readers, names)
            bar.advance()
            return packed

        model = replace_modules(model, convert)
    _fill(model, readers, names, dtype, str(checkpoint))
    if config.attn_bits is not None:
        install_attention_bits(model, config.attn_bits)
    if config.gain == "auto" and batches is not None and forward_fn is not None:
        choose_gain(model, batches, forward_fn, references)
    elif config.gain == "auto":
        gain_left_at_mse(stacklevel=3)
    return model.eval()


def _pack(
    name: str, module: nn.Module, config: RobuQConfig, readers: Readers, names: Mapping[str, str]
) -> PackedLinear:
    linear = as_linear(module)
    if linear is None:
        raise RobuqFormatError(f"{name} is no linear layer")
    weight = readers[names[f"{name}.weight"]]()
    expected = linear_weight(module).shape
    if weight.shape != expected:
        raise RobuqFormatError(f"{name}.weight has shape {tuple(weight.shape)}, the model has {tuple(expected)}")
    transposed = module is not linear  # a Conv1D keeps its weight the other way round
    linear.weight = nn.Parameter((weight.T if transposed else weight).float().contiguous(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(readers[names[f"{name}.bias"]]().float(), requires_grad=False)
    return PackedLinear.from_trained(RobuQLinear.from_linear(linear, config, name))


def _fill(model: nn.Module, readers: Readers, names: Mapping[str, str], dtype: torch.dtype | None, where: str) -> None:
    """Read what is left on the meta device."""
    filled: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in filled:
                full = f"{name}.{key}" if name else key
                tensor = readers[names[full]]()
                if tensor.shape != parameter.shape:
                    given, wanted = tuple(tensor.shape), tuple(parameter.shape)
                    raise RobuqFormatError(f"{where}: {full} has shape {given}, the model has {wanted}")
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                filled[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module._parameters[key] = filled[id(parameter)]
        for key, buffer in module._buffers.items():
            full = f"{name}.{key}" if name else key
            if buffer is not None and full in names and key not in module._non_persistent_buffers_set:
                module._buffers[key] = readers[names[full]]().to(buffer.dtype)


def _resolve(model: nn.Module, readers: Readers) -> dict[str, str]:
    """The model's parameter names, and persistent buffers that are stored, to names in the checkpoint.

    A checkpoint of a model with a head holds the base model under a prefix, or the other way round; the names with one
    first part more or less are tried.
    """
    prefixes = {name.partition(".")[0] for name in readers}
    own = {name.partition(".")[0] for name, _ in model.named_parameters()}
    names: dict[str, str] = {}
    first_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        head, _, rest = name.partition(".")
        candidates = [name, *(f"{p}.{name}" for p in sorted(prefixes - own))] + ([rest] if head not in prefixes else [])
        found = next((c for c in candidates if c in readers), None) or first_of.get(id(parameter))
        if found is not None:
            names[name] = found
            first_of.setdefault(id(parameter), found)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names and id(parameter) in first_of:
            names[name] = first_of[id(parameter)]
        if name not in names:
            raise RobuqFormatError(f"the checkpoint has no {name}")
    return names | {name: name for name, _ in model.named_buffers() if name in readers}


def open_checkpoint(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Name to a function that reads the tensor, for a checkpoint's files."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint {str(path)!r}")
    if path.is_file() and path.suffix in _PICKLED:
        return _restricted(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if path.is_dir() and len(files) > 1:
        files = _indexed(path) or files
    if not files:
        raise RobuqFormatError(f"{path} has no *.safetensors files")
    found: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    found[name] = functools.partial(_read, file, name)
        except (SafetensorError, OSError) as error:
            raise RobuqFormatError(f"{file} is damaged or cut short ({error})") from None
    return found


def _indexed(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return []
    try:
        named = sorted(set(json.loads(indices[0].read_text("utf-8"))["weight_map"].values()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RobuqFormatError(f"{indices[0]} is damaged ({type(error).__name__}: {error})") from None
    for file in named:
        if Path(file).name != file:
            raise RobuqFormatError(f"{indices[0]}: names the file {file!r}; files lie in the folder itself")
        if not (folder / file).is_file():
            raise RobuqFormatError(f"{folder} lacks {file}, which {indices[0].name} names")
    return [folder / file for file in named]


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name).clone()  # type: ignore[no-any-return]


def _restricted(path: Path) -> dict[str, Callable[[], Tensor]]:
    import pickle

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RobuqFormatError(f"{path} cannot be read with torch's restricted loader: {reason}") from None
    for wrapper in ("ema", "model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
            break
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise RobuqFormatError(f"{path} holds no state dict of tensors")
    return {name: tensor.clone for name, tensor in state.items()}
