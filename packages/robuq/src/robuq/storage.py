"""Packed models on disk: safetensors with two bits a weight, and a description that is checked before anything is used.

A folder holds ``model.safetensors`` (or shards with ``model.safetensors.index.json``), ``robuq.json`` with the format's
version, the configuration, and shape, rotation and bits of every layer, and, for models of transformers and diffusers,
``config.json``. Of each quantised layer there are ``qweight`` uint8 [out, ceil(n'/4)] (T + 1 in {0, 1, 2}, four to a
byte, element i in bits 2 (i % 4), along the input, the tail filled with code 1), ``alpha``, ``rowsum``, ``signs``,
``A``, ``B``, ``bias``. Nothing is pickled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from icml26_shared.checkpoint import atomic_path, atomic_write_json
from robuq.attention import NAME as ATTENTION
from robuq.attention import AttentionBits, install_attention_bits
from robuq.config import RobuQConfig
from robuq.errors import RobuqFormatError
from robuq.kernels.packed import has_invalid, unpack_ternary
from robuq.linear import RobuQLinear, Rotated
from robuq.packed import PackedLinear
from robuq.quantizer import check_act_bits
from robuq.surgery import as_linear, quantised_layers

FORMAT, VERSION = "robuq", 1
DESCRIPTION, WEIGHTS, INDEX = "robuq.json", "model.safetensors", "model.safetensors.index.json"
QUANT_METHOD = "robuq"
# One row and its bytes: a reader that unpacks another layout finds out here, and not in garbled output.
CANARY = {"codes": [1, 0, 1, -1, -1, -1, 0, 1], "bytes": "2690"}
Factory = Callable[[], nn.Module]


def save_model(
    model: nn.Module, folder: str | Path, *, shard_bytes: int = 5 << 30, host: Mapping[str, Any] | None = None
) -> Path:
    """Write a quantised model; trainable layers are packed on the way, the model itself is not changed.

    The description is written last, so that a folder with one is whole.

    Args:
        model: with at least one quantised layer.
        folder: made if need be.
        shard_bytes: larger models are split into files of about this size.
        host: which library makes the model, and how, e.g. ``{"library": "timm", "name": "vit_tiny_patch16_224"}``.

    Raises:
        ValueError: nothing in the model is quantised.
    """
    folder = Path(folder)
    layers = dict(quantised_layers(model))
    if not layers:
        raise ValueError("nothing in this model is quantised; call robuq.quantize(model, config) first")
    tensors, tied = _tensors(model, layers)
    described = describe(model)
    described["tied"] = tied
    if host is not None:
        described["host"] = dict(host)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    _write_tensors(folder, tensors, shard_bytes)
    hosted = host_config(model)
    if hosted is not None:
        hosted["quantization_config"] = {"quant_method": QUANT_METHOD, **described}
        atomic_write_json(folder / "config.json", hosted)
    atomic_write_json(folder / DESCRIPTION, described)
    return folder


def describe(model: nn.Module) -> dict[str, Any]:
    """The description of a quantised model: format, version, configuration, layers."""
    layers = dict(quantised_layers(model))
    first = next(iter(layers.values()))
    hooks = getattr(model, ATTENTION, None)
    return {
        "format": FORMAT,
        "version": VERSION,
        "layout": "two bits, four to a byte, along the input",
        "canary": CANARY,
        "config": first.config.to_json(),
        "attn_bits": hooks.bits if isinstance(hooks, AttentionBits) else None,
        "class": type(model).__name__,
        "layers": {name: _describe_layer(layer) for name, layer in layers.items()},
    }


def _describe_layer(layer: RobuQLinear | PackedLinear) -> dict[str, Any]:
    bias = layer.bias
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": None if bias is None else str(bias.dtype).removeprefix("torch."),
        "bits": layer.bits,
        "unbiased": layer.unbiased,
        "name": layer.name,
        "rotation": layer.recipe.to_json(),
        "config": layer.config.to_json(),
    }


def host_config(model: nn.Module) -> dict[str, Any] | None:
    """The model's own config.json, if it is one of transformers or diffusers."""
    config: Any = getattr(model, "config", None)
    to_text: Any = getattr(model, "to_json_string", None)
    if config is not None and hasattr(config, "to_dict"):
        return {**config.to_dict(), "architectures": [type(model).__name__]}
    if config is not None and callable(to_text):
        return dict(json.loads(to_text()))
    return None


