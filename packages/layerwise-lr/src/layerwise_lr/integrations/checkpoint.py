"""`analyze`: the exponents of a model in memory or of a checkpoint on disk, one matrix in memory at a time.

Reads safetensors (one file, several, or an index) and GGUF, whose quantised tensors are dequantised one by one. Nothing
is unpickled and no model is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from icml26_shared.console import progress
from icml26_shared.errors import require
from layerwise_lr.layers import clean_name, matrices, stored_roles
from layerwise_lr.measurement import LayerReport, Measure

_GGUF_SKIPPED = ("rope_freqs",)


class Stored:
    """A tensor of a file: its name and shape, and its values on demand."""

    def __init__(self, name: str, shape: Sequence[int], dtype: str, read: Any) -> None:
        self.name, self.shape, self.dtype = name, tuple(int(n) for n in shape), dtype
        self._read = read

    def read(self) -> Tensor:
        """The values, floating point, laid out [out, in, ...]."""
        tensor: Tensor = self._read()
        return tensor


def analyze(
    source: nn.Module | str | Path,
    *,
    embeddings: bool = False,
    as_frame: bool = False,
    measure: Measure | None = None,
    **settings: Any,
) -> Any:
    """Measure every matrix of a model.

    Args:
        source: a module; or a folder with safetensors, or a ``.safetensors``, ``.safetensors.index.json`` or ``.gguf``
            file.
        embeddings: measure embeddings and language model heads too; without it they are listed with a note.
        as_frame: return a pandas DataFrame.
        measure, settings: a `layerwise_lr.measurement.Measure`, or its fields as keywords: ``fit``, ``method``,
            ``min_dim``, ``farms``, ...

    Returns:
        `LayerReport`s in the order of the model, or a DataFrame with their fields as columns.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a file that is not what its name says, or a folder without safetensors.
        MissingExtra: gguf or pandas is needed and not installed.
    """
    if measure is not None and settings:
        raise TypeError(f"give measure or keywords, not both; got measure and {', '.join(settings)}")
    measure = measure or Measure(**settings)
    reports = list(reports_of(source, measure, embeddings))
    if not as_frame:
        return reports
    return require("pandas", "frame").DataFrame([report.to_json() for report in reports])


@torch.no_grad()
def reports_of(source: nn.Module | str | Path, measure: Measure, embeddings: bool = False) -> Iterator[LayerReport]:
    """Reports one by one, with a progress bar."""
    if isinstance(source, nn.Module):
        layers: list[Any] = list(matrices(source))
        described = [(layer.name, layer.role, layer.skip) for layer in layers]
    else:
        layers = stored_matrices(source)
        roles = stored_roles({clean_name(t.name): t.shape for t in layers})
        described = [(name, roles[name], _unreadable(t)) for t in layers for name in [clean_name(t.name)]]
    with progress("spectra", len(layers)) as bar:
        for layer, (name, role, skip) in zip(layers, described, strict=True):
            if role != "matrix" and not embeddings:
                yield LayerReport(name, layer.shape, role, note=f"{role}: not fitted")
            elif skip:
                yield LayerReport(name, layer.shape, role, note=skip)
            else:
                yield measure(name, layer.read(), role)
            bar.advance()


def stored_matrices(path: str | Path) -> list[Stored]:
    """The tensors of a checkpoint with two or more dimensions, in the order of their files."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give a folder with *.safetensors, or a .safetensors or .gguf file"
        )
    if path.is_dir():
        index = sorted(path.glob("*.safetensors.index.json"))
        files = _indexed(index[0]) if index else sorted(path.glob("*.safetensors"))
        if not files:
            gguf = sorted(path.glob("*.gguf"))
            if len(gguf) == 1:
                return _gguf(gguf[0])
            raise ValueError(f"{path} has no *.safetensors{' and several .gguf files: name one' if gguf else ''}")
        stored = [tensor for file in files for tensor in _safetensors(file)]
    elif path.name.endswith(".index.json"):
        stored = [tensor for file in _indexed(path) for tensor in _safetensors(file)]
    elif path.suffix == ".gguf":
        stored = _gguf(path)
    elif path.suffix == ".safetensors":
        stored = _safetensors(path)
    else:
        raise ValueError(
            f"{path.name} is neither .safetensors nor .gguf; pickled weights can run code and are not read: save the "
            "model with safetensors first"
        )
    stored.sort(key=lambda tensor: _natural(tensor.name))
    return stored


def _natural(name: str) -> list[tuple[int, int | str]]:
    """layers.2 before layers.10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index.name} names {len(missing)} file(s) that are not there: {', '.join(missing[:3])}"
        )
    return [index.parent / name for name in names]


def _safetensors(file: Path) -> list[Stored]:
    from safetensors import SafetensorError, safe_open

    def reader(name: str) -> Any:
        def read() -> Tensor:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
            return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 has no products

        return read

    try:
        with safe_open(file, framework="pt") as opened:
            found = []
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                if len(part.get_shape()) >= 2:
                    found.append(Stored(name, part.get_shape(), part.get_dtype(), reader(name)))
            return found
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _unreadable(tensor: Stored) -> str:
    if not (tensor.dtype.startswith(("F", "BF")) or tensor.dtype == "gguf"):
        return f"stored as {tensor.dtype}: dequantise it first"
    return "empty" if 0 in tensor.shape else ""


def _gguf(file: Path) -> list[Stored]:
    require("gguf", "gguf")
    import gguf

    try:
        opened = gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{file} is not a readable GGUF file: {error}") from error

    def reader(tensor: Any) -> Any:
        def read() -> Tensor:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            return torch.from_numpy(
                values.reshape([int(n) for n in reversed(tensor.shape)]).astype("float32", copy=True)
            )

        return read

    return [
        Stored(t.name, [int(n) for n in reversed(t.shape)], "gguf", reader(t))
        for t in opened.tensors
        if len(t.shape) >= 2 and not t.name.startswith(_GGUF_SKIPPED)
    ]
