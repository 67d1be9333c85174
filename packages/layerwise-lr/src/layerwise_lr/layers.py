"""Which weights of a model are matrices that get a learning rate of their own, and how their values are read.

One matrix for each `nn.Linear`, `nn.Conv*`, `nn.Embedding` (and transformers' `Conv1D`): q, k, v, o, gate, up and down
apart. Parameters that modules share are one matrix. A LoRA layer (peft) is one matrix, ``W + s B A``, whose trainable
factors get its rate. Names are the parameter's path without ``.weight`` and without what wrappers put in
(``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.``, ``_checkpoint_wrapped_module.``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Role = Literal["matrix", "embedding", "head"]
LORA = ("merged", "ba")
Gather = Callable[[Tensor], Tensor]
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_HEAD_NAMES = {"lm_head", "embed_out", "unembed", "output_projection"}
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed\w*|wte|wpe|token_embd|position_embd|\w*embeddings?)(?:$|\.)")
_WITH_A_MATRIX = (
    nn.Linear,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass
class Matrix:
    """A weight matrix of a model.

    Attributes:
        name: its clean name.
        role: embeddings and language model heads are not fitted.
        parameters: trainable and frozen parameters behind it, by clean name: one, or the two factors of LoRA.
        read: returns the weight as a detached tensor.
        skip: why it cannot be measured; "" if it can.
    """

    name: str
    role: Role
    parameters: dict[str, nn.Parameter]
    read: Callable[[], Tensor] = field(repr=False)
    skip: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, or of its one stored parameter where the weight cannot be read."""
        if self.skip:
            return tuple(next(iter(self.parameters.values())).shape)
        return tuple(self.read().shape)


def clean_name(name: str) -> str:
    """A parameter's or module's name without wrappers and without a final ``.weight``."""
    return _WRAPPERS.sub("", f"{name}.").removesuffix(".").removesuffix(".weight")


def block_of(name: str) -> str:
    """The block of a matrix: its name up to the first number (``layers.3``); without one, all before the last dot."""
    found = re.match(r"(.*?\b\d+)(?:\.|$)", name)
    return found[1] if found else name.rpartition(".")[0]


def role_by_name(name: str) -> Role:
    """The role that a name alone tells."""
    if name.split(".")[-1] in _HEAD_NAMES or name == "output":
        return "head"
    return "embedding" if _EMBEDDING.search(name) else "matrix"


def stored_roles(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Role]:
    """Roles of the weights of a file, by name; a matrix with the shape of an embedding is the head."""
    roles = {name: role_by_name(name) for name in shapes}
    vocabularies = {shapes[name] for name, role in roles.items() if role == "embedding"}
    return {name: "head" if role == "matrix" and shapes[name] in vocabularies else role for name, role in roles.items()}


def matrices(model: nn.Module, *, lora: str = "merged", gather: Gather | None = None) -> list[Matrix]:
    """The matrices of a model, in the order of its modules.

    Args:
        model: any module, also compiled, wrapped or with LoRA adapters.
        lora: what a LoRA layer is measured by: ``"merged"`` ``W + s B A``, or ``"ba"`` ``s B A``.
        gather: returns the whole of a parameter that this rank holds a part of. `DTensor` needs none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if lora not in LORA:
        raise ValueError(f"unknown lora {lora!r}; choose from {', '.join(LORA)}")
    found: list[Matrix] = []
    by_parameter: dict[int, Matrix] = {}
    head = _output_embeddings(model)
    vocabularies = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in _candidates(model):
        matrix = _matrix(path, module, lora, gather)
        if matrix is None:
            continue
        matrix.role = _role(path, module, head, vocabularies)
        known = next((by_parameter[id(p)] for p in matrix.parameters.values() if id(p) in by_parameter), None)
        if known is not None:  # tied: one matrix, and an embedding if either is
            known.role = "embedding" if "matrix" not in (known.role, matrix.role) else _either(known.role, matrix.role)
            continue
        found.append(matrix)
        by_parameter |= {id(p): matrix for p in matrix.parameters.values()}
    return found


def _either(a: Role, b: Role) -> Role:
    return b if a == "matrix" else a


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a weight matrix; what is inside a LoRA layer belongs to it."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        if _is_lora(module):
            inside = (*inside, f"{path}.")
            yield path, module
        elif isinstance(module, _WITH_A_MATRIX) or _is_conv1d(module):
            yield path, module


def _is_conv1d(module: nn.Module) -> bool:
    """Transformers' linear layer with a transposed weight (GPT-2)."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter)


