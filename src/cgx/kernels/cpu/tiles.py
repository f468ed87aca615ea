"""Codes and dither of a tile: 32 elements in four vectors, element ``i`` in lane ``i % 8`` of vector ``i // 8``.

The bits of a code are cut in parts of 8, 4, 2 and 1 (the binary digits of ``bits``), low bits first, and each part is
packed for the whole tile, so that packing needs neither shuffles nor bytes shared with another tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numpy as np

from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.floats import I32, inlined

TILE = 32


@inlined
def pack(q0, q1, q2, q3, bits, wire, at):
    """Writes the ``4 * bits`` bytes of a tile."""
    if bits == 8:
        v.store_u8(wire, at, q0)
        v.store_u8(wire, at + 8, q1)
        v.store_u8(wire, at + 16, q2)
        v.store_u8(wire, at + 24, q3)
        return
    one, two, four = v.splat_i32(I32(1)), v.splat_i32(I32(2)), v.splat_i32(I32(4))
    if bits & 4:
        v.store_u8(wire, at, (q0 & v.splat_i32(I32(15))) | (q2 << four))
        v.store_u8(wire, at + 8, (q1 & v.splat_i32(I32(15))) | (q3 << four))
        if bits == 4:
            return
        at += 16
        q0, q1, q2, q3 = q0 >> four, q1 >> four, q2 >> four, q3 >> four
    if bits & 2:
        mask = v.splat_i32(I32(3))
        lower = (q0 & mask) | ((q1 & mask) << two)
        v.store_u8(wire, at, lower | ((q2 & mask) << four) | (q3 << v.splat_i32(I32(6))))
        at += 8
        q0, q1, q2, q3 = q0 >> two, q1 >> two, q2 >> two, q3 >> two
    if bits & 1:
        v.store_nibbles(wire, at, q0 | (q1 << one) | (q2 << two) | (q3 << v.splat_i32(I32(3))))


@inlined
def unpack(wire, at, bits):
    """Reads a tile's codes as four vectors."""
    if bits == 8:
        return v.load_u8(wire, at), v.load_u8(wire, at + 8), v.load_u8(wire, at + 16), v.load_u8(wire, at + 24)
    one, two, four = v.splat_i32(I32(1)), v.splat_i32(I32(2)), v.splat_i32(I32(4))
    if bits == 4:
        a, b, mask = v.load_u8(wire, at), v.load_u8(wire, at + 8), v.splat_i32(I32(15))
        return a & mask, b & mask, a >> four, b >> four
    q0 = v.splat_i32(I32(0))
    q1, q2, q3 = q0, q0, q0
    shift = I32(0)
    if bits & 4:
        a, b, mask = v.load_u8(wire, at), v.load_u8(wire, at + 8), v.splat_i32(I32(15))
        q0, q1, q2, q3 = a & mask, b & mask, a >> four, b >> four
        at += 16
        shift = I32(4)
    if bits & 2:
        a, mask, place = v.load_u8(wire, at), v.splat_i32(I32(3)), v.splat_i32(shift)
        q0 = q0 | ((a & mask) << place)
        q1 = q1 | (((a >> two) & mask) << place)
        q2 = q2 | (((a >> four) & mask) << place)
        q3 = q3 | ((a >> v.splat_i32(I32(6))) << place)
        at += 8
        shift = I32(shift + I32(2))
    if bits & 1:
        a, place = v.load_nibbles(wire, at), v.splat_i32(shift)
        q0 = q0 | ((a & one) << place)
        q1 = q1 | (((a >> one) & one) << place)
        q2 = q2 | (((a >> two) & one) << place)
        q3 = q3 | ((a >> v.splat_i32(I32(3))) << place)
    return q0, q1, q2, q3


@inlined
def _hash(counter, word):
    """32 random bits per lane: two multiply rounds, the tile's second word between them."""
    h = (counter * v.splat_i32(I32(0x7FEB352D))) ^ word
    h = h ^ v.shift_right_logical(h, v.splat_i32(I32(15)))
    h = h * v.splat_i32(I32(-0x7B935975))  # 0x846CA68B
    return h ^ v.shift_right_logical(h, v.splat_i32(I32(16)))


@inlined
def dither(tile, key):
    """16 random bits for each element of tile number ``tile`` of a parameter.

    Each tile has two words of its own, mixed in 64-bit scalars beside the vectors. One hash serves two elements: its
    low half element ``i`` (``i < 16``), its high half element ``i + 16``.
    """
    z = key + np.uint64(tile) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    first = v.lane_numbers() + v.splat_i32(I32(np.uint32(z & np.uint64(0xFFFFFFFF))))
    word = v.splat_i32(I32(np.uint32(z >> np.uint64(32))))
    a = _hash(first, word)
    b = _hash(first + v.splat_i32(I32(8)), word)
    low, sixteen = v.splat_i32(I32(0xFFFF)), v.splat_i32(I32(16))
    return a & low, b & low, v.shift_right_logical(a, sixteen), v.shift_right_logical(b, sixteen)
