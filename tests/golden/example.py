"""The worked example of docs/wire-format.md: one payload of one row, byte by byte."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from cgx.core.random import SCATTER, name_hash, parameter_keys, payload_keys, stream
from cgx.core.segments import single_row
from cgx.core.spec import Uniform
from cgx.core.wire import HEAD_NBYTES, Head, row_nbytes
from cgx.kernels import reference
from cgx.kernels.reference import Bytes, to_f32
from tests.strategies import Floats

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
SPEC = Uniform(4, 32)
NUMEL, TAG = 40, 0x0123456789ABCDEF
NAME, SEED, REDUCTION, PHASE, SENDER = "layer.weight", 0, 0, SCATTER, 1
_BLOCK = re.compile(r"(<!-- example -->\n)(.*?)(<!-- end of example -->)", re.DOTALL)


def values() -> Floats:
    """x[i] = (i * i mod 32 - 12) / 8."""
    i = np.arange(NUMEL)
    return ((i * i % 32 - 12) / 8).astype(np.float32)


def payload() -> tuple[Bytes, Floats, int, int]:
    """Head and row, what it decodes to, and the keys of the parameter and of the payload."""
    keys = parameter_keys(SEED, np.array([name_hash(NAME)], np.uint64), np.array([REDUCTION], np.uint64))
    nbytes = row_nbytes(SPEC, NUMEL, "fp32")
    wire, decoded = np.zeros(HEAD_NBYTES + nbytes, np.uint8), np.zeros(NUMEL, np.float32)
    rows = single_row(NUMEL, wire_nbytes=nbytes).rows
    sender = stream(PHASE, SENDER)
    Head(len(wire), TAG).write(wire)
    reference.compress(values(), wire[HEAD_NBYTES:], rows, keys, sender, SPEC)
    reference.decompress(wire[HEAD_NBYTES:], decoded, rows, keys, sender, SPEC)
    return wire, decoded, int(keys[0]), int(payload_keys(keys, sender)[0])


def text() -> str:
    """The example as the page shows it."""
    wire, decoded, parameter_key, payload_key = payload()
    scales = to_f32(wire[16:24].view(np.uint16)).reshape(2, 2)
    low_step = [f"low {low:g}, step {step:g}" for low, step in scales]
    lines = [
        "```text",
        f"hash of the name  {name_hash(NAME):016x}",
        f"parameter key     {parameter_key:016x}",
        f"payload key       {payload_key:016x}",
        "",
        f"{_hex(wire, 0, 8)}                          magic, version, reserved, bytes used (56)",
        f"{_hex(wire, 8, 16)}                          tag",
        f"{_hex(wire, 16, 20)}                                      block 0: {low_step[0]}",
        f"{_hex(wire, 20, 24)}                                      block 1: {low_step[1]}",
        f"{_hex(wire, 24, 40)}  codes of tile 0",
        f"{_hex(wire, 40, 56)}  codes of tile 1 (8 elements and filling)",
        "",
        *(
            f"element {i:2}  code {_code(wire, i):2}  decoded {decoded[i]:.9g}  (sent {values()[i]:g})"
            for i in (0, 1, 15, 16, 31, 32, 39)
        ),
        "```",
    ]
    return "\n".join(lines) + "\n"


def with_example(page: str) -> str:
    """The page with its example renewed."""
    return _BLOCK.sub(lambda found: found[1] + text() + found[3], page)


def bytes_of(page: str) -> bytes:
    """The payload as the page prints it."""
    found = _BLOCK.search(page)
    assert found is not None, "the page has lost its example"
    lines = re.findall(r"^((?:[0-9a-f]{2} ?)+) {2,}", found[2], re.MULTILINE)
    return bytes.fromhex("".join(lines))


def _hex(wire: Bytes, first: int, stop: int) -> str:
    return wire[first:stop].tobytes().hex(" ")


def _code(wire: Bytes, element: int) -> int:
    tiles = reference.unpack(wire[24:56], SPEC.bits)
    return int(tiles[element // 32, element % 32])
