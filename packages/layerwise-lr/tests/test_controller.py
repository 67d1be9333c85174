"""The controller: composition with schedulers, ramps, resuming, degenerate layers, edited groups."""

import copy
import json
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as sched

from layerwise_lr import LayerwiseLR, param_groups
from layerwise_lr.config import LLRConfig
from layerwise_lr.errors import LayerSkipped

STEPS = 60
SCHEDULERS = {
    "cosine": lambda o: sched.CosineAnnealingLR(o, STEPS, eta_min=1e-5),
    "lambda": lambda o: sched.LambdaLR(o, lambda t: min(1.0, (t + 1) / 10) * (1 - t / 100)),
    "one cycle": lambda o: sched.OneCycleLR(o, max_lr=3e-3, total_steps=STEPS + 1, cycle_momentum=False),
    "sequential": lambda o: sched.SequentialLR(
        o,
        [sched.LinearLR(o, 0.1, total_iters=10), sched.ExponentialLR(o, 0.97), sched.CosineAnnealingLR(o, 30)],
        [10, 30],
    ),
    "chained": lambda o: sched.ChainedScheduler([sched.ConstantLR(o, 0.3, 7), sched.ExponentialLR(o, 0.95)]),
    "step": lambda o: sched.StepLR(o, 9, 0.5),
    "multi-step": lambda o: sched.MultiStepLR(o, [5, 21, 22], 0.3),
    "exponential": lambda o: sched.ExponentialLR(o, 0.9),
    "multiplicative": lambda o: sched.MultiplicativeLR(o, lambda t: 0.98 if t % 2 else 1.01),
    "polynomial": lambda o: sched.PolynomialLR(o, STEPS, 2.0),
    "warm restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 13),
    "cyclic": lambda o: sched.CyclicLR(o, 1e-4, 2e-3, step_size_up=7, cycle_momentum=False),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, factor=0.5, patience=2),
}


def losses(step):
    """What the plateau scheduler sees: falls, then stalls."""
    return max(1.0, 3.0 - 0.1 * step)


def advance(scheduler, step):
    if isinstance(scheduler, sched.ReduceLROnPlateau):
        scheduler.step(losses(step))
    else:
        scheduler.step()


def setup(model, make=SCHEDULERS["cosine"], lr=1e-3, **settings):
    optimizer = AdamW(param_groups(model, lr))
    scheduler = make(optimizer)
    controller = LayerwiseLR(
        optimizer,
        model,
        scheduler,
        **{"total_steps": STEPS, "interval": 8, "ramp": 5, "active_fraction": 0.7, **settings},
    )
    return optimizer, scheduler, controller