def _is_lora(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "get_delta_weight"))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """The head, where the model can tell (transformers, also inside wrappers)."""
    for module in model.modules():
        tell = getattr(module, "get_output_embeddings", None)
        if callable(tell):
            head = tell()
            return head if isinstance(head, nn.Module) else None
    return None


def _role(path: str, module: nn.Module, head: nn.Module | None, vocabularies: set[tuple[int, ...]]) -> Role:
    if isinstance(module, nn.Embedding) or isinstance(getattr(module, "base_layer", None), nn.Embedding):
        return "embedding"
    if module is head or clean_name(path).rpartition(".")[2] in _HEAD_NAMES:
        return "head"
    shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
    return "head" if isinstance(module, nn.Linear) and shape in vocabularies else "matrix"


def _matrix(path: str, module: nn.Module, lora: str, gather: Gather | None) -> Matrix | None:
    name = clean_name(path) or "weight"
    if _is_lora(module):
        return _lora_matrix(name, path, module, lora)
    parametrised = getattr(module, "parametrizations", None)
    if parametrised is not None and "weight" in parametrised:
        leaves = {f"{name}.{key}": p for key, p in parametrised["weight"].named_parameters()}
        return Matrix(name, "matrix", leaves, lambda: module.weight.detach())  # type: ignore[union-attr, operator, return-value]
    parameter = module._parameters.get("weight")
    if parameter is None:
        return None
    return Matrix(
        name,
        "matrix",
        {name: parameter},
        lambda: whole(module._parameters["weight"], gather),
        unreadable(parameter, gather),
    )


def unreadable(parameter: Tensor, gather: Gather | None = None) -> str:
    """Why a parameter's values cannot be measured; "" if they can."""
    if gather is not None:
        return ""
    if parameter.is_meta:
        return "on the meta device, without values"
    if parameter.is_quantized or not parameter.is_floating_point():
        return f"stored as {parameter.dtype}: dequantise it first"
    if parameter.dim() < 2 or parameter.numel() == 0:
        return f"sharded or flattened, shape {tuple(parameter.shape)}: pass gather="
    return ""


def whole(parameter: Any, gather: Gather | None = None) -> Tensor:
    """The whole of a parameter, detached; collects the parts of a `DTensor`, which every rank must do together."""
    if gather is not None:
        return gather(parameter).detach()
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor().detach()  # type: ignore[no-any-return]
    return parameter.detach()  # type: ignore[no-any-return]


def _lora_matrix(name: str, path: str, module: Any, lora: str) -> Matrix:
    adapters = [a for a in module.active_adapters if a in module.lora_A or a in getattr(module, "lora_embedding_A", {})]
    base = module.base_layer.weight
    parameters = {
        clean_name(f"{path}.{key}"): p
        for key, p in module.named_parameters()
        if key.startswith("lora_") and key.split(".")[1] in adapters and p.dim() >= 2
    }
    skip = "" if adapters and parameters else "no active LoRA adapter"
    skip = skip or (unreadable(base) if lora == "merged" else "")

    def read() -> Tensor:
        with torch.no_grad():
            delta = sum(module.get_delta_weight(adapter) for adapter in adapters)
            return (delta if lora == "ba" else base + delta).detach()  # type: ignore[union-attr, return-value]

    return Matrix(name, "matrix", parameters or {f"{name}.base_layer": base}, read, skip)
