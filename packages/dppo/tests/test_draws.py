"""Counter-based uniforms."""

import numpy as np
import pytest
import torch

from dppo.draws import MaskGenerator, as_generator, combine, mix64, occurrences

WORD = 1 << 64


def splitmix64_finaliser(x: int) -> int:
    """The published constants, in Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def test_mixer_is_the_published_one():
    values = [0, 1, 2, 12345678901234567, 2**63 - 1, -1, -(2**63)]
    got = mix64(torch.tensor(values))
    assert [int(g) % WORD for g in got] == [splitmix64_finaliser(v % WORD) for v in values]
    assert int(mix64(torch.tensor([0]))[0]) % WORD == 0xE220A8397B1DCDAF  # first output of SplitMix64 seeded with 0


def test_uniforms_are_uniform_and_independent_of_step_and_stream():
    ids = torch.arange(200_000)
    source = MaskGenerator(7, 3)
    u = source.uniform(ids)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u.numpy(), bins=50, range=(0, 1))[0]
    chi2 = ((counts - 4000) ** 2 / 4000).sum()
    assert chi2 < 49 + 4 * (2 * 49) ** 0.5
    for other in (source.at(4), MaskGenerator(8, 3), source.of("prompts")):
        correlation = np.corrcoef(u, other.uniform(ids))[0, 1]
        assert abs(correlation) < 4 / len(ids) ** 0.5
    assert torch.equal(u, MaskGenerator(7, 3).uniform(ids))
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / len(ids) ** 0.5


def test_combine_depends_on_both_ids():
    a, b = torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3])
    assert len(set(combine(a, b).tolist())) == 3


def test_occurrences():
    assert occurrences(torch.tensor([5, 3, 5, 5, 3, 1])).tolist() == [0, 0, 1, 2, 1, 0]
    assert occurrences(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_generators_accepted():
    assert as_generator(3) == MaskGenerator(3)
    rng = torch.Generator().manual_seed(0)
    assert as_generator(rng) != as_generator(rng), "a torch.Generator advances"
    with pytest.raises(TypeError, match="MaskGenerator"):
        as_generator("seed")
