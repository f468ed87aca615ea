"""Eight-lane vectors for Numba: the kernels say which vectors they mean, on every instruction set.

Numba leaves vectorising to LLVM's loop passes, which unroll short loops into scalar code before they look at them
(docs/adr/0003). Here a vector is a value: LLVM maps its eight lanes to whatever registers the processor has (one
AVX2, two NEON or SSE), and the arithmetic stays plain IEEE: no contraction, no reassociation.

Inside a jitted function ``F32x8`` and ``I32x8`` values support ``+ - *`` and, for integers, ``& | ^ << >>``
(``>>`` is arithmetic). Memory is read and written through ``pointer(array)``, because passing arrays between jitted
functions counts references, which costs more than the arithmetic. Offsets are in elements and are not checked: the
caller owns the bounds and the memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

LANES = 8
_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


@final
class Vector(types.Type):
    """The Numba type of eight float32 or int32 lanes."""

    def __init__(self, name: str, element: ir.Type) -> None:
        super().__init__(name=name)
        self.llvm = ir.VectorType(element, LANES)


F32x8 = Vector("f32x8", _F32)
I32x8 = Vector("i32x8", _I32)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def _binary(op: Any, builders: dict[Vector, str]) -> None:
    """Teaches Numba that ``op`` on two equal vectors is one LLVM instruction."""

    @infer_global(op)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and args[0] in builders and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    for vector, instruction in builders.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, name: str = instruction) -> Any:
            return getattr(builder, name)(*args)

        lower_builtin(op, vector, vector)(lower)


_binary(operator.add, {F32x8: "fadd", I32x8: "add"})
_binary(operator.sub, {F32x8: "fsub", I32x8: "sub"})
_binary(operator.mul, {F32x8: "fmul", I32x8: "mul"})
_binary(operator.and_, {I32x8: "and_"})
_binary(operator.or_, {I32x8: "or_"})
_binary(operator.xor, {I32x8: "xor"})
_binary(operator.lshift, {I32x8: "shl"})
_binary(operator.rshift, {I32x8: "ashr"})


def _vector(element: ir.Type, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _constant(value: int, lanes: int) -> Any:
    return ir.Constant(_vector(_I32, lanes), [ir.Constant(_I32, value)] * lanes)


def _lanes(first: int, stop: int) -> Any:
    numbers = [ir.Constant(_I32, i) for i in range(first, stop)]
    return ir.Constant(_vector(_I32, stop - first), numbers)


@intrinsic
def pointer(typing_context: Any, array: Any) -> Any:
    """Address of an array's first element, typed by its dtype."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def prefetch(typing_context: Any, base: Any, offset: Any) -> Any:
    """Asks for the cache line of ``base[offset]``; any address is allowed."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, second_level, data = (ir.Constant(_I32, k) for k in (0, 2, 1))
        address = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        builder.call(function, [address, read, second_level, data])
        return context.get_dummy_value()

    return types.void(base, types.int64), generate


def _address(builder: Any, args: Any, memory: ir.Type) -> Any:
    """``base + offset`` as a pointer to the vector or word type ``memory``."""
    return builder.bitcast(builder.gep(args[0], [args[1]]), memory.as_pointer())


def _load(result: Vector, memory: ir.Type, doc: str, convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def load(typing_context: Any, base: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            address = _address(builder, args, memory)
            return convert(builder, builder.load(address, align=1))

        return result(base, types.int64), generate

    load.__doc__ = doc
    return intrinsic(load)


def _store(vector: Vector, memory: ir.Type, doc: str, convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def store(typing_context: Any, base: Any, offset: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            address = _address(builder, args, memory)
            builder.store(convert(builder, args[2]), address, align=1)
            return context.get_dummy_value()

        return types.void(base, types.int64, vector), generate

    store.__doc__ = doc
    return intrinsic(store)


def _same(builder: Any, value: Any) -> Any:
    return value


def _widen(builder: Any, value: Any) -> Any:
    return builder.zext(value, I32x8.llvm)


def _narrow(element: ir.Type) -> Callable[[Any, Any], Any]:
    return lambda builder, value: builder.trunc(value, ir.VectorType(element, LANES))


def _split_nibbles(builder: Any, four_bytes: Any) -> Any:
    value = builder.zext(four_bytes, _vector(_I32, 4))
    low = builder.and_(value, _constant(15, 4))
    return builder.shuffle_vector(low, builder.lshr(value, _constant(4, 4)), _lanes(0, LANES))


def _join_nibbles(builder: Any, value: Any) -> Any:
    low = builder.shuffle_vector(value, value, _lanes(0, 4))
    high = builder.shuffle_vector(value, value, _lanes(4, 8))
    return builder.trunc(builder.or_(low, builder.shl(high, _constant(4, 4))), _vector(_I8, 4))


load_f32 = _load(F32x8, _vector(_F32, LANES), "Lanes ``base[offset:offset + 8]`` of float32.", _same)
load_i32 = _load(I32x8, _vector(_I32, LANES), "Lanes ``base[offset:offset + 8]`` of int32.", _same)
load_u8 = _load(I32x8, _vector(_I8, LANES), "Eight bytes, widened with zeros.", _widen)
load_nibbles = _load(
    I32x8, _vector(_I8, 4), "Four bytes: low halves in lanes 0-3, high halves in lanes 4-7.", _split_nibbles
)
store_f32 = _store(F32x8, _vector(_F32, LANES), "Writes eight float32 elements.", _same)
store_u8 = _store(I32x8, _vector(_I8, LANES), "Writes the low byte of each lane.", _narrow(_I8))
store_nibbles = _store(
    I32x8, _vector(_I8, 4), "Writes four bytes from eight 4-bit lanes, inverse of load_nibbles.", _join_nibbles
)


def _unary(argument: Any, result: Any, build: Callable[[Any, Any], Any], doc: str) -> Callable[..., Any]:
    def function(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return build(builder, args[0])

        return result(argument), generate

    function.__doc__ = doc
    return intrinsic(function)


def _splat(vector: Vector) -> Callable[[Any, Any], Any]:
    def build(builder: Any, scalar: Any) -> Any:
        first = builder.insert_element(ir.Constant(vector.llvm, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return builder.shuffle_vector(first, first, ir.Constant(I32x8.llvm, None))

    return build


def _reduce(name: str) -> Callable[[Any, Any], Any]:
    def build(builder: Any, value: Any) -> Any:
        kind = ir.FunctionType(_I32, [I32x8.llvm])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v8i32")
        return builder.call(function, [value])

    return build


splat_f32 = _unary(types.float32, F32x8, _splat(F32x8), "The same float32 in every lane.")
splat_i32 = _unary(types.int32, I32x8, _splat(I32x8), "The same int32 in every lane.")
to_i32 = _unary(F32x8, I32x8, lambda b, v: b.fptosi(v, I32x8.llvm), "Truncates towards zero.")
to_f32 = _unary(I32x8, F32x8, lambda b, v: b.sitofp(v, F32x8.llvm), "Rounds to nearest even.")
bits_of = _unary(F32x8, I32x8, lambda b, v: b.bitcast(v, I32x8.llvm), "IEEE bits of each lane.")
from_bits = _unary(I32x8, F32x8, lambda b, v: b.bitcast(v, F32x8.llvm), "Inverse of bits_of.")
lowest = _unary(I32x8, types.int32, _reduce("smin"), "Smallest lane.")
highest = _unary(I32x8, types.int32, _reduce("smax"), "Largest lane.")
bits_of_scalar = _unary(types.float32, types.int32, lambda b, v: b.bitcast(v, _I32), "IEEE bits.")
scalar_from_bits = _unary(types.int32, types.float32, lambda b, v: b.bitcast(v, _F32), "IEEE value.")


def _scalar_load(memory: ir.Type, result: Any, doc: str) -> Callable[..., Any]:
    def load(typing_context: Any, base: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_address(builder, args, memory), align=1)
            return value if memory is _I32 else builder.zext(value, _I32)

        return result(base, types.int64), generate

    load.__doc__ = doc
    return intrinsic(load)


def _scalar_store(memory: ir.Type, doc: str) -> Callable[..., Any]:
    def store(typing_context: Any, base: Any, offset: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            address = _address(builder, args, memory)
            word = args[2] if memory is _I32 else builder.trunc(args[2], memory)
            builder.store(word, address, align=1)
            return context.get_dummy_value()

        return types.void(base, types.int64, types.int32), generate

    store.__doc__ = doc
    return intrinsic(store)


word_at = _scalar_load(_I32, types.int32, "Four bytes of a byte array as int32.")
half_word_at = _scalar_load(_I16, types.int32, "Two bytes of a byte array, widened with zeros.")
put_word = _scalar_store(_I32, "Writes four bytes into a byte array.")
put_half_word = _scalar_store(_I16, "Writes the low two bytes of a word into a byte array.")


def _ordered(vector: Vector, compare: str, predicate: str, doc: str) -> Callable[..., Any]:
    def function(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first = getattr(builder, compare)(predicate, *args)
            return builder.select(first, *args)

        return vector(vector, vector), generate

    function.__doc__ = doc
    return intrinsic(function)


min_f32 = _ordered(F32x8, "fcmp_ordered", "<", "Lane-wise ``a if a < b else b``.")
min_i32 = _ordered(I32x8, "icmp_signed", "<", "Lane-wise minimum of signed integers.")
max_i32 = _ordered(I32x8, "icmp_signed", ">", "Lane-wise maximum of signed integers.")


@intrinsic
def select_less(typing_context: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """Lane-wise ``then if a < b else otherwise`` on signed integers."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[2], args[3])

    return I32x8(I32x8, I32x8, I32x8, I32x8), generate


@intrinsic
def shift_right_logical(typing_context: Any, value: Any, count: Any) -> Any:
    """Lane-wise ``value >> count`` with zeros shifted in."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.lshr(*args)

    return I32x8(I32x8, I32x8), generate


@intrinsic
def lane_numbers(typing_context: Any) -> Any:
    """Lanes 0, 1, ... 15."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _lanes(0, LANES)

    return I32x8(), generate
