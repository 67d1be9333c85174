"""Shapes and options of a Tucker attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Ranks = tuple[int, int, int]
Rope = Literal["latent", "head"]
Core = Literal["dense", "per_head"]
HEAD_MAPS = ("query", "key", "value", "output")
BIASES = ("query", "key", "output")


@dataclass(frozen=True)
class TuckerConfig:
    """Tucker attention: ``W = C x1 U1 x2 U2 x3 U3`` before, ``Wt = Ct x1 V1 x2 V2 x3 V3`` after the softmax.

    Args:
        d_model: width d of the tokens.
        n_heads: heads H.
        ranks: (r1, r2, r3) of W, over the modes (head, query, key).
        post_ranks: (s1, s2, s3) of Wt, over the modes (head, output, value); default: ``ranks``.
        head_dim: d_H, of which the default scale is made; default d / H.
        share_kv: V3 is U3: one latent of r3 numbers a token is the whole cache.
        rope: ``"latent"``: rotate the latents of width r3; ``"head"``: rotate every head's queries and keys of width
            ``head_dim``, as in converted models (needs ``core="per_head"``; keys are cached per key head).
        rope_theta: base of the rotary frequencies.
        rope_interleaved: pairs are (2 p, 2 p + 1) instead of (p, p + r/2).
        rope_fraction: share of the pairs that rotate, the fastest first.
        rope_frequencies: frequencies of all pairs instead of theta's, e.g. of a model with scaled RoPE.
        rope_scale: factor on cosine and sine (attention factor of scaled RoPE).
        causal: a token sees itself and what came before.
        scale: ``"head_dim"``: 1/sqrt(d_H); ``"key_rank"``: 1/sqrt(r3); or the factor on the logits itself.
        dropout: probability of dropping attention weights in training.
        biases: which of ``"query"`` (b2 on X U2), ``"key"`` (b3 on X U3) and ``"output"`` there are. A value bias is a
            constant of the output, so it is part of that.
        core: ``"dense"``: cores C and Ct as in the paper. ``"per_head"``: each head's slice ``T_h`` as a product of two
            thin matrices over the latents, which is what MHA, GQA and MLA have; r1 and s1 are then H.
        n_kv_heads: per-head cores only: heads that keys and values have; default H.
        blocks: per-head cores only: which of the maps ``"query", "key", "value", "output"`` only pick their head's
            columns of the factor and so hold no parameters.
        value_dim: per-head cores only: width of a head's values; default d_H.
        context_dim: width of the tokens that keys and values come from; default d.
        n_layers: depth L of the model, for the initial gain 1/(2 L) of the output.

    Raises:
        ValueError: a rank below 1 or above its mode, r1 above H, d not divisible by H without ``head_dim``, an odd
            rotary width, an unknown option.
    """

    d_model: int
    n_heads: int
    ranks: Ranks
    post_ranks: Ranks | None = None
    head_dim: int | None = None
    share_kv: bool = False
    rope: Rope | None = None
    rope_theta: float = 1e4
    rope_interleaved: bool = False
    rope_fraction: float = 1.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_scale: float = 1.0
    causal: bool = False
    scale: float | Literal["head_dim", "key_rank"] = "head_dim"
    dropout: float = 0.0
    biases: tuple[str, ...] = ()
    core: Core = "dense"
    n_kv_heads: int | None = None
    blocks: tuple[str, ...] = ()
    value_dim: int | None = None
    context_dim: int | None = None
    n_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads"):
            _positive(name, getattr(self, name))
        set_ = object.__setattr__  # frozen: only derived defaults are set, here
        set_(self, "ranks", _triple("ranks", self.ranks))
        set_(self, "post_ranks", _triple("post_ranks", self.ranks if self.post_ranks is None else self.post_ranks))
        set_(self, "biases", tuple(self.biases))
        set_(self, "blocks", tuple(self.blocks))
        if self.rope_frequencies is not None:
            set_(self, "rope_frequencies", tuple(float(f) for f in self.rope_frequencies))
        if self.context_dim is None:
            set_(self, "context_dim", self.d_model)
        _positive("context_dim", self.context_dim)
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}; give head_dim as well"
                )
            set_(self, "head_dim", self.d_model // self.n_heads)
        _positive("head_dim", self.head_dim)
        if self.value_dim is None:
            set_(self, "value_dim", self.head_dim)
        _positive("value_dim", self.value_dim)
        _positive("n_layers", self.n_layers)
        if self.n_kv_heads is None:
            set_(self, "n_kv_heads", self.n_heads)
        self._check_names()
        self._check_ranks()
        self._check_rope()

    def _check_names(self) -> None:
        for name, given, allowed in (("biases", self.biases, BIASES), ("blocks", self.blocks, HEAD_MAPS)):
            unknown = [each for each in given if each not in allowed]
            if unknown:
                raise ValueError(f"{name} {unknown!r} unknown; allowed: {', '.join(allowed)}")
        if self.core not in ("dense", "per_head"):
            raise ValueError(f"core {self.core!r} unknown; allowed: 'dense', 'per_head'")
        if self.blocks and self.core == "dense":
            raise ValueError(f"blocks {self.blocks} need core='per_head', got core='dense'")
        _positive("n_kv_heads", self.n_kv_heads)
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.kv_heads}")
        if self.core == "dense" and self.kv_heads != self.n_heads:
            raise ValueError("n_kv_heads needs core='per_head': a dense core has one slice a head")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if isinstance(self.scale, str):
            if self.scale not in ("head_dim", "key_rank"):
                raise ValueError(f"scale {self.scale!r} unknown; allowed: 'head_dim', 'key_rank' or a number")
        elif not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a positive number, got {self.scale}")

    def _check_ranks(self) -> None:
        d, context, heads, width = self.d_model, int(self.context_dim or 0), self.n_heads, int(self.head_dim or 0)
        query = max(d, heads * width) if "query" in self.blocks else d
        key = max(context, self.kv_heads * width) if "key" in self.blocks else context
        bounds = {
            "ranks": (heads, query + ("query" in self.biases), key + ("key" in self.biases)),
            "post_ranks": (heads, None if "output" in self.blocks else d, None if "value" in self.blocks else context),
        }
        labels = {"ranks": ("head", "query", "key"), "post_ranks": ("head", "output", "value")}
        for name, sizes in bounds.items():
            for mode, rank, size in zip(labels[name], getattr(self, name), sizes, strict=True):
                if rank < 1 or (size is not None and rank > size):
                    raise ValueError(
                        f"{name} {getattr(self, name)}: the {mode} rank is {rank}, allowed are 1 to "
                        f"{size if size is not None else 'any'}"
                    )
        self._check_blocks()
        if self.share_kv and self.post[2] != self.ranks[2]:
            raise ValueError(
                f"share_kv makes V3 = U3, so the value rank must be the key rank {self.ranks[2]}, got {self.post[2]}"
            )
        if self.core == "per_head" and (self.ranks[0], self.post[0]) != (heads, heads):
            raise ValueError(
                f"core='per_head' keeps every head: ranks must begin with {heads}, got {self.ranks}, {self.post}"
            )

    def _check_blocks(self) -> None:
        """A map without parameters picks its head's columns, so the factor must have just those."""
        columns = {
            "query": (self.ranks[1], self.n_heads * self.width),
            "key": (self.ranks[2], self.kv_heads * self.width),
            "value": (self.post[2], self.kv_heads * self.value_width),
            "output": (self.post[1], self.n_heads * self.value_width),
        }
        for name in self.blocks:
            rank, expected = columns[name]
            if rank != expected:
                raise ValueError(f"the {name} map picks columns of heads: its rank must be {expected}, got {rank}")

    def _check_rope(self) -> None:
        if self.rope is None:
            return
        if self.rope not in ("latent", "head"):
            raise ValueError(f"rope {self.rope!r} unknown; allowed: None, 'latent', 'head'")
        if self.rope == "head" and self.core != "per_head":
            raise ValueError("rope='head' rotates every head's own queries and keys: it needs core='per_head'")
        if self.rope == "latent" and self.core != "dense":
            raise ValueError("rope='latent' rotates the latents that all heads share: it needs core='dense'")
        if self.rope_width % 2:
            what = "key rank r3" if self.rope == "latent" else "head_dim"
            raise ValueError(f"rope={self.rope!r} turns pairs, so the {what} must be even, got {self.rope_width}")
        if self.rope_theta <= 0:
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta}")
        if not 0 <= self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction must be in [0, 1], got {self.rope_fraction}")
        if self.rope_frequencies is not None and len(self.rope_frequencies) != self.rope_width // 2:
            raise ValueError(
                f"rope_frequencies must be {self.rope_width // 2}, one a pair, got {len(self.rope_frequencies)}"
            )

    @property
    def post(self) -> Ranks:
        """(s1, s2, s3)."""
        return self.post_ranks if self.post_ranks is not None else self.ranks

    @property
    def width(self) -> int:
        """d_H."""
        return int(self.head_dim or 0)

    @property
    def value_width(self) -> int:
        """Width of a head's values in a per-head core."""
        return int(self.value_dim or 0)

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have in a per-head core."""
        return int(self.n_kv_heads or 0)

    @property
    def context(self) -> int:
        """Width of the tokens that keys and values come from."""
        return int(self.context_dim or 0)

    @property
    def rope_width(self) -> int:
        """Width that is rotated: r3, or d_H with ``rope="head"``."""
        return self.width if self.rope == "head" else self.ranks[2]

    @property
    def softmax_scale(self) -> float:
        """Factor on the logits."""
        if self.scale == "head_dim":
            return self.width**-0.5
        return self.ranks[2] ** -0.5 if self.scale == "key_rank" else float(self.scale)

    @property
    def cache_width(self) -> int:
        """Numbers a token leaves in the cache: r3 + s3, r3 with ``share_kv``; d_H n_KV + s3 with ``rope="head"``."""
        keys = self.kv_heads * self.width if self.rope == "head" else self.ranks[2]
        return keys + (0 if self.share_kv else self.post[2])

    def to_json(self) -> dict[str, Any]:
        """Plain values, as :meth:`from_json` reads them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> TuckerConfig:
        """What :meth:`to_json` gave.

        Raises:
            ValueError: an unknown field, or values that do not fit.
        """
        unknown = sorted(set(plain) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown fields of a Tucker configuration: {', '.join(unknown)}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**values)

    def changed(self, **changes: Any) -> TuckerConfig:
        """A copy with other values."""
        return replace(self, **changes)


