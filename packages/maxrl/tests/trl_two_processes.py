"""Run one MaxRL step in a group of processes over gloo: ``python trl_two_processes.py OUT``.

Forks one process alone and then two together, so that the libraries load once; each writes its advantages, the first of
each group also its log and its weights.
"""

import os
import sys
from pathlib import Path

import torch
import trl_setup
from trl.trainer.utils import _find_free_port


def even_prompts_only(prompts, completions, **_):
    """Odd prompts have no success, so that their rollouts are dropped, unevenly over the processes."""
    passed = trl_setup.digit_reward(prompts, completions)
    return [r * (int(p.split()[0]) % 2 == 0) for p, r in zip(prompts, passed, strict=True)]


def work(out, rank, world, port):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    trainer = trl_setup.trainer(
        out / f"run-{world}-{rank}",
        reward=even_prompts_only,
        rollout=trl_setup.scripted_rollout,
        per_device_train_batch_size=16 // world,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        estimator="loo",
        ddp_backend="gloo" if world > 1 else None,
    )
    assert trainer.accelerator.num_processes == world
    used, score = [], trainer._generate_and_score_completions

    def keep(inputs):
        batch = score(inputs)
        used.append(batch["advantages"].clone())
        return batch

    trainer._generate_and_score_completions = keep
    trainer.train()
    result = {"used": torch.stack(used), "logged": torch.tensor(list(trainer._logs["advantages"]))}
    result["dropped"] = torch.tensor([h["maxrl/dropped_tokens"] for h in history(trainer)])
    result["weights"] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    torch.save(result, out / f"result-{world}-{rank}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def history(trainer):
    return [{k: float(v) for k, v in h.items()} for h in trainer.state.log_history if "maxrl/dropped_tokens" in h]


def main(out):
    for world in (1, 2):
        port, children = _find_free_port(), []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(out, rank, world, port)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a process of {world} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