def _tensors(
    model: nn.Module, layers: Mapping[str, RobuQLinear | PackedLinear]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """State to write, and names that are only other names of tensors in it."""
    tensors: dict[str, Tensor] = {}
    packed = {
        name: layer if isinstance(layer, PackedLinear) else PackedLinear.from_trained(layer)
        for name, layer in layers.items()
    }
    for name, layer in packed.items():
        for key, tensor in layer.state_dict().items():
            tensors[f"{name}.{key}"] = tensor.detach().cpu().contiguous()
    places = tuple(f"{name}." for name in _all_names(model, layers))
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key.startswith(places):
            continue
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            tied[key] = seen[identity]
            continue
        seen[identity] = key
        tensors[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, tied


def _all_names(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """All places of quantised layers, shared ones included."""
    ids = {id(layer) for layer in layers.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in ids:
            yield name


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        if shards[-1] and size + length > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += length
    header = {"format": "pt", "robuq": str(VERSION)}
    if len(shards) == 1:
        (folder / INDEX).unlink(missing_ok=True)
        with atomic_path(folder / WEIGHTS) as temporary:
            save_file(shards[0], temporary, metadata=header)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with atomic_path(folder / file) as temporary:
            save_file(shard, temporary, metadata=header)
        where |= dict.fromkeys(shard, file)
    (folder / WEIGHTS).unlink(missing_ok=True)
    atomic_write_json(folder / INDEX, {"metadata": {}, "weight_map": where})


def load_model(folder: str | Path, factory: Factory) -> nn.Module:
    """Read what :func:`save_model` wrote.

    Args:
        folder: the folder.
        factory: makes the unquantised model; called with parameters kept on the meta device, so that no weight is
            allocated (see :func:`meta_parameters`).

    Returns:
        The model in eval mode, its layers packed; every tensor is a copy, independent of the file.

    Raises:
        FileNotFoundError: no such folder.
        RobuqFormatError: damaged or incomplete files, another version, or a model that does not fit: names the key.
    """
    folder = Path(folder)
    described = read_description(folder)
    with meta_parameters():
        model = factory()
    build_skeleton(model, described, folder)
    tensors = {key: open_tensor() for key, open_tensor in tensor_files(folder).items()}
    load_tensors(model, tensors, described.get("tied", {}), folder)
    if described.get("attn_bits") is not None:
        install_attention_bits(model, described["attn_bits"])
    return model.eval()


def read_description(folder: Path) -> dict[str, Any]:
    """``robuq.json``, checked: format, version, canary."""
    path = folder / DESCRIPTION
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}")
    if not path.is_file():
        raise RobuqFormatError(
            f"{folder} has no {DESCRIPTION}: it is not a model that robuq saved, or saving was cut short"
        )
    try:
        described = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise RobuqFormatError(f"{path} is damaged: {error}") from None
    return check_description(described, str(path))


def check_description(described: Any, where: str) -> dict[str, Any]:
    """The description, if its format, version and canary are this reader's."""
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise RobuqFormatError(f"{where}: format is not {FORMAT!r}")
    if described.get("version") != VERSION:
        raise RobuqFormatError(f"{where}: version is {described.get('version')!r}, this release reads {VERSION}")
    canary = described.get("canary", {})
    try:
        packed = torch.tensor([list(bytes.fromhex(canary["bytes"]))], dtype=torch.uint8, device="cpu")
        right = unpack_ternary(packed, len(canary["codes"]))[0].tolist() == canary["codes"]
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise RobuqFormatError(f"{where}: canary does not unpack to its codes: the weights have another layout")
    for key in ("config", "layers"):
        if not isinstance(described.get(key), dict):
            raise RobuqFormatError(f"{where}: {key} is missing")
    return described


def build_skeleton(model: nn.Module, described: Mapping[str, Any], where: str | Path) -> nn.Module:
    """Put empty packed layers where the description has them."""
    replaced: dict[int, PackedLinear] = {}
    names = dict(model.named_modules(remove_duplicate=False))
    for name, told in described["layers"].items():
        module = names.get(name)
        linear = None if module is None else as_linear(module)
        if linear is None:
            raise RobuqFormatError(f"{where}: {name} is no linear layer of this model")
        layer = _empty_layer(name, told, where)
        if (linear.in_features, linear.out_features) != (layer.in_features, layer.out_features):
            raise RobuqFormatError(
                f"{where}: {name} has shape ({layer.out_features}, {layer.in_features}) in the file and "
                f"({linear.out_features}, {linear.in_features}) in the model"
            )
        replaced[id(module)] = layer
    for name, module in names.items():
        if id(module) in replaced:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, replaced[id(module)])
    return model


def _empty_layer(name: str, told: Mapping[str, Any], where: str | Path) -> PackedLinear:
    try:
        config = RobuQConfig.from_json(told["config"])
        bias = told["bias"]
        layer = PackedLinear(
            int(told["in_features"]), int(told["out_features"]), bias is not None, config, str(told["name"]),
            dtype=getattr(torch, bias) if bias else torch.float32,
        )  # fmt: skip
        layer.bits, layer.unbiased = check_act_bits(told["bits"]), bool(told["unbiased"])
        recipe = told["rotation"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RobuqFormatError(f"{where}: layers[{name!r}] is damaged ({type(error).__name__}: {error})") from None
    if recipe != layer.recipe.to_json():
        raise RobuqFormatError(f"{where}: layers[{name!r}].rotation is {recipe}, here it is {layer.recipe.to_json()}")
    return layer


def tensor_files(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name to a function that reads the tensor, for every tensor of a folder's safetensors files."""
    found: dict[str, Callable[[], Tensor]] = {}
    for file, names in _files(folder).items():
        try:
            with safe_open(file, framework="pt") as opened:
                there = set(opened.keys())
        except (SafetensorError, OSError) as error:
            raise RobuqFormatError(f"{file} is damaged or cut short ({error})") from None
        for name in sorted(there if names is None else names):
            if name not in there:
                raise RobuqFormatError(f"{file}: {name} is missing")
            found[name] = functools.partial(_read, file, name)
    return found


def _files(folder: Path) -> dict[Path, set[str] | None]:
    index = folder / INDEX
    if not index.is_file():
        file = folder / WEIGHTS
        if not file.is_file():
            raise RobuqFormatError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
        return {file: None}
    try:
        where = json.loads(index.read_text("utf-8"))["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file in where.items():
            if Path(file).name != file or file in ("", ".", ".."):
                raise RobuqFormatError(f"{index}: weight_map[{name!r}] is {file!r}; files lie in the folder itself")
            entry = files.setdefault(folder / file, set())
            if entry is not None:
                entry.add(name)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise RobuqFormatError(f"{index} is damaged ({type(error).__name__}: {error})") from None
    return files


def _read(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name).clone()  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise RobuqFormatError(f"{file}: {name} cannot be read ({error})") from None


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str], where: str | Path) -> None:
    """Put tensors into a model whose layers are packed: all of them, each of the right shape and type."""
    expected = model.state_dict(keep_vars=True)
    known: dict[str, Tensor] = {**tensors}
    for name, other in tied.items():
        if other not in tensors:
            raise RobuqFormatError(f"{where}: {other} is missing")
        known[name] = tensors[other]
    shared = _other_names(model, expected)
    for name, first in shared.items():
        if name not in known and first in known:
            known[name] = known[first]
    for name in expected:
        if name not in known:
            raise RobuqFormatError(f"{where}: {name} is missing")
    for name in known:
        if name not in expected:
            raise RobuqFormatError(f"{where}: {name} is not part of this model")
        if known[name].shape != expected[name].shape:
            given, wanted = tuple(known[name].shape), tuple(expected[name].shape)
            raise RobuqFormatError(f"{where}: {name} has shape {given}, the model has {wanted}")
    layers = dict(quantised_layers(model))
    for name, layer in layers.items():
        check_layer_tensors(name, layer, known, where)
    model.load_state_dict(known, strict=True, assign=True)
    _tie(model, {**tied, **shared})


def check_layer_tensors(name: str, layer: Rotated, tensors: Mapping[str, Tensor], where: str | Path) -> None:
    """Types, codes and row sums of a packed layer's tensors."""
    types = {"qweight": torch.uint8, "alpha": torch.float32, "rowsum": torch.int32, "signs": torch.uint8}
    for key, dtype in types.items():
        tensor = tensors.get(f"{name}.{key}")
        if tensor is not None and tensor.dtype != dtype:
            raise RobuqFormatError(f"{where}: {name}.{key} is {tensor.dtype}, it should be {dtype}")
    if not layer.ternary_weights:
        return
    qweight = tensors[f"{name}.qweight"]
    if has_invalid(qweight):
        raise RobuqFormatError(f"{where}: {name}.qweight has the code 3, which stands for no weight")
    for start in range(0, len(qweight), 1024):
        part = slice(start, start + 1024)
        sums = unpack_ternary(qweight[part], layer.recipe.padded).sum(1, dtype=torch.int32)
        if not torch.equal(sums, tensors[f"{name}.rowsum"][part]):
            raise RobuqFormatError(f"{where}: {name}.rowsum does not agree with {name}.qweight")


def _other_names(model: nn.Module, expected: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are other names of a parameter or buffer that comes earlier."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, tensor in expected.items():
        if id(tensor) in first:
            others[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return others


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    for name, other in tied.items():
        parent, _, last = name.rpartition(".")
        source_parent, _, source = other.rpartition(".")
        module = model.get_submodule(parent)
        tensor = getattr(model.get_submodule(source_parent), source)
        if last in module._parameters:
            module._parameters[last] = tensor
        elif last in module._buffers:
            module._buffers[last] = tensor


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters of modules made inside are kept on the meta device; buffers are real.

    So a model's skeleton costs one parameter at a time. Tied parameters stay tied.
    """
    original = nn.Module.register_parameter
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is None or param.device.type == "meta":
            return
        if id(param) not in made:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            made[id(param)] = (param, empty)  # holding on to it keeps its id from being given again
            param.data = param.data.new_empty(0)
        module._parameters[name] = made[id(param)][1]

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