def parameter_shapes(config: TuckerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a layer of this configuration has."""
    (r1, r2, r3), (s1, s2, s3) = config.ranks, config.post
    d, heads, kv, width, value = (
        config.d_model,
        config.n_heads,
        config.kv_heads,
        config.width,
        config.value_width,
    )
    shapes: dict[str, tuple[int, ...]] = {"U2": (d, r2), "U3": (config.context, r3), "V2": (d, s2)}
    if not config.share_kv:
        shapes["V3"] = (config.context, s3)
    if config.core == "dense":
        shapes |= {"C": (r1, r2, r3), "U1": (heads, r1), "Ct": (s1, s2, s3), "V1": (heads, s1)}
    else:
        maps = {"query": (heads, r2, width), "key": (kv, r3, width), "value": (kv, s3, value)}
        maps["output"] = (heads, s2, value)
        shapes |= {f"{name}_map": shape for name, shape in maps.items() if name not in config.blocks}
    sizes = {"query": r2, "key": r3, "output": d}
    return shapes | {f"{name}_bias": (sizes[name],) for name in config.biases}


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _triple(name: str, value: Any) -> Ranks:
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    if len(given) != 3 or not all(isinstance(r, int) and not isinstance(r, bool) for r in given):
        raise ValueError(f"{name} must be three whole numbers, one a mode, got {value!r}")
    return given[0], given[1], given[2]
