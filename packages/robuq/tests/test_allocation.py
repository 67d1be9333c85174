"""AMPN: the plan is the exact optimum under its budget."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import robuq.allocation as allocation
from robuq.allocation import Plan, PlanError, allocate_bits, apply_plan
from robuq.config import RobuQConfig
from robuq.sensitivity import Sensitivity, measure_sensitivity
from robuq.surgery import macs_per_token, quantize

S = [[1.89, 1.87, 0.45, 0.05], [1.69, 1.43, 1.36, 0.02], [1.66, 1.61, 1.07, 0.76], [1.52, 1.46, 1.34, 0.68]]
MACS = dict(zip("abcd", (3, 1, 4, 4), strict=True))


def table(rows, bits=(1, 2, 3, 4)):
    names = [chr(ord("a") + i) for i in range(len(rows))]
    return Sensitivity({n: dict(zip(bits, row, strict=True)) for n, row in zip(names, rows, strict=True)}, bits)


def brute(rows, macs, budget, bits=(1, 2, 3, 4)):
    """Smallest objective, then cost, then plan."""
    best = None
    for plan in itertools.product(bits, repeat=len(rows)):
        cost = sum(m * b for m, b in zip(macs, plan, strict=True))
        if cost <= budget + 1e-9:
            value = math.fsum(row[b - 1] for row, b in zip(rows, plan, strict=True))
            if best is None or (round(value, 9), cost, plan) < best:
                best = round(value, 9), cost, plan
    return best


def test_golden_plan():
    plan = allocate_bits(table(S), MACS, 2)
    assert tuple(plan.bits.values()) == (4, 4, 1, 1)
    assert plan.objective == pytest.approx(3.25)
    assert plan.budget == 24
    assert plan.cost == 24
    assert plan.avg == pytest.approx(2.0)
    greedy = allocate_bits(table(S), MACS, 2, "greedy")
    assert tuple(greedy.bits.values()) == (1, 4, 1, 3)
    assert greedy.objective == pytest.approx(4.91)
    uniform = allocate_bits(table(S), MACS, 2, "uniform")
    assert uniform.objective == pytest.approx(1.87 + 1.43 + 1.61 + 1.46)


@hypothesis_settings(max_examples=200)
@given(
    data=st.data(), count=st.integers(1, 6), seed=st.integers(0, 10**6), average=st.sampled_from([1, 1.5, 2, 2.3, 3, 4])
)
def test_equals_brute_force(data, count, seed, average):
    rng = np.random.default_rng(seed)
    coarse = data.draw(st.booleans())  # few distinct values: many ties
    rows = (rng.integers(0, 3, (count, 4)) if coarse else rng.random((count, 4)).round(6)).astype(float).tolist()
    macs = rng.integers(1, 6, count).tolist()
    plan = allocate_bits(table(rows), dict(zip("abcdef", macs, strict=False)), average)
    value, cost, bits = brute(rows, macs, average * sum(macs))
    assert plan.objective == pytest.approx(value, abs=1e-8)
    assert (plan.cost, tuple(plan.bits.values())) == (cost, bits)
    assert plan.lower_bound <= plan.objective + 1e-9
    assert plan.cost <= plan.budget + 1e-9


def test_seven_layers_equal_brute_force():
    rng = np.random.default_rng(5)
    rows, macs = rng.random((7, 4)).tolist(), [3, 1, 4, 1, 5, 9, 2]
    plan = allocate_bits(table(rows), dict(zip("abcdefg", macs, strict=True)), 2.25)
    value, cost, bits = brute(rows, macs, 2.25 * sum(macs))
    assert (plan.objective, plan.cost, tuple(plan.bits.values())) == (pytest.approx(value), cost, bits)


def test_ties_go_to_the_smallest_cost_then_the_smallest_plan():
    flat = [[1.0, 1.0, 1.0, 1.0]] * 3
    assert tuple(allocate_bits(table(flat), {"a": 1, "b": 1, "c": 1}, 3).bits.values()) == (1, 1, 1)
    equal = [[1.0, 0.5, 0.5, 0.5]] * 3
    assert tuple(allocate_bits(table(equal), {"a": 1, "b": 1, "c": 1}, 5 / 3).bits.values()) == (1, 2, 2)


def test_grid_rounds_the_budget_down_and_reports_the_gap(monkeypatch):
    rows = np.random.default_rng(0).random((6, 4)).tolist()
    macs = dict(zip("abcdef", (1000003, 999983, 1299709, 15485863, 104729, 7919), strict=True))
    exact = brute(rows, list(macs.values()), 2.1 * sum(macs.values()))
    monkeypatch.setattr(allocation, "STATES", 5000)
    plan = allocate_bits(table(rows), macs, 2.1)
    assert not plan.exact
    assert plan.cost <= plan.budget
    assert plan.lower_bound <= exact[0] <= plan.objective + 1e-9
    assert plan.objective - plan.lower_bound < 0.5


def test_non_monotone_sensitivities_are_taken_as_they_are():
    plan = allocate_bits(table([[0.1, 0.9, 0.8, 0.0]]), {"a": 7}, 3)
    assert plan.bits == {"a": 1}


def test_other_weights_and_measured_costs():
    by_layers = allocate_bits(table(S), MACS, 2, weights="layers")
    assert sum(by_layers.bits.values()) <= 8
    elements = allocate_bits(table(S), MACS, 2, weights="elements", elements={"a": 1, "b": 9, "c": 1, "d": 1})
    assert elements.bits["b"] < 4
    costs = {n: {1: 1.0, 2: 1.0, 3: 2.5, 4: 2.5} for n in "abcd"}
    timed = allocate_bits(table(S), MACS, 2, costs=costs)
    assert timed.cost <= 4.0
    assert set(timed.bits.values()) == {2}


def test_a_hundred_and_twelve_layers_agree_with_the_bound():
    rng = np.random.default_rng(1)
    rows = np.sort(rng.random((112, 4)), axis=1)[:, ::-1].tolist()
    layers = {f"l{i}": dict(zip((1, 2, 3, 4), row, strict=True)) for i, row in enumerate(rows)}
    macs = {f"l{i}": [1, 3, 4, 4][i % 4] * 1152 * 1152 for i in range(112)}
    plan = allocate_bits(Sensitivity(layers, (1, 2, 3, 4)), macs, 2)
    assert plan.exact
    assert 0 <= plan.objective - plan.lower_bound < 1
    assert plan.avg <= 2 + 1e-12


@pytest.mark.parametrize(
    ("average", "kwargs", "message"),
    [
        (0.9, {}, "an average of 0.9 bits cannot be met: the smallest candidate is 1"),
        (float("nan"), {}, "cannot be met"),
        (2, {"solver": "lp"}, "solver must be one of 'dp', 'greedy', 'uniform', got 'lp'"),
        (2, {"weights": "bytes"}, "weights must be one of"),
        (2, {"weights": "elements"}, "elements has no entry for 'a'"),
    ],
)
def test_bad_requests(average, kwargs, message):
    with pytest.raises(ValueError, match=message):
        allocate_bits(table(S), MACS, average, **kwargs)


def test_bad_tables():
    with pytest.raises(ValueError, match="finite and at least 0"):
        allocate_bits(table([[1, float("nan"), 1, 1]]), {"a": 1}, 2)
    with pytest.raises(ValueError, match="no layers"):
        allocate_bits(Sensitivity({}, (1, 2)), {}, 2)
    with pytest.raises(ValueError, match="at least 1 for every layer"):
        allocate_bits(table([[1, 1, 1, 1]]), {"a": 0}, 2)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    return quantize(model, RobuQConfig(rank=0))


def test_plans_and_sensitivities_survive_json(tmp_path):
    plan = allocate_bits(table(S), MACS, 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    table(S).save(tmp_path / "s.json")
    assert Sensitivity.load(tmp_path / "s.json") == table(S)
    with pytest.raises(ValueError, match="this is no plan"):
        Plan.from_json({"bits": {}})
    with pytest.raises(ValueError, match="this is no sensitivity"):
        Sensitivity.from_json({"bits": [1]})


def test_plans_for_another_model_change_nothing():
    model = small()
    apply_plan(model, {"0": 1, "2": 2, "4": 3})
    assert [model[i].bits for i in (0, 2, 4)] == [1, 2, 3]
    with pytest.raises(PlanError, match=r"bits for 'blocks\.0', which is no quantised layer"):
        apply_plan(model, {"0": 4, "2": 4, "4": 4, "blocks.0": 1})
    with pytest.raises(PlanError, match="no bits for '4'"):
        apply_plan(model, {"0": 4, "2": 4})
    assert [model[i].bits for i in (0, 2, 4)] == [1, 2, 3]


def test_sensitivity_is_the_squared_distance_of_outputs():
    model = small()
    apply_plan(model, {"0": 3, "2": 3, "4": 3})
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    sens = measure_sensitivity(model, [x[:15], x[15:]], lambda m, b: m(b))
    assert [model[i].bits for i in (0, 2, 4)] == [3, 3, 3]
    with torch.no_grad():
        apply_plan(model, {"0": 4, "2": 4, "4": 4})
        reference = model(x)
        model[2].bits = 1
        expected = (model(x) - reference).square().sum(1).mean()
    assert sens.values["2"][1] == pytest.approx(float(expected), rel=1e-5)
    assert all(row[4] == 0.0 for row in sens.values.values())
    assert sens.layers == ("0", "2", "4")
    plan = allocate_bits(sens, macs_per_token(model), 2)
    assert plan.objective <= allocate_bits(sens, macs_per_token(model), 2, "uniform").objective
    custom = measure_sensitivity(model, [x], lambda m, b: m(b), (2, 4), lambda out, ref, batch: (out - ref).abs().max())
    assert custom.metric == "custom"
    assert custom.values["0"][2] > 0
    loss = measure_sensitivity(model, [x], lambda m, b: m(b).square().mean(), (1, 4), "loss")
    assert all(row[1] >= 0 for row in loss.values.values())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batches": []}, "batches is empty"),
        ({"bits": (4,)}, "at least two candidates"),
        ({"metric": "psnr"}, "metric must be 'output_mse', 'loss' or a function"),
        ({"bits": (0, 4)}, "bits must be one of 1 to 8"),
    ],
)
def test_sensitivity_refuses(kwargs, message):
    arguments = {"batches": [torch.ones(1, 8)], "forward_fn": lambda m, b: m(b), **kwargs}
    with pytest.raises(ValueError, match=message):
        measure_sensitivity(small(), **arguments)
    with pytest.raises(ValueError, match="no quantised layers"):
        measure_sensitivity(nn.Linear(2, 2), [torch.ones(1, 2)], lambda m, b: m(b))
