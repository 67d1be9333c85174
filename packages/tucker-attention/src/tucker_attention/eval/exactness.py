"""How far MHA, MQA, GQA and MLA are from their Tucker forms: random layers, with masks and biases, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tucker_attention.attention import TuckerAttention
from tucker_attention.decomposition import DenseTensor, mode_spectra, ranks_for_energy

SHAPES = ((16, 4), (24, 6), (32, 4), (20, 5), (48, 8))  # d, H
LATENTS = ((12, 8), (20, 10), (16, 24), (10, 5), (40, 12))  # d_cQ, d_cKV


@torch.no_grad()
def special_case_errors() -> dict[str, list[float]]:
    """Largest output errors, and how many of the mode ranks differ from the table's; one value a layer."""
    errors, wrong = [], []
    for index, (d, heads) in enumerate(SHAPES):
        for groups in (heads, heads // 2 if heads % 2 == 0 else 1, 1):
            for core in ("dense", "per_head"):
                error, ranks, expected = _grouped(d, heads, groups, core, index)
                errors.append(error)
                wrong.append(float(sum(a != b for a, b in zip(ranks, expected, strict=True))))
        error, ranks, expected = _latent(d, heads, *LATENTS[index], index)
        errors.append(error)
        wrong.append(float(sum(a != b for a, b in zip(ranks, expected, strict=True))))
    return {"output error": errors, "ranks unlike the table": wrong}


def formula_ranks(layer: TuckerAttention) -> tuple[int, ...]:
    """Measured mode ranks of W and of Wt."""
    found: list[int] = []
    for tensor in layer.to_tensors():
        found += ranks_for_energy(mode_spectra(DenseTensor(tensor.detach())), 1.0)
    return tuple(found)


def reference(x: Tensor, parts: list[Tensor], heads: int, groups: int, biases: list[Tensor], mask: Tensor) -> Tensor:
    """Attention from its four matrices [in, out] and their biases."""
    q, k, v = (x @ w + b for w, b in zip(parts[:3], biases[:3], strict=True))

    def by_head(t: Tensor, count: int) -> Tensor:
        return t.view(*t.shape[:2], count, -1).transpose(1, 2).repeat_interleave(heads // count, 1)

    looked = F.scaled_dot_product_attention(by_head(q, heads), by_head(k, groups), by_head(v, groups), attn_mask=mask)
    return looked.transpose(1, 2).flatten(2) @ parts[3] + biases[3]


def _masks(g: torch.Generator, n: int) -> list[Tensor]:
    some = torch.rand(n, n, generator=g) > 0.4
    some[:, 0] = True
    return [torch.ones(n, n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril(), some]


def _grouped(d: int, heads: int, groups: int, core: str, seed: int) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    g = torch.Generator().manual_seed(seed)
    width = d // heads
    shapes = ((d, d), (d, groups * width), (d, groups * width), (d, d))
    parts = [torch.randn(*s, generator=g, dtype=torch.float64) / d**0.5 for s in shapes]
    biases = [torch.randn(s[1], generator=g, dtype=torch.float64) for s in shapes]
    named: dict[str, Any] = dict(zip(("query_bias", "key_bias", "value_bias", "output_bias"), biases, strict=True))
    layer = TuckerAttention.from_gqa(*parts, n_heads=heads, n_kv_heads=groups, core=core, **named)
    x = torch.randn(2, 9, d, generator=g, dtype=torch.float64)
    error = max(
        float((layer(x, mask=mask) - reference(x, parts, heads, groups, biases, mask)).abs().max())
        for mask in _masks(g, 9)
    )
    return error, formula_ranks(layer), (heads, d, groups * width) * 2


def _latent(d: int, heads: int, queries: int, latent: int, seed: int) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((d, queries), (queries, d), (d, latent), (latent, d), (latent, d), (d, d))
    dq, uq, dkv, uk, uv, wo = (torch.randn(*s, generator=g, dtype=torch.float64) / s[0] ** 0.5 for s in shapes)
    layer = TuckerAttention.from_mla(dq, uq, dkv, uk, uv, wo, n_heads=heads)
    x = torch.randn(2, 9, d, generator=g, dtype=torch.float64)
    nothing = [torch.zeros(1, dtype=torch.float64)] * 4
    parts = [dq @ uq, dkv @ uk, dkv @ uv, wo]
    error = max(
        float((layer(x, mask=mask) - reference(x, parts, heads, heads, nothing, mask)).abs().max())
        for mask in _masks(g, 9)
    )
    return error, formula_ranks(layer), (heads, min(queries, d), min(latent, d), heads, d, min(latent, d))
