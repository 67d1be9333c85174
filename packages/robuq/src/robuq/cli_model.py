"""``robuq quantize``, ``robuq export`` and ``robuq inspect``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from icml26_shared.errors import UserError
from robuq.allocation import Plan, apply_plan
from robuq.calibration import choose_gain
from robuq.config import RobuQConfig
from robuq.gaussian import Bits
from robuq.inspection import inspect_layers
from robuq.integrations.pretrained import from_pretrained, load_pretrained
from robuq.storage import save_model
from robuq.surgery import packed_bytes, quantised_layers

if TYPE_CHECKING:
    from icml26_shared.console import Context

PRESETS = {"dit": RobuQConfig.for_dit, "vit": RobuQConfig.for_vit, "llm": RobuQConfig.for_llm}


def bits_argument(text: str) -> Bits:
    """1 to 8 or ternary."""
    return "ternary" if text == "ternary" else int(text)


def preset_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings shared by commands that quantise."""
    parser.add_argument("checkpoint", help="model folder, a .pt or .safetensors file of a DiT, smollm2, or minilm")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llm", help="kind of model (default llm)")
    parser.add_argument(
        "--bits", type=bits_argument, default=4, help="activation bits: 1 to 8, ternary, 16 (default 4)"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of the low-rank branch (default 16)")
    parser.add_argument(
        "--gain", choices=("mse", "unbiased", "auto"), help="gain of the activations (default: the preset's)"
    )


def quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``quantize``."""
    preset_arguments(parser)
    parser.add_argument("--plan", type=Path, help="plan of `robuq allocate`, instead of --bits")
    data_arguments(parser)


def settings_of(args: argparse.Namespace) -> RobuQConfig:
    """The configuration that the arguments ask for."""
    changes: dict[str, Any] = {"act_bits": args.bits, "rank": args.rank, "seed": args.seed}
    if args.gain is not None:
        changes["gain"] = args.gain
    return PRESETS[args.preset](**changes)


def resolve(checkpoint: str) -> tuple[Path, Callable[[], nn.Module] | None]:
    """The checkpoint's path, and for files the function that makes their model."""
    if checkpoint in ("smollm2", "minilm"):
        from icml26_shared import models

        return Path(models.path(checkpoint)), None
    path = Path(checkpoint)
    if not path.exists():
        raise UserError(
            f"no checkpoint {checkpoint!r}: give a model folder, a DiT's .pt or .safetensors file, smollm2 or minilm"
        )
    if path.is_dir():
        return path, None
    from robuq.eval.tiny_dit import dit_factory
    from robuq.streaming import open_checkpoint

    readers = open_checkpoint(path)
    wanted = ("x_embedder.proj.weight", "pos_embed", "y_embedder.embedding_table.weight", "t_embedder.mlp.0.weight")
    named = [name for name in readers if name in (*wanted, "final_layer.linear.weight")]
    shapes = dict.fromkeys(readers, (1,)) | {name: tuple(readers[name]().shape) for name in named}
    return path, dit_factory(shapes)


def quantize(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Quantise, save, say what it weighs."""
    path, factory = resolve(args.checkpoint)
    config = settings_of(args)
    batches, forward_fn = batches_of(args, path)
    known: dict[str, Any] = {"batches": batches, "forward_fn": forward_fn} if batches else {}
    model = from_pretrained(path, config, model_factory=factory, **known)
    if args.plan is not None:
        apply_plan(model, Plan.load(args.plan))
        if config.gain == "auto" and batches:
            choose_gain(model, batches, forward_fn)  # again, at the bits that it will run with
    names = [name for name, _ in quantised_layers(model)]
    if not names:
        raise UserError(f"the preset {args.preset!r} matches no linear layer of {args.checkpoint}")
    save_model(model, ctx.out)
    packed = packed_bytes(model)
    full = sum(4 * layer.in_features * layer.out_features for _, layer in quantised_layers(model))
    inside = sum(t.numel() * t.element_size() for _, m in quantised_layers(model) for t in m.buffers())
    ctx.say(
        f"{len(names)} layers: {full / 1e6:.1f} MB in float32, {inside / 1e6:.1f} MB packed "
        f"({full / inside:.1f} times smaller); the whole model {packed / 1e6:.1f} MB, in {ctx.out}"
    )
    return {
        "layers": len(names),
        "float32_bytes": full,
        "packed_bytes": inside,
        "model_bytes": packed,
        "gain": "unbiased" if any(layer.unbiased for _, layer in quantised_layers(model)) else "mse",
        "folder": ctx.out,
    }


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``export``."""
    parser.add_argument("folder", type=Path, help="folder that robuq saved")
    parser.add_argument("--format", choices=("safetensors", "tq2_0", "tq1_0", "bitnet"), required=True)


def export(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Write another format."""
    model = load_pretrained(args.folder, saved_factory(args.folder))
    if args.format == "safetensors":
        path = save_model(model, ctx.out)
    elif args.format == "bitnet":
        from robuq.integrations.bitnet import export_bitnet

        path = export_bitnet(model, ctx.out_file("model.bitnet.safetensors"))
    else:
        from robuq.integrations.gguf import export_gguf

        path = export_gguf(model, ctx.out_file(f"model.{args.format}.gguf"), args.format)
    ctx.say(f"wrote {path}")
    return {"path": path, "format": args.format}


def saved_factory(folder: Path) -> Callable[[], nn.Module] | None:
    """For saved DiTs, whose folder has no config.json, the function that makes their model."""
    from robuq.eval.tiny_dit import dit_factory
    from robuq.storage import read_description, tensor_files

    if read_description(folder)["class"] != "TinyDiT":
        return None
    readers = tensor_files(folder)
    shapes = {name: tuple(read().shape) if not name.startswith("blocks.") else (1,) for name, read in readers.items()}
    return dit_factory(shapes)


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``inspect``."""
    parser.add_argument("folder", type=Path, help="folder that robuq saved")
    data_arguments(parser)


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """Where calibration data comes from."""
    parser.add_argument("--text", type=Path, help="text file, for language models and encoders")
    parser.add_argument("--data", type=Path, help="safetensors file with the model's inputs by name")
    parser.add_argument("--tokenizer", help="folder of the tokenizer (default: the checkpoint's)")


def batches_of(args: argparse.Namespace, tokenizer_folder: str | Path) -> tuple[list[Any], Any]:
    """Calibration batches and the function that runs them; none without data.

    Raises:
        UserError: an empty or unreadable file, or both kinds of data.
    """
    if args.text is not None and args.data is not None:
        raise UserError("give --text or --data, not both")
    if args.text is not None:
        from icml26_shared.data.text import read_text
        from icml26_shared.errors import require

        tokenizer = require("transformers", "transformers").AutoTokenizer.from_pretrained(
            args.tokenizer or tokenizer_folder, local_files_only=True
        )
        ids = tokenizer(read_text(args.text), return_tensors="pt").input_ids[0]
        length = min(256, len(ids))
        rows = [ids[i : i + length] for i in range(0, min(len(ids) - length + 1, 8 * length), length)]
        return [{"input_ids": torch.stack(rows)}], lambda model, batch: model(**batch)
    if args.data is not None:
        from safetensors.torch import load_file

        return [load_file(args.data)], lambda model, batch: model(**batch)
    return [], None


def inspect(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """The health report."""
    model = load_pretrained(args.folder, saved_factory(args.folder))
    batches, forward_fn = batches_of(args, args.folder)
    reports = inspect_layers(model, batches, forward_fn)
    ctx.table(
        f"{args.folder}: {len(reports)} layers",
        ["layer", "bits", "bytes", "NMSE", "NMSE if normal", "kurtosis before", "after", "DC share", "remark"],
        [
            [r.name, str(r.bits), r.size, r.nmse, r.expected, r.kurtosis_before, r.kurtosis_after, r.dc_share, r.remark]
            for r in reports
        ],
    )
    flagged = [r.name for r in reports if r.remark]
    ctx.say(f"{sum(r.size for r in reports) / 1e6:.2f} MB in quantised layers; {len(flagged)} with a remark")
    return {"layers": reports, "flagged": flagged}
