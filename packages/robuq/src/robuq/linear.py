"""The trainable layer: ``Y = Qa(X') Qw(W')^T + (X' A^T) B^T + c`` with ``X' = X D H``, ``W' = W D H``.

RobuQ (arXiv 2509.23582): rotated on the input side, ternary weights, per-token activations, and a low-rank branch in
full precision that reads the unquantised rotated token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from robuq.config import RobuQConfig
from robuq.hadamard import Rotation, inverse_hadamard, random_signs, rotation, unpack_signs
from robuq.kernels.rotate import rotate
from robuq.lowrank import lowrank_factors
from robuq.quantizer import ActBits, TokenQuantizer, check_act_bits, check_finite
from robuq.ternary import TernaryWeight, ternarize


def layer_rotation(width: int, config: RobuQConfig) -> Rotation:
    """The rotation of a layer; with ``rotation="none"`` the identity."""
    if config.rotation == "none":
        return Rotation(width, width, max(width, 1), (), 0)
    return rotation(width, config.fallback)


class Rotated(nn.Module):
    """What the trainable and the packed layer share: shapes, rotation, signs, bits.

    Buffers: ``signs`` uint8 [ceil(n/8)], packed bits (absent without signs).
    """

    signs: Tensor | None
    bias: Any

    def __init__(self, in_features: int, out_features: int, config: RobuQConfig, name: str) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"a layer needs at least one input and one output, got {in_features} and {out_features}")
        self.in_features, self.out_features, self.config, self.name = in_features, out_features, config, name
        self.recipe = layer_rotation(in_features, config)
        self.is_ada = config.is_ada(name)
        self._bits = config.bits_of(name)
        self.unbiased = config.gain == "unbiased"
        random = config.rotation == "hadamard" and config.signs == "random"
        packed = torch.from_numpy(random_signs(in_features, name, config.seed)) if random else None
        self.register_buffer("signs", packed)
        self._expanded: tuple[Any, Tensor] | None = None

    @property
    def bits(self) -> ActBits:
        """Activation bits: 1 to 8, ``"ternary"``, or 16; can be set at any time."""
        return self._bits

    @bits.setter
    def bits(self, value: ActBits) -> None:
        self._bits = check_act_bits(value)

    @property
    def quantizer(self) -> TokenQuantizer | None:
        """The token quantiser at the present bits; None at 16."""
        return self.config.token_quantizer(self._bits, unbiased=self.unbiased)

    @property
    def ternary_weights(self) -> bool:
        """False for adaLN layers with ``ada_weight_bits=4``."""
        return not (self.is_ada and self.config.ada_weight_bits == 4)

    def sign_vector(self) -> Tensor | None:
        """float32 +-1 [n]; expanded once for each state of the buffer."""
        if self.signs is None:
            return None
        key = (self.signs.data_ptr(), self.signs._version, self.signs.device)
        if self._expanded is None or self._expanded[0] != key:
            self._expanded = (key, unpack_signs(self.signs, self.in_features))
        return self._expanded[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_expanded": None}

    def flat(self, x: Tensor) -> Tensor:
        """Tokens [m, n] of any input [..., n].

        Raises:
            ValueError: another last axis, or no axis.
            TypeError: not floating point.
            FloatingPointError: values that are not finite, with ``config.check``.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            where = f" ({self.name})" if self.name else ""
            raise ValueError(f"the last axis must have length {self.in_features}, got shape {tuple(x.shape)}{where}")
        if not x.is_floating_point():
            raise TypeError(f"the layer takes floating point tensors, got {x.dtype}")
        if self.config.check:
            check_finite(x, self.name or type(self).__name__)
        return x.reshape(-1, self.in_features)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        rank = f", rank={self.config.rank}" if self.config.rank else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}{rank}"


