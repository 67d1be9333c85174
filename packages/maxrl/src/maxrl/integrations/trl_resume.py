"""Resuming a TRL run so that its next step is the one the interrupted run would have made.

TRL generates once for several updates, and saves neither these rollouts nor its place among the updates nor the order
of the prompts of a later epoch; a resumed run would generate anew with other weights, or walk through the epoch in the
order of the first one. All three are saved with the checkpoint here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from icml26_shared.checkpoint import atomic_path, atomic_write_json

_STATE = "maxrl_state.json"


def _rollouts_file(folder: Path, rank: int) -> Path:
    return folder / f"maxrl_rollouts_{rank}.safetensors"


def save(trainer: Any, trial: Any) -> None:
    """Write the trainer's micro-step, and the rollouts of an unfinished window, into the checkpoint just saved."""
    from safetensors.torch import save_file

    folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
    window = trainer.args.steps_per_generation * trainer.num_iterations
    if trainer._step % window != 0 and trainer._buffered_inputs is not None:
        tensors = {}
        for i, batch in enumerate(trainer._buffered_inputs):
            for name, value in batch.items():
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    return  # vision batches hold lists: TRL's own behaviour (a new generation) is kept for them
                tensors[f"{i}.{name}"] = value.detach().cpu().clone().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(_rollouts_file(folder, trainer.accelerator.process_index)) as path:
            save_file(tensors, path)
    if trainer.accelerator.is_main_process:
        state = {
            "step": trainer._step,
            "window": window,
            "epoch": int(trainer.state.epoch + 1e-9),
            "unscorable": trainer._unscorable,
        }
        atomic_write_json(folder / _STATE, state)


def load(trainer: Any, checkpoint: str) -> None:
    """Restore what :func:`save` wrote. A checkpoint without it (plain TRL's) is resumed as TRL does."""
    from safetensors.torch import load_file

    folder = Path(checkpoint)
    if not (folder / _STATE).is_file():
        return
    state = json.loads((folder / _STATE).read_text())
    trainer._unscorable = int(state["unscorable"])
    window = trainer.args.steps_per_generation * trainer.num_iterations
    if state["window"] != window:
        raise ValueError(
            f"this checkpoint was made with {state['window']} updates per generation and the run has {window}: keep "
            "steps_per_generation and num_iterations to resume"
        )
    trainer._step = int(state["step"])
    _advance(trainer._train_sampler, int(state["epoch"]))
    rollouts = _rollouts_file(folder, trainer.accelerator.process_index)
    if not rollouts.is_file():
        return
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in load_file(rollouts, device=str(trainer.accelerator.device)).items():
        index, name = key.split(".", 1)
        batches.setdefault(int(index), {})[name] = value
    trainer._buffered_inputs = [batches[i] for i in sorted(batches)]


def _advance(sampler: Any, epochs: int) -> None:
    """Let TRL's RepeatSampler, which draws one permutation an epoch from its own generator, pass over finished
    epochs."""
    generator = getattr(sampler, "generator", None)
    if generator is not None:
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=generator)
