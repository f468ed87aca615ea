"""Sizes and the head of a payload (docs/wire-format.md is the contract)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from cgx.core.spec import ITEMSIZE, Cast, Dtype, Identity, Spec, Uniform
from cgx.errors import WireError

WIRE_VERSION = 1
MAGIC = 0xC6
HEAD_NBYTES = 16
ROW_ALIGN = 8
TILE = 32  # elements whose codes are packed together
_HEAD = struct.Struct("<BBHIQ")


def align(nbytes: int) -> int:
    """The next multiple of ROW_ALIGN."""
    return -(-nbytes // ROW_ALIGN) * ROW_ALIGN


def row_nbytes(spec: Spec, numel: int, dtype: Dtype) -> int:
    """Bytes of one row of ``numel`` elements, padding to 8 bytes included.

    Example:
        >>> row_nbytes(Uniform(4), 128, "fp32"), row_nbytes(Identity(), 3, "fp16")
        (72, 8)
    """
    match spec:
        case Identity():
            return align(numel * ITEMSIZE[dtype])
        case Cast():
            return align(numel * 2)
        case Uniform(bits=bits, block_size=block_size, scale=scale):
            blocks, tiles = -(-numel // block_size), -(-numel // TILE)
            return align(blocks * 2 * (4 if scale == "fp32" else 2) + tiles * TILE * bits // 8)


@final
@dataclass(frozen=True, slots=True)
class Head:
    """The 16 bytes in front of every payload.

    Args:
        used_nbytes: Bytes of the payload that carry data, this head included.
        tag: 64 bits that both sides derive from plan, reduction, piece and phase; a foreign payload cannot match.
    """

    used_nbytes: int
    tag: int

    def write(self, wire: NDArray[np.uint8]) -> None:
        """Writes the head to ``wire[:16]``."""
        _HEAD.pack_into(wire.data, 0, MAGIC, WIRE_VERSION, 0, self.used_nbytes, self.tag)

    @staticmethod
    def used_nbytes_of(wire: NDArray[np.uint8]) -> int:
        """``used_nbytes`` of a payload this rank wrote itself."""
        return int(_HEAD.unpack_from(wire.data, 0)[3])

    @staticmethod
    def read(wire: NDArray[np.uint8], *, tag: int, source: str) -> int:
        """Checks a received head and returns ``used_nbytes``.

        Raises:
            WireError: Truncated, oversized, of another version or of another reduction.
        """
        if wire.nbytes < HEAD_NBYTES:
            raise WireError(f"{source}: payload of {wire.nbytes} bytes is shorter than its head")
        magic, version, _, used_nbytes, found = _HEAD.unpack_from(wire.data, 0)
        if magic != MAGIC or version != WIRE_VERSION:
            raise WireError(
                f"{source}: head {magic:#x} version {version}, expected {MAGIC:#x} version {WIRE_VERSION}; "
                "all ranks must run the same cgx"
            )
        if found != tag:
            raise WireError(
                f"{source}: payload of another reduction (tag {found:#x}, expected {tag:#x}); ranks issued their "
                "reductions in different orders or with different tensors"
            )
        if not HEAD_NBYTES <= used_nbytes <= wire.nbytes:
            raise WireError(f"{source}: head announces {used_nbytes} bytes, {wire.nbytes} were received")
        return int(used_nbytes)
