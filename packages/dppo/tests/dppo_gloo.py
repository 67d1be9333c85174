"""Of test_trl_distributed: trains in one or two processes and says what must not depend on how many."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

import dppo_trl as small  # noqa: E402 after the number of threads is set

from dppo import DynamicPruningConfig, DynamicPruningTrainer  # noqa: E402


def equal_rewards(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def train(folder: str | Path, options: dict[str, Any], world: int) -> dict[str, Any]:
    options = {**options, "per_device_train_batch_size": options["per_device_train_batch_size"] // world}
    reward = equal_rewards if options.pop("equal_rewards", False) else small.reward
    args = small.config(DynamicPruningConfig, folder, **options)
    trainer = small.trainer(DynamicPruningTrainer, args, reward_funcs=reward)
    log, empty, forwards = [], [0], [0]
    original, loss = trainer._masks, trainer._compute_loss

    def masks(shared, rows):
        result = original(shared, rows)
        log.append([shared["keys"].tolist(), shared["whole"].weight.tolist(), shared["pulled"]])
        return result

    def counted(model, inputs):
        empty[0] += not bool((inputs["row_weight"] > 0).any())
        return loss(model, inputs)

    def count_forward(*_):
        forwards[0] += 1

    trainer._masks, trainer._compute_loss = masks, counted
    trainer.model.register_forward_hook(count_forward)
    trainer.train()
    values = torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
    scores = trainer.history.scores(sorted(key for key, _ in trainer.history._rows)).tolist()
    return {
        "rank": trainer.accelerator.process_index,
        "masks": log,
        "empty": empty[0],
        "forwards": forwards[0],
        "history": scores,
        "parameters": values.tolist(),
        "steps": trainer.state.global_step,
    }


def main() -> None:
    """Becomes two processes here, after the imports, which take most of the time."""
    folder, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
    child = os.fork()
    rank = 0 if child else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    results = {name: train(folder / name, options, 2) for name, options in scenarios.items()}
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    if child:
        sys.exit(os.waitpid(child, 0)[1] != 0)


if __name__ == "__main__":
    main()
