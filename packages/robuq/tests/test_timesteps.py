"""Plans over (layer, bin of timesteps): the same exact optimum, and a model that follows them."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from robuq.allocation import PlanError, allocate_bits
from robuq.config import RobuQConfig
from robuq.eval.tiny_dit import TIMESTEPS, TinyDiT, add_noise, sample
from robuq.sensitivity import Sensitivity
from robuq.surgery import freeze, macs_per_token, quantised_layers, quantize
from robuq.timesteps import (
    TimestepPlan,
    allocate_timestep_bits,
    follow_timesteps,
    measure_timestep_sensitivity,
    timestep_edges,
)

BITS = (1, 2, 3)


def random_sensitivity(rng, layers):
    rows = np.sort(rng.random((layers, len(BITS))), axis=1)[:, ::-1]
    return Sensitivity({f"l{i}": dict(zip(BITS, map(float, r), strict=True)) for i, r in enumerate(rows)}, BITS)


def brute_force(sens, macs, avg, steps):
    """The smallest weighted objective over all choices, by trying all."""
    pairs = [(k, layer) for k in range(len(steps)) for layer in macs]
    budget = avg * sum(steps[k] * macs[layer] for k, layer in pairs)
    best = np.inf
    for chosen in itertools.product(BITS, repeat=len(pairs)):
        cost = sum(steps[k] * macs[layer] * b for (k, layer), b in zip(pairs, chosen, strict=True))
        if cost <= budget + 1e-9:
            value = sum(steps[k] * sens[k].values[la][b] for (k, la), b in zip(pairs, chosen, strict=True)) / sum(steps)
            best = min(best, value)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_brute_forces_and_never_above_one_plan_for_all_timesteps(seed):
    rng = np.random.default_rng(seed)
    layers, steps = 3, [5, 1]
    macs = {f"l{i}": int(rng.integers(1, 5)) for i in range(layers)}
    sens = [random_sensitivity(rng, layers) for _ in steps]
    plan = allocate_timestep_bits(sens, macs, 2, (0, 500, 1000), sampled=steps)
    assert plan.whole.exact
    assert plan.whole.objective == pytest.approx(brute_force(sens, macs, 2, steps), rel=1e-12)
    spent = sum(w * macs[n] * b for w, row in zip(steps, plan.bits, strict=True) for n, b in row.items())
    assert spent <= 2 * sum(steps) * sum(macs.values())
    assert plan.avg == pytest.approx(spent / (sum(steps) * sum(macs.values())), abs=1e-9)
    mixed = Sensitivity(
        {
            n: {b: sum(w * s.values[n][b] for w, s in zip(steps, sens, strict=True)) / sum(steps) for b in BITS}
            for n in macs
        },
        BITS,
    )
    assert plan.whole.objective <= allocate_bits(mixed, macs, 2).objective + 1e-12


def test_bits_go_to_the_timesteps_that_need_them():
    """By hand: budget 2 x (1 + 1) = 4 over two bins; bin 0 loses nothing at 1 bit, bin 1 loses 1 a bit."""
    tolerant = Sensitivity({"a": {1: 0.0, 2: 0.0, 3: 0.0}}, BITS)
    delicate = Sensitivity({"a": {1: 2.0, 2: 1.0, 3: 0.0}}, BITS)
    plan = allocate_timestep_bits([tolerant, delicate], {"a": 7}, 2, (0, 500, 1000))
    assert plan.bits == ({"a": 1}, {"a": 3})
    assert plan.whole.objective == 0
    # bin 1 with three of four steps: 3 bits there would cost 1 + 9 of 8; 2 bits 1 + 6, objective 3/4
    weighted = allocate_timestep_bits([tolerant, delicate], {"a": 7}, 2, (0, 500, 1000), sampled=(1, 3))
    assert weighted.bits == ({"a": 1}, {"a": 2})
    assert weighted.whole.objective == pytest.approx(0.75)


def test_bins():
    assert timestep_edges(1000, 4) == (0, 250, 500, 750, 1000)
    assert timestep_edges(7, 3) == (0, 2, 5, 7)
    one = Sensitivity({"a": {1: 1.0, 2: 0.0}}, (1, 2))
    plan = allocate_timestep_bits([one, one, one], {"a": 1}, 2, (0, 10, 20, 1000))
    assert [plan.bin_of(torch.tensor([t])) for t in (0, 9, 10, 19, 20, 999)] == [0, 0, 1, 1, 2, 2]
    assert plan.bin_of(torch.tensor(9.5)) == 0
    with pytest.raises(ValueError, match=r"timesteps from 9 to 20, in bins 0 to 2; .*run the model once for each bin"):
        plan.bin_of(torch.tensor([9, 20]))
    for outside in (-1, 1000, float("nan")):
        with pytest.raises(ValueError, match=r"timesteps must be in \[0, 1000\)"):
            plan.bin_of(torch.tensor([outside]))
    with pytest.raises(ValueError, match="no timesteps"):
        plan.bin_of(torch.tensor([]))
    with pytest.raises(ValueError, match="bins must be 1 to the number of timesteps"):
        timestep_edges(3, 4)


def test_bad_input_is_named():
    one, other = Sensitivity({"a": {1: 1.0, 2: 0.0}}, (1, 2)), Sensitivity({"b": {1: 1.0, 2: 0.0}}, (1, 2))
    for edges in ((0,), (0, 0), (5, 1), (0, 1.5)):
        with pytest.raises(ValueError, match="edges must be at least two increasing whole numbers"):
            allocate_timestep_bits([one], {"a": 1}, 2, edges)
    with pytest.raises(ValueError, match="2 bins need as many sensitivities and weights, got 1, 2"):
        allocate_timestep_bits([one], {"a": 1}, 2, (0, 1, 2))
    with pytest.raises(ValueError, match="the same layers and the same bits"):
        allocate_timestep_bits([one, other], {"a": 1, "b": 1}, 2, (0, 1, 2))
    with pytest.raises(ValueError, match="at least 1, got"):
        allocate_timestep_bits([one], {"a": 1}, 2, (0, 1), sampled=(0,))
    with pytest.raises(ValueError, match="macs has no entry for 'a'"):
        allocate_timestep_bits([one], {}, 2, (0, 1))
    with pytest.raises(ValueError, match="a list of calibration batches for each bin"):
        measure_timestep_sensitivity(nn.Linear(2, 2), [], lambda m, b: m(b))


@pytest.fixture(scope="module")
def dit():
    torch.manual_seed(0)
    model = TinyDiT(depth=1)
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return quantize(model, RobuQConfig.for_dit(attn_bits=None, rank=2)).eval()


def bits_now(model):
    return {name: layer.bits for name, layer in quantised_layers(model) if not layer.is_ada}


def test_a_model_follows_the_plan_that_was_measured_on_it(dit, tmp_path):
    model, edges = copy.deepcopy(dit), timestep_edges(TIMESTEPS, 2)
    g = torch.Generator().manual_seed(1)

    def batch(low, high):
        t = torch.randint(low, high, (16,), generator=g)
        clean, noise = (torch.randn(16, 1, 8, 8, generator=g) for _ in range(2))
        return add_noise(clean, t, noise), t, torch.arange(16) % 10

    parts = [[batch(low, high)] for low, high in itertools.pairwise(edges)]
    sens = measure_timestep_sensitivity(model, parts, lambda m, b: m(*b))
    assert sens[0].values != sens[1].values
    macs = {name: m for name, m in macs_per_token(model).items() if name in sens[0].layers}
    plan = allocate_timestep_bits(sens, macs, 2, edges)
    assert plan.avg <= 2
    plan.save(tmp_path / "plan.json")
    assert TimestepPlan.load(tmp_path / "plan.json") == plan

    forced = TimestepPlan(edges, (dict.fromkeys(macs, 1), dict.fromkeys(macs, 3)), plan.whole)
    handle = follow_timesteps(model, forced)
    x, y = torch.randn(2, 1, 8, 8), torch.tensor([1, 2])
    late, early = model(x, torch.tensor([400, 3]), y), model(x, t=torch.tensor([500, 999]), y=y)
    assert set(bits_now(model).values()) == {3}
    copied = freeze(copy.deepcopy(model))
    copied(x, torch.tensor([3, 3]), y)
    assert set(bits_now(copied).values()) == {1}
    assert set(bits_now(model).values()) == {3}
    with pytest.raises(ValueError, match="in bins 0 to 1"):
        model(x, torch.tensor([3, 999]), y)
    handle.remove()
    for bits, t, expected in ((1, [400, 3], late), (3, [500, 999], early)):
        for name, layer in quantised_layers(model):
            if name in macs:
                layer.bits = bits
        assert torch.equal(model(x, torch.tensor(t), y), expected)


def test_sampling_changes_the_bits_on_the_way(dit):
    model = freeze(copy.deepcopy(dit))
    names = list(bits_now(model))
    one = Sensitivity({n: {1: 1.0, 2: 0.0} for n in names}, (1, 2))
    whole = allocate_timestep_bits([one, one], dict.fromkeys(names, 1), 2, (0, 500, 1000)).whole
    plan = TimestepPlan((0, 500, 1000), (dict.fromkeys(names, 4), dict.fromkeys(names, 2)), whole)
    follow_timesteps(model, plan)
    seen = []
    model.blocks[0].attn.proj.register_forward_pre_hook(lambda module, args: seen.append(module.bits))
    sample(model, torch.tensor([0, 1]), steps=4)
    assert seen == [2, 2, 4, 4]  # t = 999, 666, 333, 0


def test_plans_of_other_models_and_models_without_timesteps_are_refused(dit):
    model = quantize(nn.Sequential(nn.Linear(8, 8)), RobuQConfig(rank=0))
    one = Sensitivity({"0": {1: 1.0, 2: 0.0}}, (1, 2))
    plan = allocate_timestep_bits([one], {"0": 1}, 2, (0, 1000))
    with pytest.raises(ValueError, match=r"the forward of Sequential has no argument 't' or 'timestep' or"):
        follow_timesteps(model, plan)
    with pytest.raises(PlanError, match="no quantised layer of this model"):
        follow_timesteps(dit, plan)
    names = list(bits_now(dit))
    fitting = allocate_timestep_bits(
        [Sensitivity({n: {1: 1.0, 2: 0.0} for n in names}, (1, 2))], dict.fromkeys(names, 1), 2, (0, 1000)
    )
    with pytest.raises(ValueError, match=r"no argument 'sigma'"):
        follow_timesteps(dit, fitting, "sigma")
    with pytest.raises(ValueError, match="this is no plan over timesteps"):
        TimestepPlan.from_json("{}")
    with pytest.raises(ValueError, match="2 edges, but bits for 0 bins"):
        TimestepPlan.from_json({**fitting.to_json(), "bits": []})
