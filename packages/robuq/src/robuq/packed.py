"""The layer that runs: two-bit weights, no floating point copy behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from icml26_shared.kernels import choose_path
from robuq.config import RobuQConfig
from robuq.hadamard import inverse_hadamard
from robuq.kernels.grid import Grid
from robuq.kernels.hadamard_quant import FLOATS, hadamard_quant
from robuq.kernels.packed import pack_ternary, unpack_ternary
from robuq.kernels.rotate import rotate_rows
from robuq.kernels.ternary_gemm import ternary_gemm, vector_products
from robuq.linear import RobuQLinear, Rotated
from robuq.quantizer import TokenQuantizer

CACHES = (None, "int8")
DECODE_TOKENS = 4  # up to so many, all of a layer is one call
_BLOCK = 1 << 19  # numbers of a block of weights that is unpacked at a time, where it is multiplied in floating point
_NIBBLES = TokenQuantizer(4)


class PackedLinear(Rotated):
    """A quantised linear layer for inference.

    Buffers: ``qweight`` uint8 [out, ceil(n'/4)] (two bits a weight; with ``ada_weight_bits=4`` four bits, [out,
    ceil(n'/2)]), ``alpha`` float32 [out], ``rowsum`` int32 [out], ``signs``, ``A`` [r, n'] and ``B`` [out, r] in
    bfloat16, ``bias`` [out]. Casts such as ``model.half()`` leave all but the bias as they are.

    Args:
        in_features, out_features, bias: as for ``nn.Linear``.
        config, name: as for `robuq.RobuQLinear`.
        cache: ``"int8"`` keeps the weights unpacked as well (four times the memory), which only helps processors whose
            int8 products are quick.
        branch_dtype: of A and B.
    """

    qweight: Tensor
    alpha: Tensor
    rowsum: Tensor
    A: Tensor | None
    B: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        config: RobuQConfig,
        name: str = "",
        *,
        cache: str | None = None,
        dtype: torch.dtype = torch.float32,
        branch_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(in_features, out_features, config, name)
        if cache not in CACHES:
            raise ValueError(f"cache must be None or 'int8', got {cache!r}")
        self.cache = cache
        n, r = self.recipe.padded, config.rank
        length = (n + 3) // 4 if self.ternary_weights else (n + 1) // 2
        self.register_buffer("qweight", torch.full((out_features, length), 0x55, dtype=torch.uint8))
        self.register_buffer("alpha", torch.zeros(out_features))
        self.register_buffer("rowsum", torch.zeros(out_features, dtype=torch.int32))
        self.register_buffer("A", torch.zeros(r, n, dtype=branch_dtype) if r else None)
        self.register_buffer("B", torch.zeros(out_features, r, dtype=branch_dtype) if r else None)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)
        self._unpacked: tuple[Any, Tensor] | None = None
        self._arrays: tuple[Any, Any] | None = None

    @classmethod
    @torch.no_grad()
    def from_trained(cls, layer: RobuQLinear, cache: str | None = None) -> PackedLinear:
        """The packed form of a trainable layer: the same function, up to rounding in float32."""
        double = layer.weight_rot.dtype == torch.float64
        made = cls(
            layer.in_features, layer.out_features, layer.bias is not None, layer.config, layer.name, cache=cache,
            dtype=layer.weight_rot.dtype, branch_dtype=torch.float64 if double else torch.bfloat16,
        )  # fmt: skip
        made._bits, made.unbiased = layer.bits, layer.unbiased
        if layer.ternary_weights:
            codes, alpha = layer.ternary()
            made.qweight = pack_ternary(codes)
        else:
            codes, alpha, _ = _NIBBLES.tokens(layer.weight_rot)
            made.qweight = pack_nibbles(codes)
        made.alpha, made.rowsum = alpha.float(), codes.sum(1, dtype=torch.int32)
        made.signs = None if layer.signs is None else layer.signs.clone()
        if layer.A is not None and layer.B is not None and made.A is not None and made.B is not None:
            made.A, made.B = layer.A.detach().to(made.A.dtype), layer.B.detach().to(made.B.dtype)
        if layer.bias is not None:
            made.bias = layer.bias.detach().clone()
        return made.train(layer.training)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # numba's kernels cannot be traced: a graph break here
    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch out"]:
        """``d_t alpha_j (sum_i k_ti T_ji + z r_j) + (x' A^T) B^T + c``, in x's dtype."""
        flat = self.flat(x)
        quantizer, signs = self.quantizer, self.sign_vector()
        grid = quantizer.grid if quantizer is not None else None
        if grid is not None and self.ternary_weights and self._decodes(flat):
            y = self._decode(flat, signs, grid)
        elif grid is not None and self.ternary_weights:
            codes, d, rotated = hadamard_quant(flat, self.recipe, signs, grid, keep_rotated=self.A is not None)
            y = self._integer(codes, d * grid.gain, grid.offset, rotated)
        else:
            wide = flat if flat.dtype == torch.float64 else flat.float()
            rotated = rotate_rows(wide, self.recipe, signs)
            if quantizer is not None and quantizer.kind == "minmax" and self.ternary_weights:
                y = self._integer(*quantizer.tokens(rotated), rotated)
            else:
                y = self._floating(rotated if quantizer is None else quantizer.values(rotated), rotated)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _decodes(self, flat: Tensor) -> bool:
        """Whether the kernel for few tokens takes these."""
        return (
            0 < flat.shape[0] <= DECODE_TOKENS
            and flat.dtype in FLOATS
            and (self.A is None or self.A.dtype == torch.bfloat16)
            and choose_path(flat, self.qweight) == "cpu"
            and vector_products()
        )

    def _decode(self, flat: Tensor, signs: Tensor | None, grid: Grid) -> Tensor:
        from robuq.kernels import cpu_decode

        tensors = [
            self.qweight,
            self.alpha,
            self.rowsum,
            *(t for t in (signs, self.bias, self.A, self.B) if t is not None),
        ]
        key = [(t.data_ptr(), t._version) for t in tensors]
        if self._arrays is None or self._arrays[0] != key:  # the arrays share the tensors' memory
            branch = () if self.A is None or self.B is None else (self.A, self.B)
            arrays = cpu_decode.layer_arrays(signs, self.qweight, self.alpha, self.rowsum, self.bias, branch)
            self._arrays = key, arrays
        return cpu_decode.packed_linear_cpu(flat, self.recipe, grid, self._arrays[1])

    def _integer(self, codes: Tensor, d: Tensor, offset: Tensor | float, rotated: Tensor | None) -> Tensor:
        inner = None if self.A is None or rotated is None else F.linear(rotated.float(), self.A.float())
        weights = (self.qweight, self.alpha, self.rowsum)
        return ternary_gemm(
            codes, d, *weights, offset=offset, bias=self.bias, inner=inner, outer=self.B, unpacked=self._int8()
        )

    def _floating(self, values: Tensor, rotated: Tensor) -> Tensor:
        """Weights unpacked block by block: for quantisers without a grid, and for 4-bit weights."""
        y = values.new_empty(values.shape[0], self.out_features)
        rows = max(1, _BLOCK // self.recipe.padded)
        for start in range(0, self.out_features, rows):
            part = slice(start, start + rows)
            y[:, part] = values @ self.quantised_rows(part).to(values.dtype).T
        if self.A is not None and self.B is not None:
            y += (rotated @ self.A.to(y.dtype).T) @ self.B.to(y.dtype).T
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def quantised_rows(self, rows: slice = slice(None)) -> Float[Tensor, "rows n"]:
        """Rows of ``Qw(W')`` in float32."""
        if self.ternary_weights:
            codes = unpack_ternary(self.qweight[rows], self.recipe.padded).float()
        else:
            codes = unpack_nibbles(self.qweight[rows], self.recipe.padded).float() + 0.5
        return codes * self.alpha[rows, None]

    def codes(self) -> Tensor:
        """T int8 [out, n'] (4-bit weights: -8 to 7)."""
        unpack = unpack_ternary if self.ternary_weights else unpack_nibbles
        return unpack(self.qweight, self.recipe.padded)

    @property
    def weight(self) -> Float[Tensor, "out n"]:
        """The weight in the original basis, ``(alpha T + B A) H^T D``, float32. Made on each call, and not kept."""
        total = self.quantised_rows()
        if self.A is not None and self.B is not None:
            total = total + self.B.float() @ self.A.float()
        return inverse_hadamard(total, self.recipe, self.sign_vector())

    def _int8(self) -> Tensor | None:
        if self.cache is None:
            return None
        key = (self.qweight.data_ptr(), self.qweight._version, self.qweight.device)
        if self._unpacked is None or self._unpacked[0] != key:
            self._unpacked = (key, unpack_ternary(self.qweight, self.recipe.padded).contiguous())
        return self._unpacked[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_unpacked": None, "_arrays": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        kept = {name: getattr(self, name) for name in ("alpha", "A", "B") if getattr(self, name) is not None}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 -8 to 7 [out, n] as uint8 [out, ceil(n/2)], element i in bits 4 (i % 2) of byte i // 2, offset by 8."""
    shifted = F.pad((codes + 8).to(torch.uint8), (0, codes.shape[1] % 2))
    return shifted[:, ::2] | shifted[:, 1::2] << 4


def unpack_nibbles(packed: Tensor, n: int) -> Tensor:
    """int8 [out, n] of :func:`pack_nibbles`."""
    both = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return both[:, :n].to(torch.int8) - 8


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is one of this package's layers."""
    return isinstance(module, Rotated)
