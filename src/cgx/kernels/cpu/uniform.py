"""Numba kernels of the uniform quantizer; ``kernels/reference.py`` defines every byte they write.

A row is a run of blocks of one parameter. Its payload is a ``(low, step)`` pair per block, then the codes, packed in
tiles of 32 elements. A kernel walks rows ``[first, stop)`` of a segment table, so that threads can share one call.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numpy as np

from cgx.core.segments import BUFFER, NUMEL, PARAMETER, START, STATE, WIRE
from cgx.kernels.cpu import simd as v
from cgx.kernels.cpu.floats import F32, I32, inlined, jit, load, store
from cgx.kernels.cpu.runs import add_run, keep_residual, load_run, store_run
from cgx.kernels.cpu.scales import block_scale, get_scale, put_scale, range_keys, scaled_range_keys
from cgx.kernels.cpu.tiles import TILE, dither, pack, unpack

BITS, BLOCK, ROUNDING, WIDE = range(4)  # layout of a spec as a tuple of integers
NEAREST, STOCHASTIC, DITHERED = range(3)

_HALF_CODE = I32(32768)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Typed, because Numba compiles a function anew for every literal argument.
_ZERO, _TILE, _NO, _ONE = np.int64(0), np.int64(TILE), np.bool_(False), F32(1)


@jit
def payload_key(key, stream):
    """``core.random.payload_keys`` for one parameter."""
    z = key + np.uint64(stream + 1) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inlined
def _code(block, offset, low, inverse, top, noise):
    fixed = v.to_i32(v.min_f32((load(block, offset) - low) * inverse, top))
    return (fixed + noise) >> v.splat_i32(I32(16))


@inlined
def _value(code, noise, low, step16):
    return low + v.to_f32((code << v.splat_i32(I32(16))) - noise) * step16


@inlined
def _encode_tile(block, at, low, inverse, top, noise, bits, wire, codes_at):
    n0, n1, n2, n3 = noise
    q0 = _code(block, at, low, inverse, top, n0)
    q1 = _code(block, at + 8, low, inverse, top, n1)
    q2 = _code(block, at + 16, low, inverse, top, n2)
    q3 = _code(block, at + 24, low, inverse, top, n3)
    pack(q0, q1, q2, q3, bits, wire, codes_at)
    return q0, q1, q2, q3


@inlined
def _put_values(codes, noise, low, step16, out, at):
    q0, q1, q2, q3 = codes
    n0, n1, n2, n3 = noise
    store(out, at, _value(q0, n0, low, step16))
    store(out, at + 8, _value(q1, n1, low, step16))
    store(out, at + 16, _value(q2, n2, low, step16))
    store(out, at + 24, _value(q3, n3, low, step16))


@inlined
def _add_values(codes, noise, low, step16, base, base_at, out, at):
    q0, q1, q2, q3 = codes
    n0, n1, n2, n3 = noise
    store(out, at, load(base, base_at) + _value(q0, n0, low, step16))
    store(out, at + 8, load(base, base_at + 8) + _value(q1, n1, low, step16))
    store(out, at + 16, load(base, base_at + 16) + _value(q2, n2, low, step16))
    store(out, at + 24, load(base, base_at + 24) + _value(q3, n3, low, step16))


@inlined
def _centred(noise):
    """What the receiver of a dithered code subtracts: the dither about its mean."""
    n0, n1, n2, n3 = noise
    half = v.splat_i32(_HALF_CODE)
    return n0 - half, n1 - half, n2 - half, n3 - half


@inlined
def _all(lanes):
    return lanes, lanes, lanes, lanes


@inlined
def _pair_nbytes(spec):
    return 8 if spec[WIDE] else 4


@inlined
def _codes_at(row, n, spec):
    """Byte at which the codes of a row of ``n`` elements start."""
    return row + (n + spec[BLOCK] - 1) // spec[BLOCK] * _pair_nbytes(spec)


@jit
def _encode_run(block, offset, n, tile, spec, key, wire, scale_at, codes_at, keep, decoded, kept,
                factor, soon, soon_at):  # fmt: skip
    """Encodes ``block[offset:] * factor`` in whole tiles, any padding equal to its block's first element.

    The block is left scaled, decoded values go to ``decoded[kept:]`` (if ``keep``), and ``soon`` is what is read next.
    """
    bits, size, rounding, wide = spec[BITS], spec[BLOCK], spec[ROUNDING], spec[WIDE]
    top = F32((1 << bits) - 1)
    tops = v.splat_f32(top * F32(65536))
    half, zero = _all(v.splat_i32(_HALF_CODE)), _all(v.splat_i32(I32(0)))
    # All scales first: their long chains of dependent instructions then overlap from block to block.
    put_at = scale_at
    for b in range(0, n, size):
        m = min(size, n - b)
        if factor == F32(1):
            low_key, high_key = range_keys(block, offset + b, m)
        else:
            low_key, high_key = scaled_range_keys(block, offset + b, m, v.splat_f32(factor))
        low, step = block_scale(low_key, high_key, top, wide)
        put_scale(wire, put_at, low, step, wide)
        put_at += _pair_nbytes(spec)
    for b in range(0, n, size):
        m = min(size, n - b)
        low, step = get_scale(wire, scale_at, wide)
        scale_at += _pair_nbytes(spec)
        at, tiles = offset + b, m // TILE
        if not step > F32(0):
            for i in range(tiles * 4 * bits):
                wire[codes_at + i] = 0
            if keep:
                fill = v.splat_f32(low if step == F32(0) else F32(np.nan))
                for i in range(kept + b, kept + b + m, 8):
                    store(decoded, i, fill)
            codes_at += tiles * 4 * bits
            tile += tiles
            continue
        lows, steps = v.splat_f32(low), v.splat_f32(step * F32(2.0**-16))
        inverse = v.splat_f32(F32(65536) / step)
        if rounding == NEAREST:
            for t in range(tiles):
                o = t * TILE
                v.prefetch(soon, soon_at + b + o)
                v.prefetch(soon, soon_at + b + o + 16)
                q = _encode_tile(block, at + o, lows, inverse, tops, half, bits, wire, codes_at + t * 4 * bits)
                if keep:
                    _put_values(q, zero, lows, steps, decoded, kept + b + o)
        else:
            for t in range(tiles):
                o = t * TILE
                v.prefetch(soon, soon_at + b + o)
                v.prefetch(soon, soon_at + b + o + 16)
                noise = dither(tile + t, key)
                q = _encode_tile(block, at + o, lows, inverse, tops, noise, bits, wire, codes_at + t * 4 * bits)
                if keep:
                    if rounding == DITHERED:
                        _put_values(q, _centred(noise), lows, steps, decoded, kept + b + o)
                    else:
                        _put_values(q, zero, lows, steps, decoded, kept + b + o)
        codes_at += tiles * 4 * bits
        tile += tiles


@jit
def _decode_run(wire, scale_at, codes_at, n, tile, spec, key, out, offset, add, base, base_at):
    """Decodes whole tiles into ``out[offset:]``; with ``add``, what is written is ``base[base_at:]`` plus the value."""
    bits, size, rounding = spec[BITS], spec[BLOCK], spec[ROUNDING]
    zero = _all(v.splat_i32(I32(0)))
    for b in range(0, n, size):
        m = min(size, n - b)
        low, step = get_scale(wire, scale_at, spec[WIDE])
        scale_at += _pair_nbytes(spec)
        at, tiles = offset + b, m // TILE
        if not step > F32(0):
            fill = v.splat_f32(low if step == F32(0) else F32(np.nan))
            for i in range(0, m, 8):
                store(out, at + i, load(base, base_at + b + i) + fill if add else fill)
            codes_at += tiles * 4 * bits
            tile += tiles
            continue
        lows, steps = v.splat_f32(low), v.splat_f32(step * F32(2.0**-16))
        if rounding == DITHERED:
            for t in range(tiles):
                codes = unpack(wire, codes_at + t * 4 * bits, bits)
                gap = _centred(dither(tile + t, key))
                if add:
                    _add_values(codes, gap, lows, steps, base, base_at + b + t * TILE, out, at + t * TILE)
                else:
                    _put_values(codes, gap, lows, steps, out, at + t * TILE)
        else:
            for t in range(tiles):
                codes = unpack(wire, codes_at + t * 4 * bits, bits)
                if add:
                    _add_values(codes, zero, lows, steps, base, base_at + b + t * TILE, out, at + t * TILE)
                else:
                    _put_values(codes, zero, lows, steps, out, at + t * TILE)
        codes_at += tiles * 4 * bits
        tile += tiles


@inlined
def _tiles(n):
    return (n + 31) >> 5


@jit
def _pad_row(wire, row, n, spec):
    """Zeroes the bytes between the codes and the next multiple of eight."""
    used = _codes_at(_ZERO, n, spec) + _tiles(n) * 4 * spec[BITS]
    for i in range(used, (used + 7) & -8):
        wire[row + i] = 0


@jit
def pad_run(block, n, size):
    """Fills the last tile of ``block[:n]`` with the first element of its block."""
    for i in range(n, _tiles(n) * TILE):
        block[i] = block[n // size * size]


@jit
def compress(
    x, wire, rows, keys, stream, spec, scale, residual, keep, scratch, spare, first, stop
):  # fmt: skip
    """Writes the payload rows of ``x * scale + residual`` and, to ``keep`` it, the new residual."""
    size, room = spec[BLOCK], len(scratch) >> 1
    direct = scale == F32(1) and not keep
    block, raw = v.pointer(scratch), v.pointer(spare)
    source, payload, owed = v.pointer(x), v.pointer(wire), v.pointer(residual)
    for r in range(first, stop):
        n, tile = rows[r, NUMEL], rows[r, START] >> 5
        buffer, state, row = rows[r, BUFFER], rows[r, STATE], rows[r, WIRE]
        soon = rows[min(r + 1, stop - 1), BUFFER]
        key = payload_key(keys[rows[r, PARAMETER]], stream)
        codes_at = _codes_at(row, n, spec)
        whole = n // size * size if direct else _ZERO
        _encode_run(
            source, buffer, whole, tile, spec, key, payload, row, codes_at, keep, block, _ZERO,
            _ONE, source, soon,
        )  # fmt: skip
        rest = n - whole
        if rest > 0:
            load_run(source, buffer + whole, rest, scale, owed, state, keep, block, raw)
            pad_run(block, rest, size)
            _encode_run(
                block, _ZERO, _tiles(rest) << 5, tile + (whole >> 5), spec, key, payload,
                row + whole // size * _pair_nbytes(spec),
                codes_at + (whole >> 5) * 4 * spec[BITS], keep, block, room, _ONE, source, soon,
            )  # fmt: skip
            if keep:
                keep_residual(block, room, rest, owed, state)
        _pad_row(payload, row, n, spec)


@jit
def decompress(wire, out, rows, keys, stream, spec, add, spare, first, stop):
    """Reads payload rows into ``out``, replacing or adding."""
    size = spec[BLOCK]
    payload, target, raw = v.pointer(wire), v.pointer(out), v.pointer(spare)
    for r in range(first, stop):
        n, tile, at, row = rows[r, NUMEL], rows[r, START] >> 5, rows[r, BUFFER], rows[r, WIRE]
        key = payload_key(keys[rows[r, PARAMETER]], stream)
        codes_at = _codes_at(row, n, spec)
        whole = n & -TILE
        _decode_run(payload, row, codes_at, whole, tile, spec, key, target, at, add, target, at)
        if whole < n:
            for i in range(n - whole):
                raw[i] = target[at + whole + i]
            _decode_run(
                payload, row + whole // size * _pair_nbytes(spec),
                codes_at + (whole >> 5) * 4 * spec[BITS], _TILE, tile + (whole >> 5), spec, key,
                raw, _ZERO, add, raw, _ZERO,
            )  # fmt: skip
            for i in range(n - whole):
                target[at + whole + i] = raw[i]


@jit
def reduce(
    wires, starts, own, wire_out, rows, wire_rows_out, keys, senders, stream_out, spec, spec_out,
    own_rank, scale, encode, scratch, spare, first, stop,
):  # fmt: skip
    """Sums the rows of every rank in rank order in fp32, scales, encodes, and leaves the decoded value in ``own``."""
    size = spec_out[BLOCK]
    total, raw, mine = v.pointer(scratch), v.pointer(spare), v.pointer(own)
    received, payload = v.pointer(wires), v.pointer(wire_out)
    for r in range(first, stop):
        n, tile, at, row = rows[r, NUMEL], rows[r, START] >> 5, rows[r, BUFFER], rows[r, WIRE]
        soon = rows[min(r + 1, stop - 1), BUFFER]
        key, padded = keys[rows[r, PARAMETER]], _tiles(n) << 5
        # Own part first and whole tiles: the first decode reads it in place.
        in_place = own_rank == 0 and len(starts) > 1 and n == padded
        for s in range(len(starts)):
            if s == own_rank:
                if s > 0:
                    add_run(mine, at, n, total, raw)
                elif not in_place:
                    load_run(mine, at, n, _ONE, total, _ZERO, _NO, total, raw)
                continue
            sender_key = payload_key(key, senders[s])
            base = starts[s] + row
            first_codes = _codes_at(base, n, spec)
            if s == 1 and in_place:
                _decode_run(
                    received, base, first_codes, padded, tile, spec, sender_key, total, _ZERO, in_place, mine, at
                )
            else:
                _decode_run(
                    received, base, first_codes, padded, tile, spec, sender_key, total, _ZERO, s > 0, total, _ZERO
                )
        if not encode:
            for i in range(0, padded, 8):
                v.store_f32(total, i, v.load_f32(total, i) * v.splat_f32(scale))
            store_run(total, _ZERO, n, mine, at, raw)
            continue
        out = wire_rows_out[r]
        own_key = payload_key(key, stream_out)
        whole, codes_at = n // size * size, _codes_at(out, n, spec_out)
        _encode_run(
            total, _ZERO, whole, tile, spec_out, own_key, payload, out, codes_at, encode, mine, at,
            scale, mine, soon,
        )  # fmt: skip
        if whole < n:
            pad_run(total, n, size)
            _encode_run(
                total, whole, padded - whole, tile + (whole >> 5), spec_out, own_key, payload,
                out + whole // size * _pair_nbytes(spec_out),
                codes_at + (whole >> 5) * 4 * spec_out[BITS], encode, total, whole, scale, mine, soon,
            )  # fmt: skip
            store_run(total, whole, n, mine, at, raw)
        _pad_row(payload, out, n, spec_out)
