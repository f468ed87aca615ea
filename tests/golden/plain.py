"""A decoder written from docs/wire-format.md alone, in plain Python: proof that the page is enough to write one."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import final

_MASK32, _MASK64, _GOLDEN = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31


def payload_key(*, name: str, seed: int, reduction: int, phase: int, sender: int) -> int:
    h = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    s = mix64(seed + _GOLDEN & _MASK64)
    parameter = mix64(mix64(s ^ h) + reduction * _GOLDEN & _MASK64)
    return mix64(parameter + (phase * 2**32 + sender + 1) * _GOLDEN & _MASK64)


def f32(value: float) -> float:
    """Rounds to float32. Of two float32, sums and products rounded twice equal those rounded once."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def dither(key: int, element: int) -> int:
    """16 bits of the element with that index in its parameter."""
    tile, within = divmod(element, 32)
    z = key + tile * _GOLDEN & _MASK64
    z = (z ^ z >> 32) * 0xBF58476D1CE4E5B9 & _MASK64
    h = (within % 16 + (z & _MASK32)) * 0x7FEB352D & _MASK32
    h ^= z >> 32
    h = (h ^ h >> 15) * 0x846CA68B & _MASK32
    h ^= h >> 16
    return h >> 16 if within >= 16 else h & 0xFFFF


def code(tile: bytes, element: int, bits: int) -> int:
    """The code of element 0 to 31 of a tile of 4 * bits bytes."""
    value = shift = at = 0
    group, lane = divmod(element, 8)
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        if width == 8:
            part = tile[at + element]
        elif width == 4:
            part = tile[at + group % 2 * 8 + lane] >> group // 2 * 4
        elif width == 2:
            part = tile[at + lane] >> group * 2
        else:
            part = tile[at + lane % 4] >> lane // 4 * 4 + group
        value |= (part & 2**width - 1) << shift
        at, shift = at + 4 * width, shift + width
    return value


@final
@dataclass(frozen=True)
class Row:
    """What a receiver knows of a row before it arrives."""

    spec: str  # in full
    numel: int
    dtype: str
    key: int
    start: int

    @property
    def nbytes(self) -> int:
        if not self.spec.startswith("uniform"):
            size = self.numel * (4 if self._element_format == "f" else 2)
        else:
            bits, block, _, scale = self._fields
            pairs = -(-self.numel // block) * (8 if scale == "fp32" else 4)
            size = pairs + -(-self.numel // 32) * 4 * bits
        return -(-size // 8) * 8

    @property
    def _fields(self) -> tuple[int, int, str, str]:
        head, *options = self.spec.split("/")
        named = dict(option.split("=") for option in options)
        return int(head.split(":")[1]), int(named["block"]), named["rounding"], named["scale"]

    @property
    def _element_format(self) -> str:
        on_wire = "bf16" if self.spec == "cast:bf16" else self.dtype
        return {"fp32": "f", "fp16": "e", "bf16": "H"}[on_wire]

    def decode(self, payload: bytes) -> list[float]:
        """Float32 values of the row."""
        if self.spec.startswith("uniform"):
            return self._decode_uniform(payload)
        values = struct.unpack_from(f"<{self.numel}{self._element_format}", payload)
        if self._element_format == "H":
            return [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in values]
        return [float(v) for v in values]

    def _decode_uniform(self, payload: bytes) -> list[float]:
        bits, block, rounding, scale = self._fields
        count = -(-self.numel // block) * 2
        if scale == "fp32":
            scales, at = struct.unpack_from(f"<{count}f", payload), 4 * count
        else:
            words, at = struct.unpack_from(f"<{count}H", payload), 2 * count
            scales = tuple(struct.unpack("<f", struct.pack("<I", w << 16))[0] for w in words)
        values = []
        for i in range(self.numel):
            low, step = scales[i // block * 2], scales[i // block * 2 + 1]
            tile = payload[at + i // 32 * 4 * bits :]
            fixed = code(tile, i % 32, bits) << 16
            if rounding == "dithered":
                fixed -= dither(self.key, self.start + i) - 32768
            if step == 0:
                values.append(low)
            elif step > 0:
                values.append(f32(low + f32(f32(fixed) * f32(step * 2.0**-16))))
            else:
                values.append(math.nan)
        return values


def head(payload: bytes) -> tuple[int, int, int, int]:
    """Magic, version, bytes used and tag."""
    magic, version, _, used, tag = struct.unpack_from("<BBHIQ", payload)
    return magic, version, used, tag
