"""``robuq qat CONFIG.yaml``: train with quantisation, from a file of settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.errors import UserError, require
from icml26_shared.models import MODELS
from robuq.config import RobuQConfig
from robuq.storage import save_model
from robuq.surgery import quantize
from robuq.training import QAT, QATConfig

if TYPE_CHECKING:
    from icml26_shared.console import Context

TASKS = ("digits", "latents", "text")
_PRESETS: dict[str, Callable[..., RobuQConfig]] = {
    "dit": RobuQConfig.for_dit,
    "vit": RobuQConfig.for_vit,
    "llm": RobuQConfig.for_llm,
    "none": RobuQConfig,
}


def qat_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qat``."""
    parser.add_argument("config", type=Path, help="YAML file: task, checkpoint, data, quantization, training")


def qat(ctx: Context, args: argparse.Namespace) -> dict[str, Any]:
    """Train, or go on; save the packed model beside the checkpoint."""
    told = read_config(args.config)
    training = told.get("training", {})
    try:
        settings = QATConfig(**{"seed": args.seed, **training})
        preset = _PRESETS[told.get("preset", "none")]
        config = preset(
            **{"gain": "mse", "weight_scale": "absmean", "weight_gain": None, **told.get("quantization", {})}
        )
    except (TypeError, KeyError) as error:
        raise UserError(f"{args.config}: {error}") from None
    for key in ("checkpoint", "data"):  # before anything is read, let alone trained
        named = told.get(key)
        if named is not None and named not in MODELS and not Path(str(named)).exists():
            raise UserError(
                f"{args.config}: there is no {key} {str(named)!r} here ({Path.cwd()}); put it there, or write its path "
                f"after {key}:"
            )
    model, loss, calibrate = prepare(told, args.seed, ctx)
    model = quantize(model, config)
    losses: list[float] = []
    with ctx.progress("training", settings.steps) as bar:

        def on_step(step: int, value: float) -> None:
            losses.append(value)
            bar.update(f"training: loss {value:.4g}", completed=step)

        run = QAT(model, settings, loss, folder=ctx.out, calibrate=calibrate, on_step=on_step)
        ctx.out.mkdir(parents=True, exist_ok=True)
        run.run()
    folder = save_model(run.load_ema(), ctx.out / "packed")
    plan = None if run.plan is None else run.plan.to_json()
    last = losses[-1] if losses else None
    ctx.say(f"{run.step} steps{'' if last is None else f', last loss {last:.4g}'}; packed model in {folder}")
    return {"steps": run.step, "loss": last, "plan": plan, "folder": folder}


def read_config(path: Path) -> Mapping[str, Any]:
    """The settings.

    Raises:
        UserError: not YAML, unknown keys or an unknown task.
    """
    yaml = require("yaml", "yaml")
    try:
        told = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    known = {"task", "checkpoint", "data", "preset", "quantization", "training", "batch", "length", "distill"}
    if not isinstance(told, dict) or set(told) - known or told.get("task") not in TASKS:
        raise UserError(f"{path} must have task: one of {', '.join(TASKS)}, and else only {', '.join(sorted(known))}")
    return told


Prepared = tuple[nn.Module, Callable[[nn.Module, int], Tensor], Callable[[], tuple[Any, Any]]]


def prepare(told: Mapping[str, Any], seed: int, ctx: Context) -> Prepared:
    """Model, loss and calibration of a task."""
    if told["task"] == "digits":
        return _digits(told, seed, ctx)
    for key in ("checkpoint", "data"):
        if key not in told:
            raise UserError(f"task {told['task']} needs {key}")
    return (_latents if told["task"] == "latents" else _text)(told)


def _digits(told: Mapping[str, Any], seed: int, ctx: Context) -> Prepared:
    from robuq.eval import digits
    from robuq.eval.tiny_dit import TinyDiT

    if "checkpoint" in told:
        from safetensors.torch import load_file

        model = TinyDiT()
        model.load_state_dict(load_file(told["checkpoint"]))
    else:
        with ctx.progress("floating point model", digits.FP_STEPS) as bar:
            model = digits.train_fp(seed, on_step=lambda step: bar.advance())
    return model, digits.diffusion_loss, digits.calibration


def _latents(told: Mapping[str, Any]) -> Prepared:
    """A DiT on latents: a safetensors file with ``x`` [N, c, h, w] and ``y`` [N]."""
    from safetensors.torch import load_file

    from robuq.cli_model import resolve
    from robuq.eval.tiny_dit import TIMESTEPS, add_noise
    from robuq.streaming import open_checkpoint

    data = load_file(told["data"])
    if set(data) < {"x", "y"}:
        raise UserError(f"{told['data']} needs the tensors x and y, it has {', '.join(sorted(data))}")
    x, y, size = data["x"].float(), data["y"].long(), int(told.get("batch", 32))
    path, factory = resolve(str(told["checkpoint"]))
    if factory is None:
        raise UserError("task latents needs a DiT's .pt or .safetensors file as checkpoint")
    model = factory()
    model.load_state_dict({name: read() for name, read in open_checkpoint(path).items()})

    def loss(model: nn.Module, step: int) -> Tensor:
        picks = torch.randint(0, len(x), (size,))
        t, noise = torch.randint(0, TIMESTEPS, (size,)), torch.randn(size, *x.shape[1:])
        found = model(add_noise(x[picks], t, noise), t, y[picks])[:, : x.shape[1]]  # a learned variance is not trained
        return F.mse_loss(found, noise)

    def calibrate() -> tuple[Any, Any]:
        g = torch.Generator().manual_seed(77)
        picks = torch.randint(0, len(x), (256,), generator=g)
        t, noise = torch.randint(0, TIMESTEPS, (256,), generator=g), torch.randn(256, *x.shape[1:], generator=g)
        noisy = add_noise(x[picks], t, noise)
        parts = zip(noisy.split(size), t.split(size), y[picks].split(size), strict=True)
        return list(parts), lambda model, batch: model(*batch)

    return model, loss, calibrate


def _text(told: Mapping[str, Any]) -> Prepared:
    """A causal language model on a text file, with distillation from itself before quantising."""
    import copy

    from icml26_shared import models
    from icml26_shared.data.text import read_text
    from robuq.training import distilled

    model, tokenizer = models.load(str(told["checkpoint"]), dtype="float32")
    teacher = copy.deepcopy(model).eval()
    ids = tokenizer(read_text(told["data"]), return_tensors="pt").input_ids[0]
    size, length, weight = int(told.get("batch", 8)), int(told.get("length", 128)), float(told.get("distill", 0.5))
    if len(ids) <= length:
        raise UserError(f"{told['data']} has {len(ids)} tokens; it needs more than {length}")

    def rows(starts: Tensor) -> Tensor:
        return torch.stack([ids[s : s + length] for s in starts])

    def loss(model: nn.Module, step: int) -> Tensor:
        batch = rows(torch.randint(0, len(ids) - length, (size,)))
        logits = model(batch).logits
        task = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        if weight == 0:
            return task
        with torch.no_grad():
            target = teacher(batch).logits
        return distilled(task, logits, target, weight, "kl")

    def calibrate() -> tuple[Any, Any]:
        batch = rows(torch.linspace(0, len(ids) - length - 1, size).long())
        return [batch], lambda model, batch: model(batch)

    return model, loss, calibrate
