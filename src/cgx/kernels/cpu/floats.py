"""fp32 tiles from and to gradients of any dtype, eight elements at a time.

The dtype behind a pointer names the format it carries: float32 itself, int16 for IEEE half, uint16 for bfloat16
(NumPy has no bfloat16, and Numba no half).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.simd import F32x8, I32x8

jit = njit(nogil=True, cache=True, error_model="numpy")
inlined = njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
I32, F32 = np.int32, np.float32
INF_BITS, ABS_MASK = I32(0x7F800000), I32(0x7FFFFFFF)


_HALVES = ir.VectorType(ir.HalfType(), v.LANES)
_WORDS = ir.VectorType(ir.IntType(16), v.LANES)


def _splat(value: int) -> Any:
    return ir.Constant(I32x8.llvm, [ir.Constant(ir.IntType(32), value)] * v.LANES)


def _widen(builder: Any, dtype: Any, address: Any) -> Any:
    """Eight elements of ``dtype`` at ``address`` as float32 lanes."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(address, F32x8.llvm.as_pointer()), align=1)
    if dtype == types.int16:
        halves = builder.load(builder.bitcast(address, _HALVES.as_pointer()), align=1)
        return builder.fpext(halves, F32x8.llvm)
    words = builder.load(builder.bitcast(address, _WORDS.as_pointer()), align=1)
    return builder.bitcast(builder.shl(builder.zext(words, I32x8.llvm), _splat(16)), F32x8.llvm)


def _round(builder: Any, dtype: Any, lanes: Any) -> Any:
    """Float32 lanes as elements of ``dtype``, nearest even; a bfloat16 NaN keeps its sign and becomes quiet."""
    if dtype == types.float32:
        return lanes
    if dtype == types.int16:
        return builder.fptrunc(lanes, _HALVES)
    bits = builder.bitcast(lanes, I32x8.llvm)
    upper = builder.lshr(bits, _splat(16))
    bias = builder.add(builder.and_(upper, _splat(1)), _splat(0x7FFF))
    rounded = builder.lshr(builder.add(bits, bias), _splat(16))
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    chosen = builder.select(is_nan, builder.or_(upper, _splat(0x40)), rounded)
    return builder.trunc(chosen, _WORDS)


@intrinsic
def load(typing_context: Any, base: Any, offset: Any) -> Any:
    """Eight elements from ``base[offset]`` as fp32 lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _widen(builder, sig.args[0].dtype, builder.gep(args[0], [args[1]]))

    return F32x8(base, types.int64), generate


@intrinsic
def store(typing_context: Any, base: Any, offset: Any, lanes: Any) -> Any:
    """Rounds eight fp32 lanes to the format of ``base``, nearest even, and writes them at ``offset``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = _round(builder, sig.args[0].dtype, args[2])
        address = builder.bitcast(builder.gep(args[0], [args[1]]), value.type.as_pointer())
        builder.store(value, address, align=1)
        return context.get_dummy_value()

    return types.void(base, types.int64, F32x8), generate
