"""Vector loops that a compiler does not find by itself, written as LLVM code for numba.

Pointers are passed as integers (``array.ctypes.data``); nothing is checked here, callers own the bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SHORTS, _INTS, _FLOATS = (ir.VectorType(t, n) for t, n in ((_I8, 32), (_I16, 16), (_I32, 8), (_F32, 8)))
_FAST = ("reassoc", "nsz", "contract")


@functools.cache
def has_avx2() -> bool:
    """Whether this processor has the byte products that the ternary tiles are made of."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx2", False))


class _Code:
    """Shorthand over a builder: typed loads and stores at integer addresses, loops, constants."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, address: Any, kind: Any) -> Any:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, address: Any, value: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def at(self, base: Any, index: Any, stride: Any) -> Any:
        """``base + index * stride``."""
        stride = _I64(stride) if isinstance(stride, int) else stride
        index = _I64(index) if isinstance(index, int) else index
        return self.builder.add(base, self.builder.mul(index, stride))

    def loop(self, count: Any) -> Any:
        return cgutils.for_range(self.builder, count, intp=_I64)

    def splat(self, kind: Any, value: Any) -> Any:
        if isinstance(value, int):
            return ir.Constant(kind, [value] * kind.count)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
        zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)


@intrinsic
def transpose_8x8(typing_context, source, source_stride, target, target_stride):  # type: ignore[no-untyped-def]
    """``target[j, i] = source[i, j]`` for 8 x 8 float32; strides of the rows in bytes."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        code = _Code(builder)
        source, source_stride, target, target_stride = arguments
        rows = [code.load(code.at(source, i, source_stride), _FLOATS) for i in range(8)]
        for distance in (1, 2, 4):  # swap blocks off the diagonal, of growing size
            low = [i if not i & distance else i - distance + 8 for i in range(8)]
            high = [i + distance if not i & distance else i + 8 for i in range(8)]
            pick = [ir.Constant(ir.VectorType(_I32, 8), mask) for mask in (low, high)]
            for i in range(8):
                if not i & distance:
                    a, b = rows[i], rows[i + distance]
                    rows[i] = builder.shuffle_vector(a, b, pick[0])
                    rows[i + distance] = builder.shuffle_vector(a, b, pick[1])
        for i in range(8):
            code.store(code.at(target, i, target_stride), rows[i])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def factor_axis(typing_context, source, target, matrix, order, right):  # type: ignore[no-untyped-def]
    """``target[j, r] = sum_i source[i, r] matrix[i, j]`` for float32 [order, right] arrays; order % 4 = 0, right % 8 =
    0.

    Four outputs of eight lanes are summed in registers at a time.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        code = _Code(builder)
        source, target, matrix, order, right = arguments
        row = builder.mul(right, _I64(4))
        with code.loop(builder.udiv(right, _I64(8))) as column:
            lanes = builder.mul(column.index, _I64(32))
            first, out = builder.add(source, lanes), builder.add(target, lanes)
            with code.loop(builder.udiv(order, _I64(4))) as group:
                sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * 8)) for _ in range(4)]
                for total in sums:
                    builder.store(ir.Constant(_FLOATS, [0.0] * 8), total)
                start = code.at(matrix, group.index, 16)
                with code.loop(order) as term:
                    x = code.load(code.at(first, term.index, row), _FLOATS)
                    here = code.at(start, builder.mul(term.index, order), 4)
                    for k in range(4):
                        h = code.splat(_FLOATS, code.load(builder.add(here, _I64(4 * k)), _F32))
                        product = builder.fmul(x, h, flags=_FAST)
                        builder.store(builder.fadd(builder.load(sums[k]), product, flags=_FAST), sums[k])
                for k in range(4):
                    place = builder.add(builder.mul(group.index, _I64(4)), _I64(k))
                    code.store(code.at(out, place, row), builder.load(sums[k]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


# Products of bytes are added in 16 bits; a pair is at most 2 * 2 * 128 in size, so 60 of them fit.
_STEPS = 60
_QUARTERS = _STEPS // 4


def _make_tile(tokens: int, rows: int) -> Callable[..., Any]:
    @intrinsic
    def tile(typing_context, codes, codes_stride, packed, packed_stride, vectors, out, out_stride):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return _tile(context, builder, arguments, tokens, rows)

        return types.void(*[types.int64] * 7), generate

    return tile  # type: ignore[no-any-return]


def _tile(context: Any, builder: Any, arguments: Any, tokens: int, rows: int) -> Any:
    """``out[t, j] = sum_i k_ti u_ji``: codes k int8 against packed u = T + 1, int32; strides of tokens in bytes.

    A vector is 32 packed bytes, 128 weights. Elements 4 t + j of the codes stand at 32 j + t within each 128, so that
    shifting the bytes by 2 j lines weights and codes up, with nothing unpacked to memory.
    """
    code = _Code(builder)
    codes, codes_stride, packed, packed_stride, vectors, out, out_stride = arguments
    zero_long, zero_short = ir.Constant(_INTS, [0] * 8), ir.Constant(_SHORTS, [0] * 16)
    places = [(t, j) for t in range(tokens) for j in range(rows)]
    long = {place: cgutils.alloca_once_value(builder, zero_long) for place in places}
    short = {place: cgutils.alloca_once_value(builder, zero_short) for place in places}
    for place in places:
        builder.store(zero_long, long[place])
    three, ones = code.splat(_BYTES, 3), code.splat(_SHORTS, 1)
    quarter = _I64(_QUARTERS)
    chunks = builder.udiv(builder.add(vectors, _I64(_QUARTERS - 1)), quarter)
    with code.loop(chunks) as chunk:
        start = builder.mul(chunk.index, quarter)
        left = builder.sub(vectors, start)
        here = builder.select(builder.icmp_unsigned("<", left, quarter), left, quarter)
        for place in places:
            builder.store(zero_short, short[place])
        with code.loop(here) as step:
            vector = builder.add(start, step.index)
            offset = builder.mul(vector, _I64(32))
            at = [builder.add(code.at(packed, j, packed_stride), offset) for j in range(rows)]
            weights = [code.load(address, _BYTES) for address in at]
            first = code.at(codes, vector, 128)
            for shift in range(4):
                lined = []
                for w in weights:
                    if shift:
                        moved = builder.lshr(builder.bitcast(w, _SHORTS), code.splat(_SHORTS, 2 * shift))
                        w = builder.bitcast(moved, _BYTES)
                    lined.append(builder.and_(w, three))
                for t in range(tokens):
                    place_in = builder.add(code.at(first, t, codes_stride), _I64(32 * shift))
                    k = code.load(place_in, _BYTES)
                    for j in range(rows):
                        pairs = code.call("llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [lined[j], k])
                        builder.store(builder.add(builder.load(short[t, j]), pairs), short[t, j])
        for place in places:
            pairs = code.call("llvm.x86.avx2.pmadd.wd", _INTS, [builder.load(short[place]), ones])
            builder.store(builder.add(builder.load(long[place]), pairs), long[place])
    for t, j in places:
        total = code.call("llvm.vector.reduce.add.v8i32", _I32, [builder.load(long[t, j])])
        code.store(builder.add(code.at(out, t, out_stride), _I64(4 * j)), total)
    return context.get_dummy_value()


tile_4x2 = _make_tile(4, 2)
tile_1x4 = _make_tile(1, 4)
