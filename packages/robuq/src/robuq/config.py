"""What is quantised and how: one frozen, JSON-able configuration, and presets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

from robuq.hadamard import FALLBACKS, Fallback
from robuq.quantizer import KINDS, STES, ActBits, Kind, Ste, TokenQuantizer, check_act_bits
from robuq.ternary import WEIGHT_SCALES, Granularity, WeightScale

GAINS = ("mse", "unbiased", "auto")


@dataclass(frozen=True)
class RobuQConfig:
    """Settings of a quantised model.

    Attributes:
        act_bits: bits of the activations: 1 to 8, ``"ternary"``, 16 (not quantised), or a mapping from layer names or
            patterns to these, in which the first match wins.
        quantizer: see `robuq.quantizer.TokenQuantizer`.
        gain: ``"mse"`` (the paper's, for training), ``"unbiased"``, or ``"auto"``: whichever gives outputs nearer to
            the unquantised ones on the calibration data that `robuq.quantize` and `robuq.from_pretrained` are given.
        weight_scale: ``"absmean"`` (the paper's, for training), ``"gauss"`` (best without training) or ``"ls"``.
        weight_gain: ``"mse"`` or ``"unbiased"``, for ``"gauss"`` weights; None does as ``gain`` says.
        granularity: one weight scale a ``"channel"``, or a ``"tensor"`` as BitNet has it.
        rank: rank of the low-rank branch; 0 for none.
        rotation: ``"hadamard"``, or ``"none"`` for comparisons.
        signs: ``"random"`` signs before the transform, or ``"none"`` as in the paper.
        seed: seed of the signs.
        ada_bits: activation bits of adaLN modulation layers.
        ada_weight_bits: their weights: ``"ternary"`` or 4.
        attn_bits: 8 quantises the attention's two products, None leaves them.
        include: names or patterns of layers to quantise; matched against the whole name and its last part.
        exclude: the same for layers to leave; wins over ``include``.
        ada: patterns of adaLN modulation layers; ``exclude`` wins.
        fallback: for widths without a factorisation, see `robuq.hadamard.rotation`.
        ste: ``"clipped"`` or ``"identity"``.
        untie: quantise layers whose weight another module shares, untying it; otherwise they are left, with a warning.
        check: raise FloatingPointError, naming the layer, when a layer is fed NaN or infinity.
    """

    act_bits: ActBits | Mapping[str, ActBits] = 4
    quantizer: Kind = "gauss_uniform"
    gain: Literal["mse", "unbiased", "auto"] = "mse"
    weight_scale: WeightScale = "absmean"
    weight_gain: Literal["mse", "unbiased"] | None = None
    granularity: Granularity = "channel"
    rank: int = 16
    rotation: Literal["hadamard", "none"] = "hadamard"
    signs: Literal["random", "none"] = "random"
    seed: int = 0
    ada_bits: ActBits = 4
    ada_weight_bits: Literal["ternary", 4] = "ternary"
    attn_bits: Literal[8] | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ("*embed*", "*norm*", "final_layer*", "lm_head", "proj_out")
    ada: tuple[str, ...] = ("*adaLN*",)
    fallback: Fallback = "pad"
    ste: Ste = "clipped"
    untie: bool = False
    check: bool = field(default=False)

    def __post_init__(self) -> None:
        bits = self.act_bits
        if isinstance(bits, Mapping):
            if not bits:
                raise ValueError("act_bits is an empty mapping; give bits for at least one layer or pattern")
            object.__setattr__(self, "act_bits", {str(k): check_act_bits(v) for k, v in bits.items()})
        else:
            check_act_bits(bits)
        check_act_bits(self.ada_bits)
        for name in ("include", "exclude", "ada"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise ValueError(f"{name} is a tuple of patterns, got the string {patterns!r}")
            object.__setattr__(self, name, tuple(patterns))
        for name, allowed in (
            ("quantizer", KINDS),
            ("gain", GAINS),
            ("weight_scale", WEIGHT_SCALES),
            ("weight_gain", ("mse", "unbiased", None)),
            ("granularity", ("channel", "tensor")),
            ("rotation", ("hadamard", "none")),
            ("signs", ("random", "none")),
            ("ada_weight_bits", ("ternary", 4)),
            ("attn_bits", (8, None)),
            ("fallback", FALLBACKS),
            ("ste", STES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"rank must be a whole number of at least 0, got {self.rank!r}")

    @property
    def weight_unbiased(self) -> bool:
        """Whether Gaussian ternary levels are divided by ``1 - NMSE``."""
        return (self.weight_gain or self.gain) == "unbiased"

    def matches(self, name: str) -> bool:
        """Whether a layer of this qualified name is to be quantised."""
        if _any(self.exclude, name):
            return False
        return _any(self.include, name) or _any(self.ada, name)

    def is_ada(self, name: str) -> bool:
        """Whether it is an adaLN modulation layer."""
        return _any(self.ada, name)

    def bits_of(self, name: str) -> ActBits:
        """Activation bits of a layer.

        Raises:
            ValueError: ``act_bits`` is a mapping without a match.
        """
        if self.is_ada(name):
            return self.ada_bits
        if not isinstance(self.act_bits, Mapping):
            return self.act_bits
        for pattern, bits in self.act_bits.items():
            if _any((pattern,), name):
                return bits
        raise ValueError(f"act_bits has no entry for the layer {name!r}; add it, or the pattern '*'")

    def token_quantizer(self, bits: ActBits, *, unbiased: bool) -> TokenQuantizer | None:
        """The quantiser of a layer at these bits; None for 16."""
        return _token_quantizer(bits, self.quantizer, unbiased, self.ste)

    def replace(self, **changes: Any) -> RobuQConfig:
        """A copy with changes."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        plain = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | str) -> RobuQConfig:
        """What :meth:`to_json` gave, or its text.

        Raises:
            ValueError: unknown fields or values that are not allowed.
        """
        plain = dict(json.loads(kept) if isinstance(kept, str) else kept)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise ValueError(f"unknown setting(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**plain)

    @classmethod
    def for_dit(cls, **changes: Any) -> RobuQConfig:
        """Diffusion transformers (DiT, diffusers' DiTTransformer2DModel): attention at 8 bits, adaLN ternary at A4."""
        base = cls(
            attn_bits=8,
            exclude=("*embed*", "final_layer*", "proj_out*", "norm_out*", "*norm1.emb.*"),
            ada=("*adaLN*", "*norm1.linear"),
        )
        return base.replace(**changes)

    @classmethod
    def for_vit(cls, **changes: Any) -> RobuQConfig:
        """Vision transformers, without training: Gaussian weight levels, gain by calibration."""
        return cls.ptq(exclude=("*embed*", "*norm*", "head", "head.*", "classifier", "fc_norm"), **changes)

    @classmethod
    def for_llm(cls, **changes: Any) -> RobuQConfig:
        """Language models and encoders, without training: Gaussian weight levels, gain by calibration."""
        exclude = ("*embed*", "*norm*", "lm_head", "embed_out", "*classifier*", "pooler*", "*score*")
        return cls.ptq(exclude=exclude, **changes)

    @classmethod
    def ptq(cls, **changes: Any) -> RobuQConfig:
        """What quantisation without training should use."""
        return cls(**{"gain": "auto", "weight_scale": "gauss", "weight_gain": "unbiased", **changes})


@lru_cache(maxsize=256)
def _token_quantizer(bits: ActBits, kind: Kind, unbiased: bool, ste: Ste) -> TokenQuantizer | None:
    # one object for each, as a layer asks at every call
    return None if bits == 16 else TokenQuantizer(bits, kind, unbiased, ste)


def _any(patterns: tuple[str, ...], name: str) -> bool:
    last = name.rpartition(".")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(last, pattern) for pattern in patterns)
