"""Rows of several parameters in one table, with buffers laid out awkwardly: odd offsets, gaps, uneven starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.base import Bytes, Compressor, Keys, Store
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import BUFFER, CARRIERS, NUMEL, PARAMETER, START, STATE, WIRE, SegmentTable
from cgx.core.spec import Dtype
from cgx.kernels.reference import to_f32
from tests.strategies import Floats, in_dtype

STREAM = 7
GUARD_NBYTES = 64
_GAP = 3  # elements between rows, so that no row but the first is aligned to more than its element
_STRIPE = 8192  # a multiple of every block size in the suite


def keys_of(count: int, *, seed: int = 3) -> Keys:
    """Return keys of `count` parameters."""
    hashes = np.array([name_hash(f"layer.{i}") for i in range(count)], np.uint64)
    return parameter_keys(seed, hashes, np.full(count, 5, np.uint64))


@final
@dataclass(frozen=True)
class Encoded:
    """What one call of `compress` left."""

    payload: Bytes
    residual: list[Floats]


@final
@dataclass
class Batch:
    """One table over `rows`, float32 values that are rounded to `dtype` first.

    By default each row belongs to a parameter of its own and starts somewhere inside it.
    """

    compressor: Compressor
    rows: Sequence[Floats]
    dtype: Dtype = "fp32"
    starts: Sequence[int] | None = None
    parameters: Sequence[int] | None = None
    table: SegmentTable = field(init=False)
    keys: Keys = field(init=False)
    x: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.rows)
        parameters = range(count) if self.parameters is None else self.parameters
        starts = [i * _STRIPE for i in range(count)] if self.starts is None else self.starts
        table, at, wire = np.zeros((count, 6), np.int64), 1, 0
        for i, row in enumerate(self.rows):
            table[i, [PARAMETER, START, NUMEL]] = parameters[i], starts[i], len(row)
            table[i, [BUFFER, STATE, WIRE]] = at, at + 1, wire
            at += len(row) + _GAP
            wire += self.compressor.row_nbytes(len(row), self.dtype)
        self.table = SegmentTable(table, wire, self.dtype)
        self.keys = keys_of(max(parameters, default=-1) + 1)
        self.x = self.flat(in_dtype(row, self.dtype) for row in self.rows)

    @property
    def buffer_numel(self) -> int:
        """Elements of a flat buffer, gaps and margins included."""
        return sum(len(row) + _GAP for row in self.rows) + 2

    @property
    def inputs(self) -> list[Floats]:
        """The rows as the compressor sees them."""
        return [to_f32(row) for row in self.cut(self.x)]

    def flat(self, rows: Any, *, column: int = BUFFER) -> NDArray[Any]:
        """Return a flat buffer that holds `rows`, and a sentinel everywhere else."""
        rows = list(rows)
        dtype = rows[0].dtype if rows else CARRIERS[self.dtype]
        buffer = np.full(self.buffer_numel, 77, dtype)
        for place, row in zip(self.table.rows, rows, strict=True):
            buffer[place[column] : place[column] + place[NUMEL]] = row
        return buffer

    def cut(self, buffer: NDArray[Any], *, column: int = BUFFER) -> list[NDArray[Any]]:
        """Return the rows that lie in a flat buffer, after checking that the gaps still hold the sentinel."""
        rows, outside = [], np.ones(len(buffer), np.bool_)
        for place in self.table.rows:
            inside = slice(place[column], place[column] + place[NUMEL])
            rows.append(buffer[inside].copy())
            outside[inside] = False
        assert (buffer[outside] == 77).all(), "elements outside the rows were touched"
        return rows

    def compress(
        self, *, scale: float = 1.0, residual: Sequence[Floats] | None = None, stream: int = STREAM,
        garbage: int = 0xA5,
    ) -> Encoded:  # fmt: skip
        """Compress all rows into a wire of garbage with a guard behind it, and check the guard."""
        wire = np.full(self.table.wire_nbytes + GUARD_NBYTES, garbage, np.uint8)
        arena = None if residual is None else self.flat(residual, column=STATE)
        before = self.x.copy()
        used = self.compressor.compress(
            self.x, wire[:-GUARD_NBYTES], self.table, self.keys, stream, scale=scale, residual=arena
        )
        assert self.x.tobytes() == before.tobytes(), "compress changed its input"
        assert used <= self.table.wire_nbytes, "compress used more than row_nbytes"
        assert (wire[used:] == garbage).all(), "compress wrote past the payload"
        left = [] if arena is None else self.cut(arena, column=STATE)
        return Encoded(wire[:used].copy(), left)

    def decompress(
        self, payload: Bytes, *, into: Sequence[NDArray[Any]] | None = None,
        store: Store = Store.REPLACE, stream: int = STREAM, garbage: int = 0x5A,
    ) -> list[NDArray[Any]]:  # fmt: skip
        """Decompress all rows, with garbage behind the payload: float32, or in the dtype of `into`."""
        wire = np.concatenate([payload, np.full(GUARD_NBYTES, garbage, np.uint8)])
        rows = [np.full(len(row), 55, np.float32) for row in self.rows] if into is None else into
        out = self.flat(rows)
        read = self.compressor.decompress(wire, out, self.table, self.keys, stream, store=store)
        assert read == len(payload), f"decompress read {read} of {len(payload)} bytes"
        return self.cut(out)

    def round_trip(self, *, scale: float = 1.0, stream: int = STREAM) -> list[Floats]:
        """Compress, and decompress in float32."""
        return self.decompress(self.compress(scale=scale, stream=stream).payload, stream=stream)
