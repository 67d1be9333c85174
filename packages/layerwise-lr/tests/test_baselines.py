"""Baselines by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from layerwise_lr import LAMB, LARS, BlockwiseSharpnessLR, LayerwiseLR, param_groups
from layerwise_lr.baselines import block_type, mean_ratio, permuted


def one(value, grad):
    p = nn.Parameter(torch.tensor(value))
    p.grad = torch.tensor(grad)
    return p


def test_lars_by_hand():
    p = one([3.0, 4.0], [0.0, 2.0])
    optimizer = LARS([p], lr=0.1, momentum=0.5, weight_decay=0.1)
    optimizer.step()
    v = torch.tensor([0.3, 2.4])
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 5 / (v.norm() + 1e-6) * v
    assert torch.allclose(p.detach(), expected)
    p.grad = torch.zeros(2)
    before = p.detach().clone()
    optimizer.step()
    v = 0.5 * v + 0.1 * before
    assert torch.allclose(p.detach(), before - 0.1 * before.norm() / (v.norm() + 1e-6) * v)


def test_lamb_by_hand():
    p = one([3.0, 4.0], [0.5, -2.0])
    LAMB([p], lr=0.1, weight_decay=0.1, eps=0.0).step()
    update = torch.tensor([1.0, -1.0]) + 0.1 * torch.tensor([3.0, 4.0])  # Adam's first direction is the sign
    assert torch.allclose(p.detach(), torch.tensor([3.0, 4.0]) - 0.1 * 5 / update.norm() * update)


@pytest.mark.parametrize("cls", [LARS, LAMB])
def test_zero_weights_still_move(cls):
    p = one([0.0, 0.0], [1.0, 1.0])
    cls([p], lr=0.1).step()
    assert torch.allclose(p.detach(), torch.tensor([-0.1, -0.1]), rtol=1e-4)
    with pytest.raises(ValueError, match="lr must not be negative, got -1"):
        cls([p], lr=-1)


def test_block_types_and_ratios(model):
    assert block_type("layers.0.self_attn.q_proj") == block_type("layers.0.attention.self.key") == "qk"
    assert block_type("layers.0.self_attn.o_proj") == "vo"
    assert block_type("layers.0.mlp.up_proj") == "ffn"
    assert block_type("lm_head", "head") == "embedding"
    optimizer = SGD(param_groups(model, 1e-3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fixed = BlockwiseSharpnessLR(optimizer, model, scheduler, {"ffn": 5.0})
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        fixed.step()
    rates = {group["name"]: group["lr"] / (1e-3 * 0.5**3) for group in optimizer.param_groups}
    assert rates["embed"] == pytest.approx(10)
    assert rates["layers.0.up"] == pytest.approx(5)
    assert rates["norms and biases"] == pytest.approx(1)
    with pytest.raises(ValueError, match="unknown block types attention"):
        BlockwiseSharpnessLR(SGD(param_groups(model, 1e-3)), model, None, {"attention": 1.0})


def test_controls_keep_the_distribution_or_the_mean(model):
    found = {}
    for name, remap in {"llr": None, "permuted": permuted(0), "mean": mean_ratio}.items():
        controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=10, ramp=0, remap=remap)
        controller.step()
        found[name] = controller.ratios
    assert sorted(found["permuted"].values()) == sorted(found["llr"].values())
    assert found["permuted"] != found["llr"]
    assert permuted(0)(found["llr"]) == permuted(0)(found["llr"])
    mean = sum(found["llr"].values()) / len(found["llr"])
    assert list(found["mean"].values()) == pytest.approx([mean] * len(found["llr"]))


def test_a_remap_must_return_positive_ratios_of_known_matrices(model):
    for remap in (lambda t: {"nobody": 1.0}, lambda t: dict.fromkeys(t, -1.0)):
        controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=10, remap=remap)
        with pytest.raises(ValueError, match="remap must return positive ratios of known matrices"):
            controller.step()
