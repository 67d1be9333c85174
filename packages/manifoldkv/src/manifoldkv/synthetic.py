"""Key geometries whose right selection is known, for claims and for trying a metric.

Each returns ``(keys, needles)``: float32 keys ``[1, 1, T, D]`` and the int64 indices of the tokens that must be kept.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

KeysAndNeedles = tuple[Float[Tensor, "1 1 tokens dim"], Int64[Tensor, " needles"]]


def collision(seed: int, background: int = 2000, needles: int = 30, dim: int = 64) -> KeysAndNeedles:
    """Needles in the very directions of the background, at radius 16 against 10: only the radius tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    direction = _directions(1, dim, generator)
    radius = 10 + 0.5 * torch.randn(background, generator=generator)
    common = _around(direction, background, generator) * radius[:, None]
    return _mix(common, 16 * _around(direction, needles, generator), generator)


def mirrored(seed: int, background: int = 2000, needles: int = 30, dim: int = 64) -> KeysAndNeedles:
    """Needles 30 degrees away at an ordinary radius (10), background radii uniform in [6, 18]: only the angle tells."""
    generator = torch.Generator().manual_seed(seed)
    direction = _directions(1, dim, generator)
    radius = 6 + 12 * torch.rand(background, generator=generator)
    common = _around(direction, background, generator) * radius[:, None]
    across = _directions(needles, dim, generator)
    across = torch.nn.functional.normalize(across - (across @ direction.T) * direction, dim=-1)
    away = math.cos(math.pi / 6) * direction + math.sin(math.pi / 6) * across
    return _mix(common, 10 * away, generator)


def constant_norm(seed: int, background: int = 2000, needles: int = 30, dim: int = 64) -> KeysAndNeedles:
    """All keys at radius 10, needles 60 degrees away: distance and angle rank alike."""
    generator = torch.Generator().manual_seed(seed)
    direction = _directions(1, dim, generator)
    common = 10 * _around(direction, background, generator)
    across = _directions(needles, dim, generator)
    across = torch.nn.functional.normalize(across - (across @ direction.T) * direction, dim=-1)
    return _mix(common, 10 * (0.5 * direction + math.sqrt(0.75) * across), generator)


def aligned(seed: int, background: int = 2000, needles: int = 30, dim: int = 64) -> KeysAndNeedles:
    """The larger the norm, the farther from the common direction: radius and angle agree, needles lead in radius."""
    generator = torch.Generator().manual_seed(seed)
    direction = _directions(1, dim, generator)
    share = torch.rand(background + needles, generator=generator)
    share[background:] = 1.0
    across = _directions(background + needles, dim, generator)
    across = torch.nn.functional.normalize(across - (across @ direction.T) * direction, dim=-1)
    angle = (math.radians(10) + math.radians(25) * share + 0.08 * torch.randn(len(share), generator=generator))[:, None]
    unit = angle.cos() * direction + angle.sin() * across
    radius = (9 + 5 * share)[:, None]
    radius[background:] += 2
    keys = unit * radius
    return _mix(keys[:background], keys[background:], generator)


def regimes(seed: int, count: int = 16, length: int = 4096, needles: int = 4, dim: int = 64) -> KeysAndNeedles:
    """A stream of topics: each regime's keys lie round a mean of its own (norm 20), its needles at distance 6 from that
    mean.

    The spread of a regime is 1 in all (``1 / sqrt(dim)`` a dimension).
    """
    generator = torch.Generator().manual_seed(seed)
    keys, where = [], []
    for regime in range(count):
        centre = 20 * _directions(1, dim, generator)
        own = centre + torch.randn((length, dim), generator=generator) / math.sqrt(dim)
        places = torch.randperm(length, generator=generator)[:needles].sort().values
        own[places] = centre + 6 * _directions(needles, dim, generator)
        keys.append(own)
        where.append(places + regime * length)
    return torch.cat(keys)[None, None], torch.cat(where)


def recall(kept: Int64[Tensor, "1 1 kept"], needles: Int64[Tensor, " needles"]) -> float:
    """Share of the needles that were kept."""
    return float(torch.isin(needles, kept.flatten()).double().mean())


def _directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn((count, dim), generator=generator), dim=-1)


def _around(direction: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Unit vectors round a direction: it plus ``N(0, 0.3^2 / dim)`` noise, renormalised."""
    dim = direction.shape[-1]
    noise = 0.3 / math.sqrt(dim) * torch.randn((count, dim), generator=generator)
    return torch.nn.functional.normalize(direction + noise, dim=-1)


def _mix(common: Tensor, needles: Tensor, generator: torch.Generator) -> KeysAndNeedles:
    """Needles at random places among the common keys."""
    total = len(common) + len(needles)
    places = torch.randperm(total, generator=generator)[: len(needles)].sort().values
    keys = torch.empty((total, common.shape[-1]))
    rest = torch.ones(total, dtype=torch.bool)
    rest[places] = False
    keys[rest], keys[places] = common, needles
    return keys[None, None], places
