"""How low-rank a trained model's attention is, in all three modes of both tensors, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tucker_attention.config import Ranks
from tucker_attention.decomposition import mode_spectra, ranks_for_energy
from tucker_attention.errors import UnsupportedAttention
from tucker_attention.ranks import factor_count
from tucker_attention.readers import kind_of, read_module
from tucker_attention.special_cases import tensors

TENSORS = {"W": ("head", "query", "key"), "Wt": ("head", "output", "value")}
ENERGIES = (0.9, 0.99, 1.0)


@dataclass(frozen=True)
class LayerSpectra:
    """Squared singular values of one layer's two tensors, three modes each, largest first.

    Args:
        name: of the module in the model.
        n_heads, d_model, parameters: of the layer as it is (matrices without biases).
        squared: ``{"W": (head, query, key), "Wt": (head, output, value)}``.
    """

    name: str
    n_heads: int
    d_model: int
    parameters: int
    squared: dict[str, tuple[Tensor, Tensor, Tensor]]

    def ranks(self, tensor: str, energy: float) -> Ranks:
        """The fewest ranks of ``"W"`` or ``"Wt"`` that keep this share of each mode's energy."""
        return ranks_for_energy(self.squared[tensor], energy)

    def tucker_parameters(self, energy: float) -> int:
        """Parameters of dense cores and factors at the ranks of this energy."""
        sizes = {name: [len(mode) for mode in modes] for name, modes in self.squared.items()}
        return sum(factor_count(self.ranks(name, energy), sizes[name]) for name in self.squared)

    def to_json(self, energies: Sequence[float] = ENERGIES) -> dict[str, Any]:
        """Ranks at some energies and the singular values themselves."""
        return {
            "name": self.name,
            "n_heads": self.n_heads,
            "d_model": self.d_model,
            "parameters": self.parameters,
            "ranks": {
                tensor: {f"{energy:g}": list(self.ranks(tensor, energy)) for energy in energies} for tensor in TENSORS
            },
            "singular_values": {
                tensor: dict(zip(modes, ([float(v) for v in s.sqrt()] for s in self.squared[tensor]), strict=True))
                for tensor, modes in TENSORS.items()
            },
        }


@dataclass(frozen=True)
class SpectraReport:
    """Spectra of all attention layers of a model, and the layers that could not be read, with why."""

    layers: tuple[LayerSpectra, ...]
    refused: dict[str, str]

    def rows(self, energies: Sequence[float] = ENERGIES) -> list[list[Any]]:
        """One row a layer and tensor: name, tensor, then for each energy the ranks as text."""
        return [
            [layer.name, tensor, *(" ".join(map(str, layer.ranks(tensor, energy))) for energy in energies)]
            for layer in self.layers
            for tensor in TENSORS
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        return {"layers": [layer.to_json() for layer in self.layers], "refused": self.refused}


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention layer of a known kind; a layer that is used twice comes once."""
    seen: set[int] = set()
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside) or id(module) in seen:
            continue
        if kind_of(module) is not None:
            seen.add(id(module))
            inside.append(name)
            yield name, module


@torch.no_grad()
def attention_spectra(model: nn.Module) -> SpectraReport:
    """Spectra of W and Wt of every attention layer; biases and positions are left aside.

    Args:
        model: any model with attention modules that `TuckerAttention.from_module` reads.

    Raises:
        UnsupportedAttention: no layer could be read.
    """
    from icml26_shared.console import progress

    found, refused = [], {}
    layers = list(attention_layers(model))
    with progress("spectra", len(layers)) as bar:
        for name, module in layers:
            try:
                weights = read_module(module)
            except UnsupportedAttention as error:
                refused[name] = str(error)
                bar.advance()
                continue
            bare = weights.without_biases()
            pre, post = tensors(bare)
            squared = {"W": mode_spectra(pre), "Wt": mode_spectra(post)}
            found.append(LayerSpectra(name, weights.n_heads, weights.d_model, weights.parameter_count, squared))
            bar.advance()
    if not found:
        why = next(iter(refused.values()), f"{type(model).__name__} has no attention module of a known kind")
        raise UnsupportedAttention(f"no attention layer could be read: {why}")
    return SpectraReport(tuple(found), refused)