@pytest.mark.filterwarnings("ignore::UserWarning")
def alone(make, lr=1e-3):
    """What the scheduler gives without a controller, after each step."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr)
    scheduler, rates = make(optimizer), []
    for step in range(STEPS):
        optimizer.step()
        advance(scheduler, step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("ramp_in", ["ratio", "rate"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rate_is_ratio_times_what_the_scheduler_alone_gives(name, ramp_in, model, train_step):
    expected = alone(SCHEDULERS[name])
    optimizer, scheduler, controller = setup(model, SCHEDULERS[name], ramp_in=ramp_in)
    initial = [group["initial_lr"] for group in optimizer.param_groups] if name != "plateau" else None
    for step in range(STEPS):
        train_step(model, optimizer, step)
        advance(scheduler, step)
        controller.step()
        ratios = set()
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(group["llr_ratio"] * expected[step], rel=1e-12)
            ratios.add(group["llr_ratio"])
            if ramp_in == "ratio" and group["name"] in controller.ratios:
                assert group["llr_ratio"] == controller.ratios[group["name"]]
        if step > 6 and ramp_in == "ratio":  # a ramp of the rate foresees a falling schedule
            assert max(ratios) > 2
    if initial is not None:
        assert [group["initial_lr"] for group in optimizer.param_groups] == initial
        assert scheduler.get_last_lr()[0] == pytest.approx(expected[-1])


def test_golden_ramp(model):
    optimizer = SGD(param_groups(model, 1e-3))
    controller = LayerwiseLR(
        optimizer, model, interval=100, ramp=20, total_steps=1000, remap=lambda t: dict.fromkeys(t, 1.0)
    )
    for _ in range(99):
        controller.step()
    controller.remap = lambda targets: dict.fromkeys(targets, 3.0)
    seen = {}
    for step in range(100, 125):
        controller.step()
        seen[step] = controller.ratios["layers.0.mix"]
        assert optimizer.param_groups[1]["lr"] == 1e-3 * seen[step]
    assert (seen[100], seen[110], seen[120], seen[124]) == (1, 2, 3, 3)


def test_refreshes_happen_at_step_1_and_multiples_while_active(model):
    _, _, controller = setup(model, interval=8, active_fraction=0.5)
    for _ in range(STEPS):
        controller.step()
    assert [entry["step"] for entry in controller.history] == [1, 8, 16, 24]
    few = LLRConfig(total_steps=20, interval=500)
    assert [t for t in range(1, 21) if few.refreshes_at(t)] == [1]
    assert LLRConfig(active_fraction=1, interval=7).refreshes_at(7000)


def test_a_ramp_of_the_rate_is_linear_and_ends_on_the_schedule(model):
    make = lambda o: sched.LambdaLR(o, lambda t: (t + 1) / 100)  # noqa: E731
    optimizer, scheduler, controller = setup(model, make, ramp_in="rate", interval=1000, ramp=10)
    group = next(g for g in optimizer.param_groups if g["name"] == "embed")
    seen = []
    for _ in range(14):
        optimizer.step()
        scheduler.step()
        controller.step()
        seen.append(group["lr"])
    ratio = controller.ratios["embed"]
    assert ratio == 3
    first, last = 1e-3 * 2 / 100, ratio * 1e-3 * 12 / 100
    assert seen[:11] == pytest.approx([first + i / 10 * (last - first) for i in range(11)])
    assert seen[11:] == pytest.approx([ratio * 1e-3 * t / 100 for t in (13, 14, 15)])


def test_equal_bounds_are_plain_adamw_to_the_bit(make_model, train_step):
    runs = []
    for controlled in (False, True):
        model = make_model()
        optimizer = AdamW(param_groups(model, 1e-3))
        scheduler = sched.CosineAnnealingLR(optimizer, 30)
        controller = (
            LayerwiseLR(optimizer, model, scheduler, s1=1, s2=1, interval=3, total_steps=30) if controlled else None
        )
        for step in range(30):
            train_step(model, optimizer, step)
            scheduler.step()
            if controller is not None:
                controller.step()
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


@pytest.mark.parametrize("ramp_in", ["ratio", "rate"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_resuming_in_a_ramp_gives_the_same_rates_and_weights(ramp_in, background, order, make_model, train_step):
    def parts():
        model = make_model()
        return model, *setup(model, SCHEDULERS["exponential"], ramp_in=ramp_in, background=background)

    def run(model, optimizer, scheduler, controller, steps):
        rates = []
        for step in steps:
            train_step(model, optimizer, step)
            scheduler.step()
            controller.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        controller.close()
        return rates

    whole = parts()
    expected = run(*whole, range(30))
    first = parts()
    stop = 16 if background else 11  # with a measurement under way, or in the middle of a ramp
    assert run(*first[:4], range(stop)) == expected[:stop]
    states = [copy.deepcopy(part.state_dict()) for part in first]
    states[3] = json.loads(json.dumps(states[3]))
    second = parts()
    second[0].load_state_dict(states[0])
    for index in order:
        second[1 + index].load_state_dict(states[1 + index])
    assert run(*second, range(stop, 30)) == expected[stop:]
    assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True))


def test_background_applies_one_step_later_what_the_foreground_measures(make_model):
    histories = []
    for background in (False, True):
        model = make_model()
        optimizer = SGD(param_groups(model, 1e-3))
        controller = LayerwiseLR(
            optimizer, model, interval=4, total_steps=20, active_fraction=0.5, background=background
        )
        for _ in range(14):
            controller.step()
        controller.close()
        histories.append(controller.history)
    assert [entry["step"] for entry in histories[0]] == [1, 4, 8]
    assert [entry["step"] for entry in histories[1]] == [2, 5, 9]
    assert histories[0][1]["alphas"] == histories[1][1]["alphas"]


def test_scheduler_state_and_copies_stay_plain(model, make_model):
    _, scheduler, controller = setup(model, SCHEDULERS["step"])
    assert isinstance(scheduler, sched.StepLR)
    plain = sched.StepLR(SGD(param_groups(make_model(), 1e-3)), 9, 0.5)
    assert scheduler.state_dict().keys() == plain.state_dict().keys()
    pickle.dumps(scheduler.state_dict())
    assert type(copy.copy(scheduler)) is sched.StepLR
    assert type(pickle.loads(pickle.dumps(scheduler))) is sched.StepLR  # noqa: S301 - our own
    controller.step()


def test_accumulation_and_skipped_steps_follow_the_scheduler(model):
    """Two micro-batches a step, and steps that a gradient scaler skips: the rate stays ratio times schedule."""
    expected = alone(SCHEDULERS["exponential"])
    optimizer, scheduler, controller = setup(model, SCHEDULERS["exponential"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(20):
        optimizer.zero_grad()
        for micro in range(2):
            tokens = torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(2 * step + micro))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            scaler.scale(loss).backward()
        if step % 5 == 3:
            model.head.weight.grad[0, 0] = math.inf
        before = model.head.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.head.weight) == (step % 5 == 3)
        scheduler.step()
        controller.step()
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(group["llr_ratio"] * expected[step], rel=1e-12)
    assert controller.step_count == 20


def test_a_rate_set_by_hand_is_the_new_base(model):
    optimizer = SGD(param_groups(model, 1e-3))
    controller = LayerwiseLR(optimizer, model, total_steps=100, ramp=0)
    controller.step()
    for group in optimizer.param_groups:
        group["lr"] = 5e-3
    controller.step()
    for group in optimizer.param_groups:
        assert group["lr"] == 5e-3 * group["llr_ratio"]


def test_constant_decay(model):
    optimizer = AdamW(param_groups(model, 1e-3, weight_decay=0.1))
    controller = LayerwiseLR(optimizer, model, total_steps=100, ramp=3, decay="constant")
    for _ in range(6):
        controller.step()
        for group in optimizer.param_groups:
            if group["name"] in controller.ratios:
                assert group["lr"] * group["weight_decay"] == pytest.approx(1e-4)


def test_tensor_rates(model):
    optimizer = AdamW(param_groups(model, torch.tensor(1e-3)), lr=torch.tensor(1e-3), foreach=False, capturable=False)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-3)
    controller = LayerwiseLR(optimizer, model, total_steps=100, ramp=2)
    for _ in range(5):
        controller.step()
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    assert max(float(group["lr"]) for group in optimizer.param_groups) == pytest.approx(3e-3)


def test_groups_added_later_are_governed(model):
    groups = param_groups(model, 1e-3)
    optimizer = SGD(groups[:-3])
    controller = LayerwiseLR(optimizer, model, total_steps=100, ramp=0)
    controller.step()
    for group in groups[-3:]:
        optimizer.add_param_group(group)
    optimizer.param_groups.reverse()
    controller.step()
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-3 * controller.ratios.get(group["name"], 1.0)


def test_groups_that_mix_matrices_are_refused(model):
    with pytest.raises(ValueError, match=r"group 0 mixes .* matrices embed, .*param_groups"):
        LayerwiseLR(SGD(model.parameters(), 1e-3), model, total_steps=10)
    optimizer = SGD(param_groups(model, 1e-3))
    controller = LayerwiseLR(optimizer, model, total_steps=10)
    optimizer.param_groups[0]["params"] += optimizer.param_groups.pop(1)["params"]
    with pytest.raises(ValueError, match="group 0 mixes 2 parameters"):
        controller.step()


DEGENERATE = {
    "zero": lambda w: w.zero_(),
    "constant": lambda w: w.fill_(0.3),
    "half rank": lambda w: w.copy_(w[:, : w.shape[1] // 2] @ torch.ones(w.shape[1] // 2, w.shape[1])),
    "NaN": lambda w: w[0].fill_(math.nan),
    "infinite": lambda w: w[0].fill_(math.inf),
}


@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_layers_keep_the_base_rate_and_harm_no_other(kind, make_model):
    sick = make_model()
    with torch.no_grad():
        DEGENERATE[kind](sick.layers[1].mix.weight)
    others = make_model()
    del others.layers[1].mix
    found = []
    for model in (sick, others):
        controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0)
        if model is sick:
            with pytest.warns(LayerSkipped, match=r"layers.1.mix"):
                controller.step()
        else:
            controller.step()
        found.append(controller.ratios)
    assert found[0].pop("layers.1.mix") == 1
    assert found[0] == found[1]


def test_nan_weights_keep_the_last_ratio_and_warn_once(model):
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, interval=2, ramp=0)
    controller.step()
    before = controller.ratios["layers.0.up"]
    assert before != 1
    model.layers[0].up.weight.data[0, 0] = math.nan
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(6):
            controller.step()
    assert controller.ratios["layers.0.up"] == before
    assert [w.category for w in warned] == [LayerSkipped]


def test_equal_eigenvalues_get_the_largest_ratio_and_do_not_squash_the_others(model):
    nn.init.orthogonal_(model.layers[1].mix.weight)
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0)
    controller.step()
    assert controller.alphas["layers.1.mix"] == 50
    assert controller.ratios["layers.1.mix"] == 3
    assert sorted(controller.ratios.values())[1] > 1.2


def test_small_frozen_and_one_by_n_matrices(model):
    model.tiny, model.row = nn.Linear(8, 8), nn.Linear(64, 1)
    model.layers[0].up.requires_grad_(False)
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0)
    controller.step()
    assert controller.ratios["tiny"] == controller.ratios["row"] == controller.ratios["layers.0.up"] == 1
    assert controller.reports["row"].note == "1 eigenvalues, fewer than min_dim = 50"


def test_nothing_to_fit_leaves_all_at_the_base_rate():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8))
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0)
    controller.step()
    assert set(controller.ratios.values()) == {1.0}


@pytest.mark.parametrize(("embed", "ratio"), [("max", 3.0), ("base", 1.0), (2.5, 2.5)])
def test_embeddings_and_head(embed, ratio, model):
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0, embed=embed)
    controller.step()
    assert controller.ratios["embed"] == controller.ratios["head"] == ratio
    assert not {"embed", "head"} & controller.alphas.keys()


def test_inverse_gives_heavy_tails_the_large_rate(model):
    ratios = []
    for inverse in (False, True):
        controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0, inverse=inverse)
        controller.step()
        ratios.append({name: controller.ratios[name] for name in controller.alphas})
    assert ratios[0] != ratios[1]
    assert all(ratios[0][name] + ratios[1][name] == pytest.approx(4) for name in ratios[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"metric": "stable_rank"},
        {"farms": True},
        {"shrink": True},
        {"within_block": True},
        {"assign": "sigmoid"},
        {"fit": "gof"},
    ],
)
def test_options_change_the_ratios_within_bounds(settings, model):
    plain = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0)
    other = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=100, ramp=0, **settings)
    plain.step()
    other.step()
    assert other.ratios != plain.ratios
    if "assign" not in settings:
        assert set(other.ratios.values()) <= {r for r in other.ratios.values() if 1 <= r <= 3}
        assert 3.0 in other.ratios.values()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s1": 2, "s2": 1}, "0 < s1 <= s2, got s1 = 2, s2 = 1"),
        ({"s1": 0}, "0 < s1 <= s2"),
        ({"s1": -1}, "0 < s1 <= s2"),
        ({"interval": 0}, "interval must be a whole number of at least 1, got 0"),
        ({"ramp": -1}, "ramp must be a whole number of at least 0"),
        ({"total_steps": None}, r"share of total_steps, which is not given: pass total_steps=N, or active_fraction=1"),
        ({"active_fraction": 0}, r"active_fraction must be in \(0, 1\]"),
        ({"fit": "mean"}, "unknown method 'mean'"),
        ({"assign": "cubic"}, "unknown assign 'cubic'; choose from linear, sqrt, log2, sigmoid"),
        ({"embed": "big"}, "unknown embed 'big'"),
        ({"embed": -1.0}, "'max', 'base' or a positive ratio"),
        ({"decay": "none"}, "unknown decay"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_settings(settings, message, model):
    with pytest.raises(ValueError, match=message):
        LayerwiseLR(SGD(param_groups(model, 1e-3)), model, **{"total_steps": 10, **settings})


def test_unknown_settings_and_wrong_schedulers(model):
    optimizer = SGD(param_groups(model, 1e-3))
    with pytest.raises(TypeError, match=r"unknown setting\(s\) s3; allowed: s1, s2"):
        LayerwiseLR(optimizer, model, total_steps=10, s3=1)
    other = sched.ExponentialLR(SGD(param_groups(model, 1e-3)), 0.9)
    with pytest.raises(ValueError, match="ExponentialLR belongs to another optimizer"):
        LayerwiseLR(optimizer, model, other, total_steps=10)
    scheduler = sched.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="pass it as scheduler="):
        LayerwiseLR(optimizer, model, total_steps=10)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"has \d+ base rates for \d+ parameter groups"):
        LayerwiseLR(optimizer, model, scheduler, total_steps=10)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
        LayerwiseLR(SGD(param_groups(model, 1e-3)), [1], total_steps=10)


def test_states_of_others_are_refused(model, make_model):
    _, _, controller = setup(model)
    state = controller.state_dict()
    with pytest.raises(ValueError, match="version 99"):
        controller.load_state_dict({**state, "version": 99})
    with pytest.raises(ValueError, match=r"other settings \(s2: saved 3.0, now 4.0\)"):
        setup(make_model(), s2=4.0)[2].load_state_dict(state)
    with pytest.raises(ValueError, match="other matrices"):
        setup(make_model(blocks=3))[2].load_state_dict(state)
