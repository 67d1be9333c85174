"""The verl adapter, on stand-ins for DataProto (verl is not installed in tests)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dppo import PruningConfig
from dppo.draws import MaskGenerator
from dppo.losses import Surrogate
from dppo.verl import prune_batch

T = torch.tensor


def batch():
    mask = T([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    advantages = T([0.75, -0.25, -0.25, -0.25])[:, None] * mask
    return {"advantages": advantages, "response_mask": mask, "uid": np.array(["q"] * 4, dtype=object)}


@pytest.mark.parametrize("as_proto", [False, True])
def test_weights_go_into_advantages_and_masks(as_proto):
    tensors = batch()
    data = tensors
    if as_proto:
        uid = tensors.pop("uid")
        data = SimpleNamespace(batch=tensors, non_tensor_batch={"uid": uid})
    before = tensors["advantages"].clone()
    result = prune_batch(data, PruningConfig(mode="fixed"), generator=MaskGenerator(0, 4))
    assert int(result.keep.sum()) == 3
    torch.testing.assert_close(tensors["advantages"], before * result.weight[:, None])
    assert (tensors["response_mask"].sum(1) > 0).tolist() == result.keep.tolist()


def test_weights_as_importance_weights():
    tensors = batch()
    before = tensors["advantages"].clone()
    tensors["rollout_is_weights"] = torch.full((4, 3), 0.5)
    result = prune_batch(tensors, generator=1, weights="rollout_is_weights")
    assert torch.equal(tensors["advantages"], before)
    torch.testing.assert_close(tensors["rollout_is_weights"], 0.5 * result.weight[:, None].expand(4, 3))


def test_clipped_surrogate_is_homogeneous_in_the_advantage():
    """Why weighting advantages is weighting the loss, clip included (a weight is positive)."""
    rng = torch.Generator().manual_seed(0)
    logps, old = (torch.randn(6, 4, generator=rng).double() for _ in range(2))
    advantages, weight = torch.randn(6, generator=rng).double(), torch.rand(6, generator=rng).double() * 9
    mask = torch.ones(6, 4)
    weighted = Surrogate().loss(logps, advantages, mask, weight=weight, old_logps=old)
    inside = Surrogate().loss(logps, advantages * weight, mask, old_logps=old)
    torch.testing.assert_close(weighted, inside, rtol=1e-12, atol=1e-14)


def test_bad_input():
    with pytest.raises(ValueError, match="after compute_advantage"):
        prune_batch({"response_mask": torch.ones(1, 1)}, generator=0)
    missing = batch()
    del missing["uid"]
    with pytest.raises(ValueError, match="no 'uid'"):
        prune_batch(missing, generator=0)
    uneven = batch()
    uneven["advantages"] = uneven["advantages"] * T([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="differ between its tokens"):
        prune_batch(uneven, generator=0)
    with pytest.raises(ValueError, match="weights='loss'"):
        prune_batch(batch(), generator=0, weights="loss")
    with pytest.raises(TypeError, match="DataProto or a dict"):
        prune_batch([1], generator=0)


def test_rows_without_tokens_are_free():
    empty = batch()
    empty["response_mask"][2] = 0
    result = prune_batch(empty, PruningConfig(completion_rate=0), generator=0)
    assert result.keep.tolist() == [True, True, False, True]
    nothing = {"advantages": torch.zeros(4, 0), "response_mask": torch.zeros(4, 0).long(), "uid": batch()["uid"]}
    assert not prune_batch(nothing, generator=0).keep.any()
