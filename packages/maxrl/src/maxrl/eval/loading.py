"""Loading the model that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from icml26_shared.errors import UserError


def load_model(name: str, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder, a GGUF file, or a packaged model's name. No code of the model is run."""
    from icml26_shared import models

    file = Path(name)
    if file.suffix == ".gguf":
        if not file.is_file():
            raise UserError(f"no file at {name}")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(**place, local_files_only=True)
    model, tokenizer = models.load(name, dtype=dtype)
    return model, tokenizer
