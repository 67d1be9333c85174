"""Training runs on digits that several claims share, kept one by one in the output folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from icml26_shared.checkpoint import load_state, save_state
from icml26_shared.claims import ClaimContext
from robuq.baselines import baseline
from robuq.config import RobuQConfig
from robuq.eval import digits
from robuq.eval.tiny_dit import TinyDiT
from robuq.sensitivity import Sensitivity, measure_sensitivity
from robuq.surgery import quantised_layers, quantize

RANK = 8


def settings(**changes: Any) -> RobuQConfig:
    """RobuQ on the tiny DiT: rank 8, attention in floating point."""
    return RobuQConfig.for_dit(**{"attn_bits": None, "rank": RANK, **changes})


CONFIGURATIONS: dict[str, digits.Run] = {
    "A2": digits.Run(settings(act_bits=2)),
    "A2 plain": digits.Run(settings(act_bits=2, signs="none")),
    "A2 lloyd": digits.Run(settings(act_bits=2, quantizer="gauss_lloyd")),
    "A2 minmax": digits.Run(baseline("minmax+branch", 2, rank=RANK)),
    "A2 minmax hadamard": digits.Run(baseline("minmax+branch+hadamard", 2, rank=RANK)),
    "A3": digits.Run(settings(act_bits=3)),
    "A4": digits.Run(settings(act_bits=4)),
    "A4 r=0": digits.Run(settings(act_bits=4, rank=0)),
    "A4 none": digits.Run(settings(act_bits=4, rotation="none")),
    "A16": digits.Run(settings(act_bits=16)),
    "plan 2.0": digits.Run(settings(), avg_bits=2.0),
    "plan 2.5": digits.Run(settings(), avg_bits=2.5),
    "greedy 2.0": digits.Run(settings(), avg_bits=2.0, solver="greedy"),
    "uniform 2.0 after warm-up": digits.Run(settings(), avg_bits=2.0, solver="uniform"),
}


def fp_model(ctx: ClaimContext, seed: int) -> nn.Module:
    """The floating point model of a seed, trained once."""
    path = ctx.out_file(f"fp/{ctx.sources}-{seed}.safetensors")
    model = TinyDiT()
    if path.is_file():
        model.load_state_dict(load_state(path))
        return model.eval()
    with ctx.progress(f"floating point, seed {seed}", digits.FP_STEPS) as bar:
        model = digits.train_fp(seed, on_step=lambda step: bar.advance())
    save_state(path, dict(model.state_dict()))
    return model


def fp_run(ctx: ClaimContext, seed: int) -> dict[str, float]:
    """Validation loss, Frechet distance and accuracy of the floating point model."""

    def compute() -> dict[str, float]:
        model = fp_model(ctx, seed)
        return {"loss": digits.validation_loss(model), **digits.judge_samples(model)}

    return remember(ctx, {"run": "FP", "seed": seed}, compute)


def qat_run(ctx: ClaimContext, name: str, seed: int) -> dict[str, Any]:
    """The same after quantising and 250 steps, the loss right after quantising, and bits and objective of the plan."""
    run = CONFIGURATIONS[name]

    def compute() -> dict[str, Any]:
        fp = fp_model(ctx, seed)
        before = quantize(_copy(fp), run.config)
        start = digits.validation_loss(before)
        with ctx.progress(f"{name}, seed {seed}", run.steps) as bar:
            model, training = digits.train_quantised(fp, run, seed, on_step=lambda step, loss: bar.advance())
        plan = None if training.plan is None else training.plan.to_json()
        sens = None if training.sensitivity is None else training.sensitivity.to_json()
        return {
            "start": start,
            "loss": digits.validation_loss(model),
            **digits.judge_samples(model),
            "bits": {layer: module.bits for layer, module in quantised_layers(model)},
            "plan": plan,
            "sensitivity": sens,
        }

    return remember(ctx, {"run": name, "seed": seed}, compute)


def sensitivity_after(ctx: ClaimContext, steps: int, seed: int) -> Sensitivity:
    """S after some steps of training at 4 bits."""

    def compute() -> dict[str, Any]:
        run = digits.Run(settings(act_bits=4), steps=steps)
        fp = fp_model(ctx, seed)
        with ctx.progress(f"sensitivity after {steps} steps, seed {seed}", max(1, steps)) as bar:
            model, _ = digits.train_quantised(fp, run, seed, on_step=lambda step, loss: bar.advance())
        return measure_sensitivity(model, *digits.calibration()).to_json()

    return Sensitivity.from_json(remember(ctx, {"run": f"sensitivity {steps}", "seed": seed}, compute))


def _copy(model: nn.Module) -> nn.Module:
    copied = TinyDiT()
    copied.load_state_dict(model.state_dict())
    return copied.eval()


def remember(ctx: ClaimContext, key: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """``compute()`` on one thread, made once for all claims."""

    def alone() -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # layers this small are slower on several cores, and sums keep one order
        try:
            return compute()
        finally:
            torch.set_num_threads(threads)

    return ctx.shared(key, alone)