class RobuQLinear(Rotated):
    """A linear layer that trains with ternary weights and quantised activations.

    Parameters: ``weight_rot`` [out, n'] (rotated), ``A`` [r, n'] and ``B`` [out, r] of the low-rank branch (absent for
    rank 0), ``bias`` [out]. In float32 the forward pass sees A and B rounded to bfloat16, straight through: so they
    are stored, and what is trained is what runs.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``.
        config: settings; ``config.bits_of(name)`` gives the activation bits.
        name: the layer's qualified name: signs depend on it.
    """

    A: nn.Parameter | None
    B: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, config: RobuQConfig | None = None, name: str = ""
    ) -> None:
        super().__init__(in_features, out_features, config or RobuQConfig(), name)
        linear = nn.Linear(in_features, out_features, bias)
        self._adopt(linear)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: RobuQConfig | None = None, name: str = "") -> RobuQLinear:
        """The quantised layer of a trained one: rotated, with the branch from the SVD of what is left out."""
        made = cls.__new__(cls)
        Rotated.__init__(made, linear.in_features, linear.out_features, config or RobuQConfig(), name)
        made._adopt(linear)
        return made.train(linear.training)

    def _adopt(self, linear: nn.Linear) -> None:
        weight = linear.weight
        if self.signs is not None:
            self.signs = self.signs.to(weight.device)
        with torch.no_grad():
            rotated = rotate(weight.detach(), self.recipe, self.sign_vector())
        self.weight_rot = nn.Parameter(rotated.contiguous(), requires_grad=weight.requires_grad)
        self.A = self.B = None
        if self.config.rank:
            with torch.no_grad():
                a, b = lowrank_factors(rotated - self.quantised_weight().detach(), self.config.rank)
            self.A = nn.Parameter(a, requires_grad=weight.requires_grad)
            self.B = nn.Parameter(b, requires_grad=weight.requires_grad)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)

    def quantised_weight(self) -> Float[Tensor, "out n"]:
        """``Qw(W')`` with the straight-through gradient."""
        config = self.config
        if self.ternary_weights:
            args = (config.weight_scale, config.granularity, config.weight_unbiased)
            return TernaryWeight.apply(self.weight_rot, *args)  # type: ignore[no-any-return, no-untyped-call]
        return TokenQuantizer(4, ste="identity").straight_through(self.weight_rot).to(self.weight_rot.dtype)

    def branch(self) -> tuple[Tensor, Tensor] | None:
        """A and B as the forward pass sees them, or None."""
        if self.A is None or self.B is None:
            return None
        return _round_bfloat16(self.A), _round_bfloat16(self.B)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # numba's kernels cannot be traced: a graph break here
    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch out"]:
        """``Qa(x') Qw(W')^T + (x' A^T) B^T + c``, of x's dtype (autocast's, where that is on)."""
        flat, branch = self.flat(x), self.branch()
        dtype, quantizer = self.weight_rot.dtype, self.quantizer
        if quantizer is None:
            rotated: Tensor | None = rotate(flat.to(dtype), self.recipe, self.sign_vector())
            values = rotated
        else:
            rotated, values = quantizer.rotated(flat, self.recipe, self.sign_vector(), keep_rotated=branch is not None)
        if values is None:
            raise RuntimeError("the quantiser gave no values")
        y = F.linear(values.to(dtype), self.quantised_weight(), self.bias)
        if branch is not None and rotated is not None:
            y = y + F.linear(F.linear(rotated.to(dtype), branch[0]), branch[1])
        if not torch.is_autocast_enabled(x.device.type):
            y = y.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def ternary(self) -> tuple[Tensor, Tensor]:
        """``T`` int8 [out, n'] and ``alpha`` float32 [out]."""
        config = self.config
        return ternarize(
            self.weight_rot, config.weight_scale, granularity=config.granularity, unbiased=config.weight_unbiased
        )

    @property
    def weight(self) -> Float[Tensor, "out n"]:
        """The weight that this layer stands for, in the original basis: ``(Qw(W') + B A) H^T D``. Made on each call."""
        with torch.no_grad():
            total, branch = self.quantised_weight(), self.branch()
            if branch is not None:
                total = total + branch[1] @ branch[0]
            return inverse_hadamard(total, self.recipe, self.sign_vector())


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor):  # type: ignore[no-untyped-def]
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def, override]
        return grad


def _round_bfloat16(x: Tensor) -> Tensor:
    return _Rounded.apply(x) if x.dtype == torch.float32 else x  # type: ignore[no-any-return, no-untyped-call]
