"""The verl plug-in against a stand-in for verl's registry (verl itself needs a GPU stack), and the other adapters."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from maxrl import maxrl_advantages
from maxrl.adapters import prime_rl, skyrl


@pytest.fixture
def registry(monkeypatch):
    """A module named verl with ``register_adv_est`` as verl 0.9 has it: a decorator that refuses to overwrite."""
    known = {}

    def register_adv_est(name):
        def decorator(fn):
            if name in known and known[name] != fn:
                raise ValueError(f"Adv estimator {name} has already been registered")
            known[name] = fn
            return fn

        return decorator

    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.trainer.ppo.core_algos"].register_adv_est = register_adv_est
    for name in ("maxrl.verl", "maxrl.integrations.verl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("maxrl.verl")
    return known


def batch():
    """Five responses of three prompts in mixed order, the reward on the last response token."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1.0], [1, 1, 1]])
    passed = torch.tensor([1.0, 0, 0, 1, 0, 1])
    rewards = torch.zeros(6, 3)
    rewards[torch.arange(6), mask.sum(1).long() - 1] = passed
    index = np.array(["b", "a", "b", "a", "c", "c"], dtype=object)
    return rewards, mask, index, passed


def test_registered_estimators(registry):
    assert sorted(registry) == ["maxrl", "maxrl_loo", "maxrl_subset", "pkpo"]
    rewards, mask, index, passed = batch()
    for name, estimator in (("maxrl", "maxrl"), ("maxrl_loo", "loo"), ("maxrl_subset", "subset"), ("pkpo", "pkpo")):
        advantages, returns = registry[name](rewards, mask, index=index, config=None, reward_baselines=None)
        want = maxrl_advantages(passed, group_ids=index, estimator=estimator)
        assert torch.equal(advantages, want[:, None] * mask)
        assert torch.equal(returns, advantages)


def test_order_comes_from_the_config(registry):
    rewards, mask, index, passed = batch()
    config = {"maxrl_order": 1}
    got, _ = registry["maxrl_subset"](rewards, mask, index=index, config=config)
    assert torch.equal(got[:, 0], passed)  # order 1 is REINFORCE
    with pytest.raises(ValueError, match="order = 3, but a group has only 2 rollouts"):
        registry["maxrl_loo"](rewards, mask, index=index, config={"maxrl_order": 3})
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        registry["maxrl"](rewards * 0.5, mask, index=index)


def test_absent_verl_names_the_extra():
    sys.modules.pop("maxrl.integrations.verl", None)
    with pytest.raises(ImportError, match=r"pip install 'maxrl\[verl\]'"):
        importlib.import_module("maxrl.integrations.verl")


def test_prime_rl_and_skyrl():
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    want = torch.tensor([[2.0, -1, -1], [0, 0, 0]])
    assert torch.equal(prime_rl(rewards), want)
    assert torch.equal(prime_rl(SimpleNamespace(rewards=rewards)), want)
    with pytest.raises(ValueError, match=r"\(prompts, rollouts per prompt\)"):
        prime_rl(torch.zeros(3))
    with pytest.raises(ValueError, match="'conditional'"):
        prime_rl(torch.ones(2, 1))  # a group of one has no MaxRL signal: said, not silently zero
    tokens, mask, index, passed = batch()
    assert torch.equal(skyrl(tokens, mask, index)[0], maxrl_advantages(passed, group_ids=index)[:, None] * mask)
