"""Steps, levels and errors of Gaussian quantisers against the published table."""

import math

import pytest
import torch

from robuq.gaussian import gaussian_nmse, gaussian_step, levels, lloyd_max_levels, lloyd_max_nmse, sqnr_db
from robuq.quantizer import TokenQuantizer

# bits: delta, NMSE, SQNR dB, Lloyd-Max NMSE
TABLE = {
    1: (1.59576912, 0.36338023, 4.396, 0.36338023),
    "ternary": (1.22400638, 0.19017404, 7.209, 0.19017404),
    2: (0.99568667, 0.11884605, 9.250, 0.11748185),
    3: (0.58601942, 0.03743966, 14.267, 0.03454776),
    4: (0.33520062, 0.01154288, 19.377, 0.00950101),
    5: (0.18813878, 0.00349521, 24.565, 0.00250467),
    6: (0.10406301, 0.00104005, 29.830, 0.00064424),
    8: (0.03076239, 0.00008769, 40.571, None),
}
CLIPS = {1: 0.797885, "ternary": 1.224006, 2: 1.493530, 3: 2.051068, 4: 2.514005, 5: 2.916151, 6: 3.277985, 8: 3.922205}
LLOYD = {
    1: [0.797885],
    "ternary": [1.224006],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}


@pytest.mark.parametrize("bits", list(TABLE))
def test_table(bits):
    step, nmse, decibel, lloyd = TABLE[bits]
    assert gaussian_step(bits) == pytest.approx(step, abs=1e-6)
    assert gaussian_nmse(bits) == pytest.approx(nmse, abs=1e-8)
    assert sqnr_db(bits) == pytest.approx(decibel, abs=1e-3)
    assert (levels(bits) - 1) / 2 * gaussian_step(bits) == pytest.approx(CLIPS[bits], abs=1e-5)
    if lloyd is not None:
        assert lloyd_max_nmse(bits) == pytest.approx(lloyd, abs=1e-8)


@pytest.mark.parametrize("bits", list(LLOYD))
def test_lloyd_max_levels(bits):
    assert lloyd_max_levels(bits) == pytest.approx(LLOYD[bits], abs=1e-6)


@pytest.mark.parametrize("kind", ["gauss_uniform", "gauss_lloyd"])
@pytest.mark.parametrize("bits", [1, "ternary", 2, 3, 4, 5, 6])
def test_error_on_a_million_normal_samples_is_within_one_percent(bits, kind):
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    error = (TokenQuantizer(bits, kind).values(x) - x).square().mean() / x.square().mean()
    expected = gaussian_nmse(bits) if kind == "gauss_uniform" else lloyd_max_nmse(bits)
    assert float(error) == pytest.approx(expected, rel=0.01)


def test_one_bit_is_the_mean_of_the_half_normal():
    assert gaussian_step(1) / 2 == pytest.approx(math.sqrt(2 / math.pi), abs=1e-8)


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.0, True, "binary", None])
@pytest.mark.usefixtures("unchecked")
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be one of 1 to 8 or 'ternary'"):
        gaussian_step(bits)
