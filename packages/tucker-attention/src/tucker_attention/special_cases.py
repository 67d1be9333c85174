"""MHA, MQA, GQA and MLA as Tucker attention, exactly (theorems B.2 to B.4) or truncated to smaller ranks.

| source             | ranks of W        | ranks of Wt       |
| ------------------ | ----------------- | ----------------- |
| MHA                | (H, d, d)         | (H, d, d)         |
| MQA                | (H, d, d_H)       | (H, d, d_H)       |
| GQA, n_KV          | (H, d, d_H n_KV)  | (H, d, d_H n_KV)  |
| MLA, d_cQ, d_cKV   | (H, d_cQ, d_cKV)  | (H, d, d_cKV)     |

For GQA, ``U1 = I``, ``U2 = W^Q``, ``U3 = W^K`` and C[h] is the identity of d_H at the columns of query head h and key
head h // (H / n_KV). For MLA, ``U2 = W^DQ``, ``U3 = W^DKV`` and ``C[h] = W_h^UQ W_h^UK^T``. Biases of queries and keys
are one more row of U2 and U3 (homogeneous coordinates), so a layer with them stays exact.

Each function returns a configuration and the layer's parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tucker_attention.config import HEAD_MAPS, Ranks, TuckerConfig
from tucker_attention.decomposition import (
    DenseTensor,
    SlicedTensor,
    TuckerFactors,
    hosvd,
    mode_spectra,
    ranks_for_energy,
)
from tucker_attention.ranks import allocate_ranks, factor_count
from tucker_attention.weights import AttentionWeights

Made = tuple[TuckerConfig, dict[str, Tensor]]
# Share of the mean square input that is added to the calibration's second moments, so that they can be inverted.
_RIDGE = 1e-6


def from_weights(
    weights: AttentionWeights, *, ranks: Sequence[Any] | None = None, energy: float | None = None,
    budget: int | None = None, calibration: Tensor | None = None, core: str | None = None, rope: str | None = None,
) -> Made:  # fmt: skip
    """See `TuckerAttention.from_weights`."""
    given = {name: v for name, v in (("ranks", ranks), ("energy", energy), ("budget", budget)) if v is not None}
    if len(given) > 1:
        raise ValueError(f"give one of ranks, energy and budget; got {', '.join(given)}")
    if core not in (None, "dense", "per_head"):
        raise ValueError(f"core {core!r} unknown; allowed: 'dense', 'per_head'")
    if rope not in (None, "latent", "head"):
        raise ValueError(f"rope {rope!r} unknown; allowed: None, 'latent', 'head'")
    if rope is not None and weights.rotary is None:
        raise ValueError(f"rope={rope!r} was asked for, but the layer has no RoPE")
    if weights.rotary is not None and rope is None:
        rope = "latent" if given or core == "dense" else "head"
    if rope == "latent":
        _warn_latent_rope()
    if not given:
        return exact(weights, core or "per_head", rope)
    return truncated(weights, given, calibration, core, rope)


def tensors(weights: AttentionWeights) -> tuple[SlicedTensor, SlicedTensor]:
    """W, with a further row for query and key biases where there are any, and Wt, by their factors."""
    group = weights.n_heads // weights.n_kv_heads
    query, key = _with_bias(weights.query, weights.query_bias), _with_bias(weights.key, weights.key_bias)
    return (
        SlicedTensor(query, key.repeat_interleave(group, 0)),
        SlicedTensor(weights.output.transpose(1, 2), weights.value.repeat_interleave(group, 0)),
    )


# -- exact -------------------------------------------------------------------------------------------------------------


def exact(weights: AttentionWeights, core: str = "per_head", rope: str | None = None) -> Made:
    """The layer itself; ``core="per_head"`` has its own parameters, ``"dense"`` the theorem's cores."""
    heads, groups = weights.n_heads, weights.n_kv_heads
    width, value_width = weights.query.shape[2], weights.value.shape[2]
    state = _constants(weights)
    common = _common(weights, rope)
    flat = {
        "query": _columns(weights.query),
        "key": _columns(weights.key),
        "value": _columns(weights.value),
        "output": _columns(weights.output.transpose(1, 2)),
    }
    if core == "per_head":
        if rope == "latent":
            raise ValueError("rope='latent' rotates the latents that all heads share: it needs core='dense'")
        state |= {"U2": flat["query"], "U3": flat["key"], "V2": flat["output"], "V3": flat["value"]}
        if weights.query_bias is not None:
            state["query_bias"] = weights.query_bias.reshape(-1)
        if weights.key_bias is not None:
            state["key_bias"] = weights.key_bias.reshape(-1)
        config = TuckerConfig(
            **common, ranks=(heads, heads * width, groups * width),
            post_ranks=(heads, heads * value_width, groups * value_width), core="per_head", blocks=HEAD_MAPS,
            n_kv_heads=groups, value_dim=value_width,
        )  # fmt: skip
        return config, state
    u2, query_maps = _reduced(_with_bias(weights.query, weights.query_bias))
    u3, key_maps = _reduced(_with_bias(weights.key, weights.key_bias))
    v2, output_maps = _reduced(weights.output.transpose(1, 2))
    v3, value_maps = _reduced(weights.value)
    group = heads // groups
    state |= _factor_rows(weights, u2, u3) | {"V2": v2, "V3": v3}
    state["C"] = query_maps @ key_maps.repeat_interleave(group, 0).transpose(1, 2)
    state["Ct"] = output_maps @ value_maps.repeat_interleave(group, 0).transpose(1, 2)
    state["U1"] = state["V1"] = torch.eye(heads, dtype=u2.dtype, device=u2.device)
    ranks = heads, u2.shape[1], u3.shape[1]
    return TuckerConfig(**common, ranks=ranks, post_ranks=(heads, v2.shape[1], v3.shape[1])), state


