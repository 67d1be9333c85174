"""Surrogates: weights stay outside the ratio and the clip; gradients; against plain formulas."""

import pytest
import torch

from dppo.losses import LOSS_TYPES, Surrogate, scale_gradient
from dppo.toy import ToyBatch

T = torch.tensor


def test_clipped_value_by_hand():
    logps, old = T([[0.0, 0.5]]).double(), T([[0.0, 0.0]]).double()
    loss = Surrogate("grpo").loss(logps, T([2.0]).double(), torch.ones(1, 2), old_logps=old, weight=T([3.0]).double())
    assert loss.item() == pytest.approx(3 * -(2.0 + 1.2 * 2.0) / 2)
    negative = Surrogate("grpo").loss(logps, T([-2.0]).double(), torch.ones(1, 2), old_logps=old)
    assert negative.item() == pytest.approx((2.0 + 2 * 0.5 * 0 + 2 * float(T(0.5).double().exp())) / 2)


def test_normalizers():
    mask = T([[1, 1, 0], [1, 0, 0]])
    assert Surrogate("grpo").normalizer(mask) == 2
    assert Surrogate("dapo").normalizer(mask) == Surrogate("bnpo").normalizer(mask) == 3
    assert Surrogate("dr_grpo", max_length=10).normalizer(mask) == 20
    assert Surrogate("cispo").normalizer(torch.zeros(0, 3)) == 1


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_do_not_enter_the_clip(loss_type):
    """The weighted loss is the weighted sum of the rows' own losses, even where a scaled ratio would be clipped."""
    toy = ToyBatch(T([[1.0, 0, 0, 1]]).double())
    surrogate = Surrogate(loss_type, max_length=5, beta=0.2)
    weight = T([1.0, 7.0, 0.3, 20.0]).double()
    logps = toy.logps(toy.params)
    z = surrogate.normalizer(toy.mask)

    def row(i):
        part = slice(i, i + 1)
        return surrogate.loss(
            logps[part], toy.advantages[part], toy.mask[part],
            normalizer=z, old_logps=toy.old[part], ref_logps=toy.ref[part],
        )  # fmt: skip

    weighted = surrogate.loss(
        logps, toy.advantages, toy.mask, weight=weight, normalizer=z, old_logps=toy.old, ref_logps=toy.ref
    )
    torch.testing.assert_close(weighted, sum(weight[i] * row(i) for i in range(4)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_scaled_gradient_is_the_weighted_loss_s_gradient(loss_type, level):
    toy = ToyBatch(T([[1.0, 0, 0, 1], [0, 0, 1, 0]]).double())
    surrogate = Surrogate(loss_type, level, max_length=5, beta=0.2)
    weight = T([1.0, 7.0, 0.3, 20.0, 0, 1, 2, 3]).double()
    other = {"old_logps": toy.old, "ref_logps": toy.ref}
    weighted = surrogate.loss(toy.logps(toy.params), toy.advantages, toy.mask, weight=weight, **other)
    plain_values = surrogate.loss(scale_gradient(toy.logps(toy.params), weight), toy.advantages, toy.mask, **other)
    for a, b in zip(
        torch.autograd.grad(weighted, toy.params), torch.autograd.grad(plain_values, toy.params), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    unweighted = surrogate.loss(toy.logps(toy.params), toy.advantages, toy.mask, **other)
    assert plain_values.item() == unweighted.item(), "values, ratios and clips are untouched"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradcheck(loss_type):
    toy = ToyBatch(T([[1.0, 0, 0]]).double())
    surrogate = Surrogate(loss_type, max_length=5, beta=0.2)
    if loss_type == "cispo":
        surrogate = Surrogate(loss_type, epsilon_high=1e-3, beta=0.2)  # the detached ratio is then a constant

    def loss(logps):
        return surrogate.loss(logps, toy.advantages, toy.mask, old_logps=toy.old, ref_logps=toy.ref)

    assert torch.autograd.gradcheck(loss, toy.logps(toy.params).detach().requires_grad_())


def test_on_policy_is_plain_policy_gradient():
    toy = ToyBatch(T([[1.0, 0, 0, 1]]).double())
    logps = toy.logps(toy.params)
    loss = Surrogate("dapo").loss(logps, toy.advantages, toy.mask)
    expected = -(toy.advantages[:, None] * logps * toy.mask).sum() / toy.mask.sum()
    for a, b in zip(torch.autograd.grad(loss, toy.params, retain_graph=True),
                    torch.autograd.grad(expected, toy.params), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_unsupported_losses_and_missing_input():
    for name in ("sapo", "vespo", "luspo", "ppo"):
        with pytest.raises(ValueError, match=f"loss_type='{name}' is not supported"):
            Surrogate(name)
    with pytest.raises(ValueError, match="max_length"):
        Surrogate("dr_grpo")
    with pytest.raises(ValueError, match="level"):
        Surrogate(level="word")
    toy = ToyBatch(T([[1.0, 0]]).double())
    with pytest.raises(ValueError, match="ref_logps"):
        Surrogate(beta=0.1).loss(toy.logps(toy.params), toy.advantages, toy.mask)
