"""Real activations: what the linear layers of SmolLM2 and MiniLM are fed, and what quantising it does."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from icml26_shared import models
from robuq.hadamard import Rotation, inverse_hadamard, random_signs, rotation, unpack_signs
from robuq.kernels.rotate import rotate
from robuq.quantizer import TokenQuantizer

LAYERS = (0, 7, 15, 22, 29)
KINDS = {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}


def basis(width: int, name: str, kind: str) -> tuple[Rotation, Tensor | None]:
    """Rotation and signs: ``"none"``, ``"plain"`` (Hadamard) or ``"signs"`` (with random signs before it)."""
    if kind == "none":
        return Rotation(width, width, width, (), 0), None
    recipe = rotation(width)
    if kind == "plain":
        return recipe, None
    if kind != "signs":
        raise ValueError(f"kind must be 'none', 'plain' or 'signs', got {kind!r}")
    return recipe, unpack_signs(torch.from_numpy(random_signs(width, name, 0)), width)


def kurtosis(y: Tensor) -> float:
    """Median over tokens of the fourth standardised moment; 3 for a normal distribution."""
    y = y.double()
    centred = y - y.mean(1, keepdim=True)
    return float((centred.pow(4).mean(1) / centred.square().mean(1).square()).median())


def nmse(y: Tensor, quantizer: TokenQuantizer) -> float:
    """Error of quantised tokens over their energy."""
    return float((quantizer.values(y) - y).square().sum() / y.square().sum())


def reading() -> str:
    """Python source and English, from the standard library."""
    english = inspect.cleandoc(argparse.__doc__ or "") + " " + inspect.cleandoc(textwrap.__doc__ or "")
    return inspect.getsource(textwrap.dedent) + "\n" + english + "\n" + inspect.getsource(argparse.HelpFormatter)


@lru_cache(maxsize=1)
@torch.no_grad()
def smollm2_inputs(tokens: int = 256) -> dict[str, list[tuple[str, Tensor]]]:
    """Inputs [tokens, n] of 20 linear layers, by kind of layer: names and tensors."""
    model, tokenizer = models.load("smollm2")
    ids = tokenizer(reading(), return_tensors="pt").input_ids[:, :tokens]
    found: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in KINDS}
    handles = []
    for layer in LAYERS:
        for kind, path in KINDS.items():
            name = f"model.layers.{layer}.{path}"

            def keep(module: nn.Module, args: Any, name: str = name, kind: str = kind) -> None:
                found[kind].append((name, args[0][0].float().clone()))

            handles.append(model.get_submodule(name).register_forward_pre_hook(keep))
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def docstring_sentences(count: int = 48) -> list[str]:
    """First sentences of the standard library's docstrings."""
    found: list[str] = []
    for module in (argparse, textwrap, inspect):
        for _, item in inspect.getmembers(module):
            text = inspect.getdoc(item) if inspect.isfunction(item) or inspect.isclass(item) else None
            sentence = " ".join((text or "").split("\n\n")[0].split())
            if 20 <= len(sentence) <= 300 and sentence not in found:
                found.append(sentence)
    if len(found) < count:
        raise ValueError(f"the standard library here has {len(found)} docstrings; {count} are needed")
    return found[:count]


@contextmanager
def activations_quantised(model: nn.Module, quantizer: TokenQuantizer, kind: str) -> Iterator[None]:
    """Inside, every linear layer's input is rotated, quantised and rotated back; weights are left alone."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "pooler" not in name:
            recipe, signs = basis(module.in_features, name, kind)

            def change(
                module: nn.Module, args: Any, recipe: Rotation = recipe, signs: Tensor | None = signs
            ) -> tuple[Tensor]:
                x = args[0].reshape(-1, args[0].shape[-1])
                y = quantizer.values(rotate(x, recipe, signs))
                return (inverse_hadamard(y, recipe, signs).reshape(args[0].shape),)

            handles.append(module.register_forward_pre_hook(change))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@lru_cache(maxsize=1)
def minilm() -> tuple[Any, Tensor]:
    """The encoder, and its embeddings of 48 sentences."""
    encoder = models.load_encoder("minilm")
    return encoder, encoder.embed(docstring_sentences())


def minilm_quality(quantizer: TokenQuantizer, kind: str) -> dict[str, float]:
    """Mean cosine to the unquantised embeddings, and rank correlation of all pairwise similarities."""
    encoder, exact = minilm()
    with activations_quantised(encoder.model, quantizer, kind):
        found = encoder.embed(docstring_sentences())
    return similarity(found, exact)


def similarity(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Mean cosine of unit vectors, and Spearman's correlation of their pairwise products."""
    i, j = np.triu_indices(len(exact), 1)
    a, b = ((e @ e.T).numpy()[i, j] for e in (found, exact))
    return {"cosine": float((found * exact).sum(1).mean()), "spearman": spearman(a, b)}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; ties, which measured numbers do not have, in the order they come."""
    first, second = (np.argsort(np.argsort(x)).astype(np.float64) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
