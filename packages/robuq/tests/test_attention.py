"""Attention at 8 bits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robuq.attention import install_attention_bits, int8_tokens, quantised_attention, unsigned8
from robuq.config import RobuQConfig
from robuq.eval.tiny_dit import Attention
from robuq.surgery import quantize


def test_int8_tokens_by_hand():
    x = torch.tensor([[12.7, -0.06, 0.04], [0.0, 0.0, 0.0]])
    assert torch.allclose(int8_tokens(x), torch.tensor([[12.7, -0.1, 0.0], [0.0, 0.0, 0.0]]), atol=1e-5)
    assert torch.allclose(unsigned8(torch.tensor([0.0, 0.5, 1.0])), torch.tensor([0.0, 128 / 255, 1.0]))


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
)
def test_close_to_torchs_attention(kwargs):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 16, generator=g) for _ in range(3))
    if "attn_mask" in kwargs:
        mask = torch.ones(7, 7).tril().bool()
        kwargs = {"attn_mask": mask if kwargs["attn_mask"] == "bool" else torch.zeros(7, 7).masked_fill(~mask, -1e9)}
    exact, found = F.scaled_dot_product_attention(q, k, v, **kwargs), quantised_attention(q, k, v, **kwargs)
    assert float((found - exact).abs().max()) < 0.05
    assert not torch.equal(found, exact)


def test_grouped_heads():
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(quantised_attention(q, k, v, enable_gqa=True), exact, atol=0.05)


def test_gradients_pass_straight_through():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    quantised_attention(q, k, v).sum().backward()
    exact = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*exact).sum().backward()
    for a, b in zip((q, k, v), exact, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=0.1)


def test_installed_on_a_model_and_switched_off():
    torch.manual_seed(0)
    model = Attention(16, 2)
    x = torch.randn(2, 5, 16)
    exact = model(x)
    hooks = install_attention_bits(model, 8)
    found = model(x)
    assert 0 < float((found - exact).abs().max()) < 0.05
    assert torch.equal(copy.deepcopy(model)(x), found)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), found)  # noqa: S301 - of this very process
    hooks.bits = None
    assert torch.equal(model(x), exact)
    hooks.bits = 8
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 15))
    assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3).shape == (1, 1, 2, 2)
    assert not hooks._modes


def test_a_model_without_attention_is_told():
    model = quantize(nn.Sequential(nn.Linear(4, 4)), RobuQConfig(attn_bits=8, rank=1))
    with pytest.warns(UserWarning, match="attn_bits=8 had no effect"):
        model(torch.ones(1, 4))