def mla(
    query_down: Tensor, query_up: Tensor, kv_down: Tensor, key_up: Tensor, value_up: Tensor, output: Tensor, *,
    n_heads: int, core: str = "per_head", scale: float | None = None, causal: bool = False,
) -> Made:  # fmt: skip
    """See `TuckerAttention.from_mla`."""
    d, latent = query_down.shape[0], kv_down.shape[1]
    if query_up.shape[1] % n_heads or value_up.shape[1] % n_heads or output.shape[0] != value_up.shape[1]:
        raise ValueError(
            f"{n_heads} heads do not divide W^UQ {tuple(query_up.shape)}, W^UV {tuple(value_up.shape)} and W^O "
            f"{tuple(output.shape)}"
        )
    maps = {
        name: up.reshape(up.shape[0], n_heads, -1).transpose(0, 1)
        for name, up in (("query", query_up), ("key", key_up), ("value", value_up))
    }
    width, value_width = maps["query"].shape[2], maps["value"].shape[2]
    by_head = output.reshape(n_heads, value_width, d)
    common: dict[str, Any] = {
        "d_model": d, "n_heads": n_heads, "head_dim": width, "share_kv": True, "causal": causal,
        "scale": "head_dim" if scale is None else scale, "context_dim": kv_down.shape[0],
    }  # fmt: skip
    ranks = (n_heads, query_down.shape[1], latent)
    state = {"U2": query_down, "U3": kv_down}
    if core == "per_head":
        state |= {f"{name}_map": each for name, each in maps.items()} | {"V2": _columns(by_head.transpose(1, 2))}
        post = (n_heads, n_heads * value_width, latent)
        config = TuckerConfig(
            **common, ranks=ranks, post_ranks=post, core="per_head", blocks=("output",), value_dim=value_width
        )
        return config, state
    v2, output_maps = _reduced(by_head.transpose(1, 2))
    state |= {"V2": v2, "C": maps["query"] @ maps["key"].transpose(1, 2)}
    state["Ct"] = output_maps @ maps["value"].transpose(1, 2)
    state["U1"] = state["V1"] = torch.eye(n_heads, dtype=v2.dtype, device=v2.device)
    return TuckerConfig(**common, ranks=ranks, post_ranks=(n_heads, v2.shape[1], latent)), state


# -- truncated ---------------------------------------------------------------------------------------------------------


