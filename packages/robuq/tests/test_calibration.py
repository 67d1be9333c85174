"""``gain="auto"``: decided by calibration data, from every door that quantises without training."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from robuq.calibration import choose_gain, unquantised_activations
from robuq.config import RobuQConfig
from robuq.integrations.pretrained import from_pretrained, load_pretrained
from robuq.storage import save_model
from robuq.surgery import quantised_layers, quantize


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def call(model, batch):
    return model(batch)


def gains(model):
    return {layer.unbiased for _, layer in quantised_layers(model)}


CONFIG = RobuQConfig.ptq(act_bits=2, rank=4)
X = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


def test_quantize_takes_the_gain_that_is_nearer_to_the_model_before():
    plain = make()
    reference = plain(X).detach()
    error = {}
    for gain in ("mse", "unbiased"):
        fixed = quantize(copy.deepcopy(plain), CONFIG.replace(gain=gain))
        error[gain] = float((fixed(X) - reference).square().mean().detach())
    model = quantize(copy.deepcopy(plain), CONFIG, batches=[X], forward_fn=call)
    better = min(error, key=error.get)
    assert gains(model) == {better == "unbiased"}
    assert float((model(X) - reference).square().mean().detach()) == pytest.approx(error[better], rel=1e-6)
    # the other answer, on data that make it so: references of a network whose output is larger, or smaller
    for factor, unbiased in ((3.0, True), (0.3, False)):
        assert choose_gain(model, [X], call, [reference * factor])[0] == unbiased
        assert gains(model) == {unbiased}


def test_without_the_unquantised_model_its_activations_are_the_reference():
    model = quantize(make(), CONFIG.replace(gain="mse"))
    exact = copy.deepcopy(model)
    for _, layer in quantised_layers(exact):
        layer.bits = 16
    (reference,) = unquantised_activations(model, [X], call)
    assert torch.equal(reference, exact(X).detach())
    assert [layer.bits for _, layer in quantised_layers(model)] == [2, 2]
    without, errors = choose_gain(model, [X], call)
    assert (without, errors) == choose_gain(model, [X], call, [reference])


def test_from_pretrained_calibrates_and_the_folder_keeps_it(tmp_path):
    save_file(make().state_dict(), tmp_path / "fp.safetensors")
    found = {}
    for factor in (0.3, 3.0):
        references = [make()(X).detach() * factor]
        model = from_pretrained(
            tmp_path / "fp.safetensors", CONFIG, model_factory=make, batches=[X], forward_fn=call, references=references
        )
        found[factor] = gains(model)
        save_model(model, tmp_path / "packed")
        again = load_pretrained(tmp_path / "packed", make)
        assert gains(again) == found[factor]
        assert torch.equal(again(X), model(X))
    assert found == {0.3: {False}, 3.0: {True}}
    by_itself = from_pretrained(tmp_path / "fp.safetensors", CONFIG, model_factory=make, batches=[X], forward_fn=call)
    assert gains(by_itself) == {choose_gain(by_itself, [X], call)[0]}


def test_without_data_auto_says_that_it_stays_at_mse(tmp_path):
    with pytest.warns(UserWarning, match='gain="auto" is decided on calibration data and there is none'):
        assert gains(quantize(make(), CONFIG)) == {False}
    save_file(make().state_dict(), tmp_path / "fp.safetensors")
    with pytest.warns(UserWarning, match='stays at "mse"'):
        from_pretrained(tmp_path / "fp.safetensors", CONFIG, model_factory=make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = quantize(make(), CONFIG.replace(gain="unbiased"))
        assert gains(model) == {True}
        assert quantize(model, CONFIG) is model  # quantised already: nothing is decided
        assert gains(model) == {True}


def test_half_given_calibration_is_refused(tmp_path):
    for wrong in ({"batches": [X]}, {"forward_fn": call}, {"batches": [], "forward_fn": call}):
        with pytest.raises(ValueError, match="calibration needs both batches, at least one, and forward_fn"):
            quantize(make(), CONFIG, **wrong)
    save_file(make().state_dict(), tmp_path / "fp.safetensors")
    with pytest.raises(ValueError, match="calibration needs both batches and forward_fn"):
        from_pretrained(tmp_path / "fp.safetensors", CONFIG, model_factory=make, batches=[X])
