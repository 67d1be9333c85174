"""Quantisation-aware training, resumable to the bit: warm-up, sensitivity, plan, and on with the same optimiser.

AdamW (0.9, 0.999) without weight decay, gradients clipped at norm 1, EMA of the weights, linear warm-up of the rate
and a cosine to a tenth (RobuQ, arXiv 2509.23582; rate, batch and EMA are DiT's).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml26_shared.checkpoint import CheckpointError, load_state, save_state
from robuq.allocation import Plan, allocate_bits, apply_plan
from robuq.sensitivity import Sensitivity, measure_sensitivity
from robuq.surgery import macs_per_token, quantised_layers

Loss = Callable[[nn.Module, int], Tensor]
CHECKPOINT = "qat.safetensors"


@dataclass(frozen=True)
class QATConfig:
    """Settings of a training.

    Attributes:
        steps: all steps.
        lr: largest rate.
        lr_warmup: steps of linear warm-up.
        lr_final: last rate, as a share of ``lr``.
        betas, weight_decay, clip: AdamW and the largest norm of the gradient.
        ema: decay of the averaged weights; 0 keeps none.
        avg_bits: average activation bits of the plan; None leaves the bits as they are.
        warm: steps at ``warm_bits`` before the sensitivity is measured (N_warm).
        warm_bits: bits until then.
        bits: candidates.
        weights: what bits are averaged over.
        solver: see `robuq.allocate_bits`.
        save_every: steps between checkpoints.
        seed: of torch's generators, at the start.
    """

    steps: int
    lr: float = 1e-4
    lr_warmup: int = 500
    lr_final: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.9999
    avg_bits: float | None = None
    warm: int = 1000
    warm_bits: int = 4
    bits: tuple[int, ...] = (1, 2, 3, 4)
    weights: Literal["macs", "layers", "elements"] = "macs"
    solver: Literal["dp", "greedy", "uniform"] = "dp"
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "bits", tuple(self.bits))
        if self.steps < 0 or self.save_every < 1 or self.lr_warmup < 0:
            raise ValueError("steps and lr_warmup must be at least 0, save_every at least 1")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1), got {self.ema}")
        if self.avg_bits is not None and self.warm > self.steps:
            raise ValueError(f"the plan is made after {self.warm} steps, but there are {self.steps}; lower warm")

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, ...: linear warm-up, then a cosine to ``lr_final``."""
        if step < self.lr_warmup:
            return self.lr * (step + 1) / self.lr_warmup
        share = (step - self.lr_warmup) / max(1, self.steps - self.lr_warmup)
        return self.lr * (self.lr_final + (1 - self.lr_final) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


class QAT:
    """A training that can be stopped at any moment and goes on to the same bits (on the CPU).

    Args:
        model: quantised, trainable.
        config: settings.
        loss: ``loss(model, step)``: the training loss of a step, a scalar. All its randomness must come from torch's
            default generator or from ``step``, so that a resumed run repeats it.
        folder: for checkpoints; None keeps none.
        calibrate: ``calibrate() -> (batches, forward_fn)`` for the sensitivity; needed with ``config.avg_bits``.
        on_step: called with the step and the loss after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        config: QATConfig,
        loss: Loss,
        *,
        folder: str | Path | None = None,
        calibrate: Callable[[], tuple[Any, Any]] | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> None:
        if config.avg_bits is not None and calibrate is None:
            raise ValueError("avg_bits needs calibrate, which gives the batches for the sensitivity")
        if not any(True for _ in quantised_layers(model)):
            raise ValueError("nothing in this model is quantised; call robuq.quantize(model, config) first")
        self.model, self.config, self.loss, self.calibrate = model, config, loss, calibrate
        self.on_step = on_step
        self.path = None if folder is None else Path(folder) / CHECKPOINT
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, config.lr, config.betas, weight_decay=config.weight_decay)
        self.step = 0
        self.plan: Plan | None = None
        self.sensitivity: Sensitivity | None = None
        self.ema: dict[str, Tensor] = {}
        if config.ema:
            self.ema = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def run(self, until: int | None = None) -> nn.Module:
        """Train to the end, or until a step; goes on from the checkpoint, if there is one.

        Returns:
            The model with its last weights (see :meth:`load_ema`).

        Raises:
            CheckpointError: the checkpoint is damaged or of another training.
        """
        if self.path is not None and self.path.is_file():
            self._restore(load_state(self.path))
        elif self.step == 0:
            torch.manual_seed(self.config.seed)
            if self.config.avg_bits is not None:
                self._set_bits(self.config.warm_bits)
        last = self.config.steps if until is None else min(until, self.config.steps)
        self.model.train()
        while self.step < last:
            self._allocate()
            self._advance()
            if self.path is not None and (self.step % self.config.save_every == 0 or self.step == last):
                self.save()
        self._allocate()
        return self.model

    def _advance(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, self.step)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self.config.clip)
        self.optimizer.step()
        self.step += 1
        if self.ema:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name in self.ema:
                        self.ema[name].lerp_(parameter.detach(), 1 - self.config.ema)
        if self.on_step is not None:
            self.on_step(self.step, float(loss.detach()))

    def _allocate(self) -> None:
        """After the warm-up: measure, plan, set bits; once."""
        config = self.config
        if config.avg_bits is None or self.plan is not None or self.step < config.warm or self.calibrate is None:
            return
        state = torch.get_rng_state()
        batches, forward_fn = self.calibrate()
        self.sensitivity = measure_sensitivity(self.model, batches, forward_fn, config.bits)
        macs = macs_per_token(self.model)
        self.plan = allocate_bits(self.sensitivity, macs, config.avg_bits, config.solver, weights=config.weights)
        torch.set_rng_state(state)
        apply_plan(self.model, self.plan)

    def _set_bits(self, bits: int) -> None:
        for _, layer in quantised_layers(self.model):
            if not layer.is_ada:
                layer.bits = bits

    def load_ema(self) -> nn.Module:
        """Put the averaged weights into the model."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.ema:
                    parameter.copy_(self.ema[name])
        return self.model

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if self.path is None:
            raise ValueError("this training has no folder to save to")
        state = {
            "config": dataclasses.asdict(self.config),
            "step": self.step,
            "model": dict(self.model.state_dict()),
            "bits": {name: layer.bits for name, layer in quantised_layers(self.model)},
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "plan": None if self.plan is None else self.plan.to_json(),
            "sensitivity": None if self.sensitivity is None else self.sensitivity.to_json(),
        }
        save_state(self.path, state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        kept, mine = state["config"], dataclasses.asdict(self.config)
        differing = sorted(key for key in mine if kept.get(key) != mine[key] and key != "save_every")
        if differing:
            raise CheckpointError(
                f"{self.path} was made with other settings ({', '.join(differing)}); use another folder"
            )
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(f"{self.path} is of another model: {str(error).splitlines()[-1].strip()}") from None
        layers = dict(quantised_layers(self.model))
        for name, bits in state["bits"].items():
            layers[name].bits = bits
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema, self.step = dict(state["ema"]), int(state["step"])
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        kept_sensitivity = state["sensitivity"]
        self.sensitivity = None if kept_sensitivity is None else Sensitivity.from_json(kept_sensitivity)
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])


def distilled(
    task: Tensor, output: Tensor, teacher: Tensor, weight: float, kind: Literal["mse", "kl"] = "mse"
) -> Tensor:
    """``(1 - lam) task + lam distance``: squared error of outputs, or KL divergence of logits at temperature 1.

    Args:
        task: loss of the task, a scalar.
        output, teacher: of the quantised and of the unquantised model.
        weight: lam in [0, 1]; 0 for diffusion, 0.5 for classifiers and language models.
        kind: ``"mse"`` or ``"kl"`` (over the last axis, a mean over the others).
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be in [0, 1], got {weight}")
    if weight == 0:
        return task
    if kind == "kl":
        flat = output.flatten(0, -2).log_softmax(-1)
        distance = F.kl_div(flat, teacher.flatten(0, -2).log_softmax(-1), reduction="batchmean", log_target=True)
    else:
        distance = F.mse_loss(output, teacher)
    return (1 - weight) * task + weight * distance