def truncated(
    weights: AttentionWeights, given: Mapping[str, Any], calibration: Tensor | None, core: str | None, rope: str | None
) -> Made:
    """HOSVD and HOOI of both tensors, weighted by the second moments of the calibration's inputs if there are any."""
    pre, post = tensors(weights)
    moments = None if calibration is None else _Moments.of(calibration, weights)
    if moments is not None:
        pre = SlicedTensor(moments.weigh(pre.a), moments.weigh(pre.b))
        post = SlicedTensor(post.a, moments.weigh(post.b))
    wanted = _chosen_ranks(pre, post, given, rope)
    heads = weights.n_heads
    if core is None:
        smaller = _per_head_is_smaller(weights, wanted, (pre.shape, post.shape), exactly="ranks" in given)
        core = "per_head" if rope == "head" or (rope is None and smaller) else "dense"
    if core == "per_head":
        if "ranks" in given and (wanted[0][0], wanted[1][0]) != (heads, heads):
            raise ValueError(f"per-head cores keep all {heads} heads: ranks must begin with {heads}, got {wanted}")
        wanted = (heads, *wanted[0][1:]), (heads, *wanted[1][1:])
        if given.get("energy") == 1.0 and calibration is None:
            made = _fewer(weights, wanted, rope)
            if made is not None:
                return made
    found = hosvd(pre, wanted[0]), hosvd(post, wanted[1])
    return _assembled(weights, found, wanted, moments, core, rope, (pre, post))


