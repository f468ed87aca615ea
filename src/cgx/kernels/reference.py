"""The NumPy oracle: slow, obvious, and the definition of every byte (docs/wire-format.md in code).

Arrays: ``x`` and ``out`` are flat float32, float16 or, for bfloat16, uint16; ``rows`` is ``SegmentTable.rows``;
``keys`` holds one uint64 per parameter; wires are flat uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.core.random import payload_keys
from cgx.core.segments import BUFFER, NUMEL, PARAMETER, START, STATE, WIRE
from cgx.core.spec import Uniform
from cgx.core.wire import TILE, row_nbytes

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
AnyFloats = NDArray[Any]

_ABS, _INF_BITS = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
MIN_STEP = np.float32(2.0**-110)
_NAN = np.array([0x7FC00000], np.uint32).view(np.float32)[0]


def to_f32(x: AnyFloats) -> Floats:
    """Widens float16, or bfloat16 carried as uint16; float32 stays as it is."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)


def from_f32(values: Floats, dtype: np.dtype[Any]) -> AnyFloats:
    """Rounds to nearest even; overflow becomes infinity, as IEEE has it."""
    if dtype == np.uint16:
        bits = values.view(np.uint32)
        upper = bits >> np.uint32(16)
        rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def dither(key: np.uint64, start: int, tiles: int) -> Ints:
    """16 random bits per element, shape (tiles, 32), for tiles from element ``start`` on."""
    numbers = np.arange(tiles, dtype=np.uint64) + np.uint64(start // TILE)
    with np.errstate(over="ignore"):
        z = np.uint64(key) + numbers * np.uint64(0x9E3779B97F4A7C15)
        z = ((z ^ (z >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9))[:, None]
        first, word = z.astype(np.uint32), (z >> np.uint64(32)).astype(np.uint32)
        h = ((np.arange(16, dtype=np.uint32) + first) * np.uint32(0x7FEB352D)) ^ word
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = h ^ (h >> np.uint32(16))
    return np.concatenate([h & np.uint32(0xFFFF), h >> np.uint32(16)], axis=1).astype(np.int32)


def pack(codes: Ints, bits: int) -> Bytes:
    """Codes of shape (tiles, 32) to ``4 * bits`` bytes per tile: parts of 8, 4, 2 and 1 bits, low bits first."""
    q = codes.astype(np.uint8).reshape(-1, 4, 8)
    parts, shift = [], 0
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        part = (q >> np.uint8(shift)) & np.uint8(2**width - 1)
        shift += width
        if width == 8:
            parts.append(part.reshape(-1, 32))
        elif width == 4:
            parts.append((part[:, :2] | part[:, 2:] << np.uint8(4)).reshape(-1, 16))
        else:
            planes = part.astype(np.int64) << (width * np.arange(4))[:, None]
            folded = np.bitwise_or.reduce(planes, axis=1)
            if width == 1:
                folded = folded[:, :4] | folded[:, 4:] << 4
            parts.append(np.asarray(folded, np.uint8))
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(wire: Bytes, bits: int) -> Ints:
    """Inverse of pack; returns shape (tiles, 32)."""
    tiles = wire.reshape(-1, 4 * bits)
    codes, at, shift = np.zeros((len(tiles), 4, 8), np.int32), 0, 0
    planes: Ints
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        part = tiles[:, at : at + 4 * width].astype(np.int32)
        if width == 8:
            planes = part.reshape(-1, 4, 8)
        elif width == 4:
            halves = part.reshape(-1, 2, 8)
            planes = np.concatenate([halves & 15, halves >> 4], axis=1)
        else:
            if width == 1:
                part = np.concatenate([part & 15, part >> 4], axis=1)
            planes = np.stack([(part >> (width * j)) & (2**width - 1) for j in range(4)], axis=1)
        codes |= planes << shift
        at, shift = at + 4 * width, shift + width
    return codes.reshape(-1, TILE)


def block_scales(blocks: Floats, spec: Uniform) -> tuple[Floats, Floats]:
    """``(low, step)`` of each row of ``blocks``, rounded outward to the scale dtype; NaN poisons."""
    bits = blocks.view(np.int32)
    ordered = bits ^ ((bits >> np.int32(31)) & _ABS)
    low_key, high_key = ordered.min(axis=1), ordered.max(axis=1)
    poisoned = (low_key <= -_INF_BITS - 1) | (high_key >= _INF_BITS)
    low, high = ((key ^ ((key >> np.int32(31)) & _ABS)).view(np.float32) + np.float32(0) for key in (low_key, high_key))
    top = np.float32(2**spec.bits - 1)
    with np.errstate(all="ignore"):
        if spec.scale == "bf16":
            bits = low.view(np.int32)
            below = (bits >> np.int32(31)) & np.int32(0xFFFF)
            low = ((bits + below) & np.int32(-65536)).view(np.float32)
        width = high - low
        step = width / top
        bits = step.view(np.int32) + (step * top < width)
        bits = np.maximum(bits, MIN_STEP.view(np.int32)).astype(np.int32)
        if spec.scale == "bf16":
            bits = (bits + np.int32(0xFFFF)) & np.int32(-65536)
        poisoned |= (bits >= _INF_BITS) & (width != 0)
        poisoned |= (low.view(np.int32) & _ABS) >= _INF_BITS
        step = np.where(width == 0, np.float32(0), bits.view(np.float32))
    return np.where(poisoned, _NAN, low), np.where(poisoned, _NAN, step)


def _decode_tiles(codes: Ints, low: Floats, step: Floats, spec: Uniform, key: np.uint64, start: int) -> Floats:
    tiles_per_block = spec.block_size // TILE
    per_tile = (np.repeat(a, tiles_per_block)[: len(codes), None] for a in (low, step))
    lows, steps = per_tile
    fixed = codes << 16
    if spec.rounding == "dithered":
        fixed = fixed - (dither(key, start, len(codes)) - 32768)
    with np.errstate(all="ignore"):
        values = lows + fixed.astype(np.float32) * (steps * np.float32(2.0**-16))
    values = np.where(steps == 0, lows, values)
    return np.where(steps >= 0, values, _NAN).reshape(-1)  # no encoder writes a negative step


def uniform_encode(values: Floats, spec: Uniform, key: np.uint64, start: int) -> tuple[Bytes, Floats]:
    """Payload of one row, and what it decodes to."""
    n, size = len(values), spec.block_size
    blocks, tiles = -(-n // size), -(-n // TILE)
    padded = np.empty(blocks * size, np.float32)
    padded[:n] = values
    padded[n:] = values[(n - 1) // size * size] if n else 0
    grid = padded.reshape(blocks, size)
    low, step = block_scales(grid, spec)
    live = step > 0
    noise = np.full((tiles, TILE), 32768, np.int32)
    if spec.rounding != "nearest":
        noise = dither(key, start, tiles)
    with np.errstate(all="ignore"):
        inverse = np.float32(65536) / np.where(live, step, np.float32(1))
        fixed = (grid - low[:, None]) * inverse[:, None]
        fixed = np.minimum(fixed, np.float32((2**spec.bits - 1) * 65536))
    whole = np.where(live[:, None], fixed, np.float32(0)).astype(np.int32).reshape(-1, TILE)
    codes: Ints = (whole[:tiles] + noise) >> np.int32(16)
    codes[~np.repeat(live, size // TILE)[:tiles]] = 0
    scales = np.stack([low, step], axis=1).reshape(-1)
    words: NDArray[np.uint32] = scales.view(np.uint32)
    head = (words >> np.uint32(16)).astype(np.uint16) if spec.scale == "bf16" else words
    payload = np.zeros(row_nbytes(spec, n, "fp32"), np.uint8)
    body = np.concatenate([head.view(np.uint8), pack(codes, spec.bits)])
    payload[: len(body)] = body
    return payload, _decode_tiles(codes, low, step, spec, key, start)[:n]


def uniform_decode(wire: Bytes, n: int, spec: Uniform, key: np.uint64, start: int) -> Floats:
    """Values of one row."""
    blocks, tiles = -(-n // spec.block_size), -(-n // TILE)
    width = 4 if spec.scale == "fp32" else 2
    head = wire[: blocks * 2 * width].copy()
    if spec.scale == "bf16":
        scales = to_f32(head.view(np.uint16))
    else:
        scales = head.view(np.float32)
    at = blocks * 2 * width
    codes = unpack(wire[at : at + tiles * 4 * spec.bits], spec.bits)
    return _decode_tiles(codes, scales[0::2], scales[1::2], spec, key, start)[:n]


def compress(
    x: AnyFloats, wire: Bytes, rows: NDArray[np.int64], keys: NDArray[np.uint64], stream: int,
    spec: Uniform, *, scale: float = 1.0, residual: Floats | None = None,
) -> None:  # fmt: skip
    """Writes the payload rows of ``x * scale + residual`` and leaves the new residual."""
    for row in rows:
        n, at, state = row[NUMEL], row[BUFFER], row[STATE]
        with np.errstate(all="ignore"):
            values = to_f32(x[at : at + n]) * np.float32(scale)
            if residual is not None:
                values = values + residual[state : state + n]
        key = payload_keys(keys[row[PARAMETER]][None], stream)[0]
        payload, decoded = uniform_encode(values, spec, key, int(row[START]))
        wire[row[WIRE] : row[WIRE] + len(payload)] = payload
        if residual is not None:
            with np.errstate(all="ignore"):
                lost = values - decoded
            residual[state : state + n] = np.where(np.isfinite(lost), lost, np.float32(0))


def decompress(
    wire: Bytes, out: AnyFloats, rows: NDArray[np.int64], keys: NDArray[np.uint64], stream: int,
    spec: Uniform, *, add: bool = False,
) -> None:  # fmt: skip
    """Reads payload rows into ``out``, replacing or adding."""
    for row in rows:
        n, at = int(row[NUMEL]), row[BUFFER]
        key = payload_keys(keys[row[PARAMETER]][None], stream)[0]
        values = uniform_decode(wire[row[WIRE] :], n, spec, key, int(row[START]))
        with np.errstate(all="ignore"):
            if add:
                values = to_f32(out[at : at + n]) + values
            out[at : at + n] = from_f32(values, out.dtype)


def reduce(
    wires: list[Bytes | None], own: AnyFloats, wire_out: Bytes, rows: NDArray[np.int64],
    rows_out: NDArray[np.int64], keys: NDArray[np.uint64], senders: list[int], stream_out: int,
    spec: Uniform, spec_out: Uniform, *, scale: float,
) -> None:  # fmt: skip
    """Sums all ranks' rows in rank order (None: this rank's own part), scales, encodes, keeps the decoded value."""
    for row, row_out in zip(rows, rows_out, strict=True):
        n, at, start = int(row[NUMEL]), row[BUFFER], int(row[START])
        total = np.zeros(0, np.float32)
        for rank, wire in enumerate(wires):
            if wire is None:
                part = to_f32(own[at : at + n])
            else:
                key = payload_keys(keys[row[PARAMETER]][None], senders[rank])[0]
                part = uniform_decode(wire[row[WIRE] :], n, spec, key, start)
            with np.errstate(all="ignore"):
                total = total + part if rank else part
        key = payload_keys(keys[row[PARAMETER]][None], stream_out)[0]
        with np.errstate(all="ignore"):
            total = total * np.float32(scale)
        payload, decoded = uniform_encode(total, spec_out, key, start)
        wire_out[row_out[WIRE] : row_out[WIRE] + len(payload)] = payload
        own[at : at + n] = from_f32(decoded, own.dtype)
