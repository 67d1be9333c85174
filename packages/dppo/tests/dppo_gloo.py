"""Run by test_trl_distributed: trains in one or two gloo processes and writes what must not depend on how many."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

import dppo_trl as small  # noqa: E402 after the number of threads is set

from dppo import DynamicPruningConfig, DynamicPruningTrainer  # noqa: E402


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options["per_device_train_batch_size"] //= world
    trainer = small.trainer(DynamicPruningTrainer, small.config(DynamicPruningConfig, folder, **options))
    log, empty = [], [0]
    original, loss = trainer._masks, trainer._compute_loss

    def masks(shared, rows):
        result = original(shared, rows)
        log.append([shared["keys"].tolist(), shared["whole"].weight.tolist(), shared["pulled"]])
        return result

    def counted(model, inputs):
        empty[0] += not bool((inputs["row_weight"] > 0).any())
        return loss(model, inputs)

    trainer._masks, trainer._compute_loss = masks, counted
    trainer.train()
    values = torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
    rank = trainer.accelerator.process_index
    scores = trainer.history.scores(sorted(trainer.history._rows)).tolist()
    result = {
        "masks": log,
        "empty": empty[0],
        "history": scores,
        "parameters": values.tolist(),
        "steps": trainer.state.global_step,
    }
    (Path(folder) / f"result-{world}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
