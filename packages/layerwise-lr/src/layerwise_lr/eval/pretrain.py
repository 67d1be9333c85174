"""The paper's pre-training runs: LLaMA of 60M to 1B parameters, LLR against one rate, in one or several processes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from icml26_shared.checkpoint import load_state, save_state
from icml26_shared.errors import UserError
from layerwise_lr.controller import LayerwiseLR
from layerwise_lr.eval.fineweb import documents, token_windows
from layerwise_lr.eval.llama import Llama, Shape
from layerwise_lr.eval.stdlib_lm import schedule
from layerwise_lr.groups import param_groups

VALIDATION_WINDOWS = 1024


@dataclass(frozen=True)
class Suite:
    """A published run.

    Args:
        width, layers, heads, ffn: sizes.
        lr: tuned uniform rate, also LLR's base rate.
        s2: LLR's largest ratio.
        interval, ramp, steps: of LLR and the run.
        batch: sequences a step, over all processes.
        length: tokens a sequence.
    """

    width: int
    layers: int
    heads: int
    ffn: int
    lr: float
    s2: float
    interval: int
    ramp: int
    steps: int
    batch: int = 512
    length: int = 1024


SUITES = {
    "llama60m": Suite(768, 6, 12, 1512, 6e-4, 3.0, 40, 20, 3200),
    "llama1b": Suite(2048, 24, 32, 5461, 5e-4, 5.0, 100, 50, 40_000),
}


@dataclass
class Job:
    """One training of a suite, resumable.

    Args:
        suite: the run.
        root: folder with parquet files.
        tokenizer: of transformers.
        folder: where states go.
        llr: with LLR, or one rate.
        seed: of the initial weights.
        micro: sequences a forward pass and process.
        device: of this process.
        save_every: steps between saved states.
    """

    suite: Suite
    root: Path
    tokenizer: Any
    folder: Path
    llr: bool = True
    seed: int = 0
    micro: int = 8
    device: str = "cpu"
    save_every: int = 200

    def run(self, on_step: Any = None) -> dict[str, Any]:
        """Train from the last saved state on; returns validation perplexity, tokens and steps."""
        suite, (rank, count) = self.suite, _processes()
        if suite.batch % (self.micro * count):
            raise UserError(f"--micro {self.micro} times {count} processes must divide the batch of {suite.batch}")
        model = self._model()
        optimizer = torch.optim.AdamW(
            param_groups(model, suite.lr, weight_decay=0.1, decay_norm_bias=True), lr=suite.lr, betas=(0.9, 0.999)
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(suite.steps))
        settings: dict[str, Any] = {
            "s2": suite.s2,
            "interval": suite.interval,
            "ramp": suite.ramp,
            "total_steps": suite.steps,
        }
        controller = LayerwiseLR(optimizer, model, scheduler, **settings) if self.llr else None
        first = self._resume(model, optimizer, scheduler, controller)
        train = nn.parallel.DistributedDataParallel(model) if count > 1 else model
        windows = self._windows(rank, count, first)
        for step in range(first, suite.steps):
            self._step(train, optimizer, windows, count)
            scheduler.step()
            if controller is not None:
                controller.step()
            if (step + 1) % self.save_every == 0 or step + 1 == suite.steps:
                self._save(step + 1, model, optimizer, scheduler, controller, rank)
            if on_step is not None:
                on_step(step + 1)
        return {
            "perplexity": self._perplexity(model),
            "steps": suite.steps,
            "tokens": suite.steps * suite.batch * suite.length,
            "parameters": sum(p.numel() for p in model.parameters()),
        }

    def _model(self) -> Llama:
        s = self.suite
        shape = Shape(len(self.tokenizer), s.width, s.layers, s.heads, s.ffn, s.length)
        return Llama(shape, self.seed).to(self.device)

    def _step(self, train: Any, optimizer: Any, windows: Iterator[Tensor], count: int) -> None:
        optimizer.zero_grad()
        parts = self.suite.batch // (self.micro * count)
        for _ in range(parts):
            stack = list(itertools.islice(windows, self.micro))
            if len(stack) < self.micro:
                raise UserError(f"{self.root} has too little text for {self.suite.steps} steps")
            batch = torch.stack(stack).to(self.device)
            with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.device != "cpu"):
                logits = train(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / parts).backward()
        nn.utils.clip_grad_norm_(train.parameters(), 1.0)
        optimizer.step()

    def _windows(self, rank: int, count: int, first_step: int) -> Iterator[Tensor]:
        """This process's share of the training windows, from a step on; the first ones are for validation."""
        skip = VALIDATION_WINDOWS + first_step * self.suite.batch
        found = token_windows(documents(self.root), self.tokenizer, self.suite.length, skip)
        return itertools.islice(found, rank, None, count)

    @torch.no_grad()
    def _perplexity(self, model: Llama) -> float:
        total = seen = 0.0
        found = token_windows(documents(self.root), self.tokenizer, self.suite.length)
        for window in itertools.islice(found, VALIDATION_WINDOWS):
            total += float(model.loss(window[None].to(self.device)))
            seen += 1
        return math.exp(total / seen)

    def _save(self, step: int, model: Any, optimizer: Any, scheduler: Any, controller: Any, rank: int) -> None:
        if rank:
            return
        state = {
            "step": step,
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "controller": None if controller is None else controller.state_dict(),
        }
        save_state(self.folder / "state.safetensors", state)

    def _resume(self, model: Any, optimizer: Any, scheduler: Any, controller: Any) -> int:
        path = self.folder / "state.safetensors"
        if not path.is_file():
            return 0
        state = load_state(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        if controller is not None:
            controller.load_state_dict(state["controller"])
        return int(state["step"])


def _processes() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def join_processes() -> str:
    """Join the processes of torchrun, if there are any; returns this one's device."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(local)
    return f"cuda:{local}" if cuda else "cpu"
