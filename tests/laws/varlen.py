"""A codec of varying length, for tests only: rows without their zeros.

A row is its length in bytes (u32, without padding), a bitmap of the elements that are not +0.0 (least significant bit
first), those elements as fp32, and zeros up to a multiple of 8 bytes. Rows follow each other without gaps, so that
all but the first start where the one before ends, not at the table's WIRE column (which states capacities).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.base import (
    Array,
    Bytes,
    Compressor,
    Guarantees,
    Keys,
    Store,
    reduce_by_steps,
)
from cgx.compressors.registry import register
from cgx.core.segments import BUFFER, NUMEL, STATE, SegmentTable
from cgx.core.spec import Dtype
from cgx.core.wire import align
from cgx.errors import WireError
from cgx.kernels.reference import from_f32, to_f32

WHOLE_ROW = 0  # as a granule: the bytes of a row belong together


@final
@dataclass(frozen=True, slots=True)
class ZeroSuppressed:
    """Sends the elements that are not zero, as fp32."""

    def __str__(self) -> str:
        return "zero-suppressed"


@final
class ZeroSuppressedCompressor:
    """Compressor of `ZeroSuppressed`; exact, NaN and infinity included."""

    guarantees = Guarantees(unbiased=True, error_bound=0.0, contraction=0.0, fixed_size=False, granule=WHOLE_ROW)

    def __init__(self, spec: ZeroSuppressed) -> None:
        self.spec = spec

    def row_nbytes(self, numel: int, dtype: Dtype) -> int:
        """Bytes of a row without zeros."""
        return align(4 + -(-numel // 8) + 4 * numel)

    def compress(
        self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, *,
        scale: float = 1.0, residual: NDArray[np.float32] | None = None,
    ) -> int:  # fmt: skip
        """See `Compressor.compress`."""
        at = 0
        for row in table.rows:
            numel, first, state = row[NUMEL], row[BUFFER], row[STATE]
            with np.errstate(all="ignore"):
                values = to_f32(x[first : first + numel]) * np.float32(scale)
                if residual is not None:
                    values += residual[state : state + numel]
                    residual[state : state + numel] = 0
            is_sent = values.view(np.uint32) != 0
            body = np.concatenate([np.packbits(is_sent, bitorder="little"), values[is_sent].view(np.uint8)])
            used = 4 + len(body)
            wire[at : at + align(used)] = 0
            wire[at : at + 4] = np.array([used], np.uint32).view(np.uint8)
            wire[at + 4 : at + used] = body
            at += align(used)
        return at

    def decompress(
        self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, *,
        store: Store = Store.REPLACE,
    ) -> int:  # fmt: skip
        """See `Compressor.decompress`."""
        at = 0
        for row in table.rows:
            numel, first = int(row[NUMEL]), int(row[BUFFER])
            bitmap_end = 4 + -(-numel // 8)
            used = int(wire[at : at + 4].view(np.uint32)[0]) if at + 4 <= len(wire) else 0
            if not bitmap_end <= used <= len(wire) - at:
                raise WireError(f"row of {used} bytes at {at} in a payload of {len(wire)} bytes")
            bits = np.unpackbits(wire[at + 4 : at + bitmap_end], count=numel, bitorder="little")
            sent = wire[at + bitmap_end : at + used].copy()
            if len(sent) != 4 * int(bits.sum()):
                raise WireError(f"row at {at} holds {len(sent)} bytes for {bits.sum()} elements")
            values = np.zeros(numel, np.float32)
            values[bits.astype(np.bool_)] = sent.view(np.float32)
            target = out[first : first + numel]
            if store is Store.ADD:
                with np.errstate(all="ignore"):
                    values = to_f32(target) + values
            target[:] = from_f32(values, out.dtype)
            at += align(used)
        return at

    def reduce(
        self, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
        table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
        senders: Sequence[int], stream_out: int, scale: float,
    ) -> int:  # fmt: skip
        """See `Compressor.reduce`."""
        return reduce_by_steps(
            self, wires, starts, own, wire_out, table, table_out, keys, into=into,
            senders=senders, stream_out=stream_out, scale=scale,
        )  # fmt: skip


register(ZeroSuppressed, ZeroSuppressedCompressor)