def _assembled(
    weights: AttentionWeights, found: tuple[TuckerFactors, TuckerFactors], wanted: tuple[Ranks, Ranks],
    moments: _Moments | None, core: str, rope: str | None, parts: tuple[SlicedTensor, SlicedTensor],
) -> Made:  # fmt: skip
    """Configuration and parameters of the decomposed tensors."""
    pre, post = found
    like, groups = weights.query, weights.n_kv_heads

    def plain(u: Tensor) -> Tensor:
        return u if moments is None else moments.unweigh(u)

    u2, u3, v3 = (plain(u).to(like.dtype) for u in (pre.u2, pre.u3, post.u3))
    state = _constants(weights) | _factor_rows(weights, u2, u3)
    state |= {"V2": post.u2.to(like.dtype), "V3": v3}
    common = _common(weights, rope)
    if core == "dense":
        state |= {"C": pre.core, "U1": pre.u1, "Ct": post.core, "V1": post.u1}
        config = TuckerConfig(**common, ranks=wanted[0], post_ranks=wanted[1])
    else:
        first = slice(None, None, weights.n_heads // groups)  # one key head of each group
        state |= {
            "query_map": pre.u2.T @ parts[0].a,
            "key_map": pre.u3.T @ parts[0].b[first],
            "value_map": post.u3.T @ parts[1].b[first],
            "output_map": post.u2.T @ parts[1].a,
        }
        config = TuckerConfig(
            **common, ranks=wanted[0], post_ranks=wanted[1], core="per_head", n_kv_heads=groups,
            value_dim=weights.value.shape[2],
        )  # fmt: skip
    return config, {name: tensor.to(like.dtype) for name, tensor in state.items()}


def truncate(
    config: TuckerConfig, parameters: Mapping[str, Tensor], slices: tuple[Tensor, Tensor], ranks: Sequence[Any]
) -> Made:
    """A layer's own tensors at smaller ranks; see `TuckerAttention.truncate`."""
    if config.rope == "head":
        raise ValueError("a layer with rope='head' is more than its tensor W: truncate it from the model it came from")
    if config.share_kv:
        raise ValueError("a layer with share_kv has one factor for two tensors; truncating both apart would break it")
    wanted = both_ranks(ranks)
    dtype = parameters["U2"].dtype
    factors = {name: parameters[name].detach().double() for name in ("U2", "U3", "V2", "V3")}
    for name, bias in (("U2", "query_bias"), ("U3", "key_bias")):
        if bias in parameters:
            factors[name] = torch.cat([factors[name], parameters[bias].detach().double()[None]])
    orthonormal = {name: torch.linalg.qr(factor) for name, factor in factors.items()}
    state: dict[str, Tensor] = {}
    t, tt = (each.detach().double() for each in slices)
    for names, piece, each in ((("U1", "U2", "U3", "C"), t, wanted[0]), (("V1", "V2", "V3", "Ct"), tt, wanted[1])):
        (q2, r2), (q3, r3) = orthonormal[names[1]], orthonormal[names[2]]
        found = hosvd(DenseTensor(r2 @ piece @ r3.T), each)
        state |= {names[0]: found.u1, names[1]: q2 @ found.u2, names[2]: q3 @ found.u3, names[3]: found.core}
    for name, bias in (("U2", "query_bias"), ("U3", "key_bias")):
        if bias in parameters:
            state[bias], state[name] = state[name][-1], state[name][:-1]
    if "output_bias" in parameters:
        state["output_bias"] = parameters["output_bias"]
    made = config.changed(
        ranks=wanted[0], post_ranks=wanted[1], core="dense", blocks=(), n_kv_heads=None,
        scale=config.softmax_scale,
    )  # fmt: skip
    return made, {name: tensor.to(dtype) for name, tensor in state.items()}


def both_ranks(ranks: Sequence[Any]) -> tuple[Ranks, Ranks]:
    """(r1, r2, r3) for both tensors, or ((r1, r2, r3), (s1, s2, s3))."""
    rows = [ranks, ranks] if all(isinstance(r, int) for r in ranks) else list(ranks)
    if len(rows) != 2 or any(len(row) != 3 or not all(isinstance(r, int) for r in row) for row in rows):
        raise ValueError(f"ranks must be (r1, r2, r3) or ((r1, r2, r3), (s1, s2, s3)), got {ranks!r}")
    return tuple(rows[0]), tuple(rows[1])  # type: ignore[return-value]


def _chosen_ranks(
    pre: SlicedTensor, post: SlicedTensor, given: Mapping[str, Any], rope: str | None
) -> tuple[Ranks, Ranks]:
    if "ranks" in given:
        return both_ranks(given["ranks"])
    spectra = mode_spectra(pre), mode_spectra(post)
    if "energy" in given:
        found = ranks_for_energy(spectra[0], given["energy"]), ranks_for_energy(spectra[1], given["energy"])
    else:
        allocated = allocate_ranks(spectra, given["budget"])
        found = allocated[0], allocated[1]
    if rope == "latent" and found[0][2] % 2:  # pairs are turned: an even key rank
        r1, r2, r3 = found[0]
        r3 = r3 + 1 if r3 < pre.shape[2] and "energy" in given else r3 - 1
        found = (r1, r2, max(2, r3)), found[1]
    return found


def _per_head_is_smaller(
    weights: AttentionWeights, wanted: tuple[Ranks, Ranks], shapes: tuple[Any, Any], *, exactly: bool
) -> bool:
    """Whether per-head maps over the same latents have fewer parameters than dense cores."""
    heads, groups = weights.n_heads, weights.n_kv_heads
    width, value_width = weights.query.shape[2], weights.value.shape[2]
    (r1, r2, r3), (s1, s2, s3) = wanted
    if exactly and (r1, s1) != (heads, heads):
        return False
    maps = width * (heads * r2 + groups * r3) + value_width * (heads * s2 + groups * s3)
    factors = sum(shapes[0][mode] * wanted[0][mode] + shapes[1][mode] * wanted[1][mode] for mode in (1, 2))
    dense = factor_count(wanted[0], shapes[0]) + factor_count(wanted[1], shapes[1])
    return min(maps + factors, weights.parameter_count) < dense


def _fewer(weights: AttentionWeights, wanted: tuple[Ranks, Ranks], rope: str | None) -> Made | None:
    """The layer itself where its own matrices have no more parameters than latents of these ranks with maps."""
    heads, groups = weights.n_heads, weights.n_kv_heads
    width, value_width = weights.query.shape[2], weights.value.shape[2]
    (_, r2, r3), (_, s2, s3) = wanted
    with_maps = r2 * (weights.d_model + heads * width) + r3 * (weights.key.shape[1] + groups * width)
    with_maps += s2 * (weights.d_model + heads * value_width) + s3 * (weights.value.shape[1] + groups * value_width)
    return exact(weights, "per_head", rope) if weights.parameter_count <= with_maps else None


# -- pieces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moments:
    """Cholesky factor L of the second moments of inputs (with a 1 appended for rows of biases)."""

    plain: Tensor
    extended: Tensor

    @classmethod
    def of(cls, calibration: Tensor, weights: AttentionWeights) -> _Moments:
        x = calibration.detach().reshape(-1, calibration.shape[-1]).double()
        if x.shape[1] != weights.d_model or weights.key.shape[1] != weights.d_model:
            raise ValueError(f"calibration must be inputs [.., {weights.d_model}], got {tuple(calibration.shape)}")
        if len(x) == 0 or not torch.isfinite(x).all():
            raise ValueError("calibration needs at least one input, and finite ones")
        ones = torch.cat([x, x.new_ones(len(x), 1)], 1)
        return cls(cls._factor(x), cls._factor(ones))

    @staticmethod
    def _factor(x: Tensor) -> Tensor:
        moments = x.T @ x / len(x)
        ridge = _RIDGE * moments.diagonal().mean().clamp(min=1e-30)
        return torch.linalg.cholesky(moments + ridge * torch.eye(len(moments), dtype=x.dtype, device=x.device))

    def _of_rows(self, rows: int) -> Tensor:
        return self.plain if rows == len(self.plain) else self.extended

    def weigh(self, factor: Tensor) -> Tensor:
        """``L^T A``."""
        return self._of_rows(factor.shape[-2]).T @ factor.double()

    def unweigh(self, factor: Tensor) -> Tensor:
        """``L^-T A``."""
        return torch.linalg.solve_triangular(self._of_rows(factor.shape[-2]).T, factor, upper=True)


def _common(weights: AttentionWeights, rope: str | None) -> dict[str, Any]:
    biases = {"query": weights.query_bias, "key": weights.key_bias, "output": weights.constant}
    width = weights.query.shape[2]
    common: dict[str, Any] = {
        "d_model": weights.d_model, "n_heads": weights.n_heads, "head_dim": width, "causal": weights.causal,
        "scale": "head_dim" if weights.scale == width**-0.5 else weights.scale, "dropout": weights.dropout,
        "biases": tuple(name for name, bias in biases.items() if bias is not None),
        "context_dim": weights.key.shape[1],
    }  # fmt: skip
    if rope is not None and weights.rotary is not None:
        rotary = weights.rotary
        common |= {"rope": rope, "rope_interleaved": rotary.interleaved, "rope_scale": rotary.scale}
        if rope == "head":
            common["rope_frequencies"] = rotary.frequencies
        else:
            common["rope_theta"] = _theta(rotary.frequencies)
    return common


def _theta(frequencies: Sequence[float]) -> float:
    """The base whose frequencies begin with these two: ``f_1 = theta^(-1/pairs)``."""
    return float(frequencies[1] ** -len(frequencies)) if len(frequencies) > 1 else 1e4


def _constants(weights: AttentionWeights) -> dict[str, Tensor]:
    return {} if weights.constant is None else {"output_bias": weights.constant}


def _with_bias(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[H, d, w], or [H, d + 1, w] with the bias as the last row."""
    return matrix if bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)


def _factor_rows(weights: AttentionWeights, u2: Tensor, u3: Tensor) -> dict[str, Tensor]:
    """U2 and U3, with their last rows as biases where the layer has them."""
    state = {"U2": u2, "U3": u3}
    for name, bias, flag in (("U2", "query_bias", weights.query_bias), ("U3", "key_bias", weights.key_bias)):
        if flag is not None:
            state[bias], state[name] = state[name][-1], state[name][:-1]
    return state


def _columns(by_head: Tensor) -> Tensor:
    """[H, d, w] as [d, H w]."""
    return by_head.transpose(0, 1).reshape(by_head.shape[1], -1)


def _reduced(by_head: Tensor) -> tuple[Tensor, Tensor]:
    """A factor [d, r] and maps [H, r, w] with ``factor maps_h = by_head_h`` and no more columns than rows."""
    flat = _columns(by_head)
    heads, rows, width = by_head.shape
    if flat.shape[1] <= rows:
        eye = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device)
        return flat, eye.view(-1, heads, width).transpose(0, 1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    q, r = torch.linalg.qr(flat.to(wide))
    return q.to(flat.dtype), r.to(flat.dtype).view(-1, heads, width).transpose(0, 1)


def _warn_latent_rope() -> None:
    warnings.warn(
        "rope='latent' turns latents at frequencies of their own width: the converted layer is NOT the model's layer "
        "but an initialisation that needs training. rope='head' keeps the model's own RoPE exactly.",
        stacklevel=4,
    )
