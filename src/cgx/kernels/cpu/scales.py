"""The ``(low, step)`` of a block: found, rounded outward, written and read."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numpy as np

from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.floats import ABS_MASK, F32, I32, INF_BITS, inlined, jit, load, store

_MINUS_INF_KEY = I32(-0x7F800001)
_MIN_STEP = F32(2.0**-110)
_UPPER = I32(-65536)


@inlined
def range_keys(block, offset, n):
    """Smallest and largest element as order-preserving integers: exact for -0.0, and NaN sorts outside infinity."""
    low, high = v.splat_i32(ABS_MASK), v.splat_i32(-ABS_MASK)
    for i in range(0, n, 8):
        bits = v.bits_of(load(block, offset + i))
        key = bits ^ ((bits >> v.splat_i32(I32(31))) & v.splat_i32(ABS_MASK))
        low, high = v.min_i32(low, key), v.max_i32(high, key)
    return v.lowest(low), v.highest(high)


@inlined
def scaled_range_keys(block, offset, n, factor):
    """``block[offset:offset + n] *= factor``, then its range, in one pass."""
    low, high = v.splat_i32(ABS_MASK), v.splat_i32(-ABS_MASK)
    for i in range(offset, offset + n, 8):
        lanes = load(block, i) * factor
        store(block, i, lanes)
        bits = v.bits_of(lanes)
        key = bits ^ ((bits >> v.splat_i32(I32(31))) & v.splat_i32(ABS_MASK))
        low, high = v.min_i32(low, key), v.max_i32(high, key)
    return v.lowest(low), v.highest(high)


@inlined
def _value_of(key):
    """The float behind an order-preserving integer; -0.0 becomes 0.0."""
    return v.scalar_from_bits(I32(key ^ ((key >> I32(31)) & ABS_MASK))) + F32(0)


@jit
def block_scale(low_key, high_key, top, wide):
    """``(low, step)`` as the wire holds them, rounded outward; (nan, nan) poisons the block."""
    nan = F32(np.nan)
    if low_key <= _MINUS_INF_KEY or high_key >= INF_BITS:
        return nan, nan
    low, high = _value_of(low_key), _value_of(high_key)
    if not wide:
        bits = v.bits_of_scalar(low)
        below = I32(bits >> I32(31)) & I32(0xFFFF)  # negative: away from zero is down
        low = v.scalar_from_bits(I32(I32(bits + below) & _UPPER))
    width = high - low
    if width == F32(0):
        return low, F32(0)
    step = width / top
    # No branches below: whether a quotient was rounded down is a coin toss that no predictor wins.
    bits = I32(v.bits_of_scalar(step) + I32(step * top < width))
    bits = max(bits, v.bits_of_scalar(_MIN_STEP))
    if not wide:
        bits = I32(I32(bits + I32(0xFFFF)) & _UPPER)
    if bits >= INF_BITS or (v.bits_of_scalar(low) & ABS_MASK) >= INF_BITS:
        return nan, nan
    return low, v.scalar_from_bits(bits)


@inlined
def put_scale(wire, at, low, step, wide):
    """Writes a block's pair at byte ``at``, in fp32 (``wide``) or bf16."""
    # A NaN is written as one canonical pattern, whatever the processor made of it.
    low_bits, step_bits = v.bits_of_scalar(low), v.bits_of_scalar(step)
    if step != step:
        low_bits, step_bits = I32(0x7FC00000), I32(0x7FC00000)
    if wide:
        v.put_word(wire, at, low_bits)
        v.put_word(wire, at + 4, step_bits)
    else:
        v.put_half_word(wire, at, I32(low_bits >> I32(16)))
        v.put_half_word(wire, at + 2, I32(step_bits >> I32(16)))


@inlined
def get_scale(wire, at, wide):
    """Reads what put_scale wrote."""
    if wide:
        return v.scalar_from_bits(v.word_at(wire, at)), v.scalar_from_bits(v.word_at(wire, at + 4))
    return (
        v.scalar_from_bits(I32(v.half_word_at(wire, at) << I32(16))),
        v.scalar_from_bits(I32(v.half_word_at(wire, at + 2) << I32(16))),
    )
