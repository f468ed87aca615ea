"""Frames with faults: damaged at random, or forged so that the checksum holds."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.frame import encode
from tests.strategies import gradient

HEAD_NBYTES = 24
# What attackers try in a size field.
SIZES = (0, 1, 31, 2**16, 2**31 - 1, 2**31, 2**32, 2**48, 2**48 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    b"", b"identity", b"cast:bf16", b"bf16", b"uniform:4", b"\xff" * 8, b"uniform:4+uniform:4", b"9" * 255,
    b"uniform:1/block=65536/rounding=dithered/scale=bf16",
    b"uniform:8/block=32/rounding=nearest/scale=fp32",
    b"uniform:4/block=4294967296/rounding=dithered/scale=bf16",
    b"uniform:4/block=" + b"9" * 200,
)  # fmt: skip


def seal(body: bytes) -> bytes:
    """Append the checksum that makes a body look undamaged."""
    return body + struct.pack("<I", zlib.crc32(body))


def forge(
    *, code: int = 1, shape: tuple[int, ...] = (), text: bytes = b"identity", key: int = 0,
    payload: bytes = bytes(8), payload_nbytes: int | None = None, padding: bytes = b"\0",
) -> bytes:  # fmt: skip
    """Write a frame by hand, from docs/frame-format.md alone."""
    announced = len(payload) if payload_nbytes is None else payload_nbytes
    head = struct.pack("<4sBBBBQQ", b"CGXF", 1, code, len(shape), len(text), key, announced)
    return seal(head + struct.pack(f"<{len(shape)}Q", *shape) + text + padding * (-len(text) % 8) + payload)


def originals() -> list[bytes]:
    """Sound frames of every kind, small enough that a mutation often hits the head."""
    x = gradient("normal", 77)
    arrays: list[NDArray[Any]] = [x, x.astype(np.float16).reshape(7, 11), x[:0].reshape(0, 5), x[:1].reshape(())]
    specs = ("identity", "bf16", "uniform:4", "uniform:3/block=32/rounding=stochastic/scale=fp32")
    exact = [encode(array, "identity") for array in (x > 0, np.arange(9), x.astype(np.complex64))]
    return [encode(array, spec, key=2**64 - 1) for array in arrays for spec in specs] + exact


def mutants(count: int, *, seed: int) -> Iterator[bytes]:
    """Frames with faults: a third as they are, a third with a sound checksum, a third with a sound length as well."""
    random, sound = Random(seed), originals()
    for index in range(count):
        body = bytearray(random.choice(sound)[:-4])
        for _ in range(random.choice((1, 1, 2, 5))):
            _mutate(body, random, sound)
        if index % 3 == 0:
            yield bytes(body) + random.randbytes(4)
            continue
        if index % 3 == 1 and len(body) >= HEAD_NBYTES:
            body[16:24] = struct.pack("<Q", max(0, len(body) - _payload_at(body)))
        yield seal(bytes(body))


def _payload_at(body: bytes | bytearray) -> int:
    ndim, text_nbytes = body[6:8]
    return HEAD_NBYTES + 8 * ndim + -(-text_nbytes // 8) * 8


def _mutate(body: bytearray, random: Random, sound: list[bytes]) -> None:
    at = random.randrange(len(body) + 1)
    match random.randrange(9):
        case 0 if body:
            body[at % len(body)] ^= 1 << random.randrange(8)
        case 1:
            body[at : at + random.randrange(1, 9)] = random.randbytes(random.randrange(1, 9))
        case 2:
            del body[at:]
        case 3:
            body += random.randbytes(random.choice((1, 8, 64)))
        case 4:
            body[at:] = random.choice(sound)[at:-4]  # the head of one, the rest of another
        case 5:  # a number of the head, the dimensions or the text
            where = random.choice((8, 16, 24, 32))
            body[where : where + 8] = struct.pack("<Q", random.choice(SIZES))
        case 6:  # one of the four small fields
            where = random.choice((4, 5, 6, 7))
            body[where : where + 1] = bytes([random.choice((0, 1, 2, 3, 7, 8, 32, 33, 64, 255))])
        case 7:  # a whole frame around other fields
            shape = tuple(random.choice(SIZES) for _ in range(random.randrange(4)))
            payload = random.randbytes(8 * random.randrange(9))
            body[:] = forge(code=random.randrange(17), shape=shape, text=random.choice(TEXTS), payload=payload)[:-4]
        case 8 if len(body) > HEAD_NBYTES:  # damage to the payload's values only: often still a valid frame
            body[-8:] = random.randbytes(8)
        case _:
            pass
