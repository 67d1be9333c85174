"""Two processes: ranks agree, sharded weights are gathered, as on one."""

import json
import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from layerwise_lr import LayerwiseLR, param_groups

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    with torch.no_grad():
        for index, layer in enumerate(model):
            layer.weight *= torch.arange(1, 65) ** -(0.3 * index)
    return model

def control(model, **settings):
    return LayerwiseLR(torch.optim.SGD(param_groups(model, 1e-3)), model, total_steps=10, ramp=0, **settings)

found = {}
# in the background; saved by one rank alone while a measurement is under way, loaded by both
controller = control(make(), background=True, deterministic=False)
controller.step()
kept = [controller.state_dict() if rank == 0 else None]
controller.close()
torch.distributed.broadcast_object_list(kept)
found["pending"] = kept[0]["pending"]
controller = control(make(), background=True, deterministic=False)
controller.load_state_dict(kept[0])
controller.step()
controller.close()
found["background"] = controller.ratios
sharded = make()
mesh = init_device_mesh("cpu", (2,))
for layer in sharded:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
controller = control(sharded)
controller.step()
found["sharded"] = controller.ratios
json.dump(found, open(f"{folder}/{rank}.json", "w"))
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_ranks_agree_with_one_process(tmp_path):
    from torch import nn

    from layerwise_lr import LayerwiseLR, param_groups

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=600)
        assert worker.returncode == 0, errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    with torch.no_grad():
        for index, layer in enumerate(model):
            layer.weight *= torch.arange(1, 65) ** -(0.3 * index)
    controller = LayerwiseLR(torch.optim.SGD(param_groups(model, 1e-3)), model, total_steps=10, ramp=0)
    controller.step()
    assert found[0] == found[1]
    assert found[0] == {"pending": "measure again", "background": controller.ratios, "sharded": controller.ratios}
    assert len(set(controller.ratios.values())) == 3
