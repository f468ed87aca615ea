"""Uniform codecs with one fault each, of the kind that slips in: the suite must notice every one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from cgx.compressors.uniform import UniformCompressor
from cgx.core.random import payload_keys
from cgx.core.segments import BUFFER, CARRIERS, NUMEL, PARAMETER, START, STATE, WIRE, SegmentTable
from cgx.core.spec import Dtype, Uniform
from cgx.core.wire import TILE
from cgx.kernels.reference import dither, from_f32, pack, to_f32
from tests.laws.families import grid_of
from tests.strategies import Floats

Owed = NDArray[np.float32] | None


class Wrapped:
    """Passes everything on to the real compressor; each fault replaces one method."""

    def __init__(self, spec: Uniform) -> None:
        self.spec = spec
        self.real = UniformCompressor(spec)

    @property
    def guarantees(self) -> Guarantees:
        return self.real.guarantees

    def row_nbytes(self, numel: int, dtype: Dtype) -> int:
        return self.real.row_nbytes(numel, dtype)

    def compress(
        self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, *,
        scale: float = 1.0, residual: Owed = None,
    ) -> int:  # fmt: skip
        return self.real.compress(x, wire, table, keys, stream, scale=scale, residual=residual)

    def decompress(
        self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, *,
        store: Store = Store.REPLACE,
    ) -> int:  # fmt: skip
        return self.real.decompress(wire, out, table, keys, stream, store=store)

    def reduce(
        self, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
        table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
        senders: Sequence[int], stream_out: int, scale: float,
    ) -> int:  # fmt: skip
        return reduce_by_steps(
            self, wires, starts, own, wire_out, table, table_out, keys, into=into,
            senders=senders, stream_out=stream_out, scale=scale,
        )  # fmt: skip


class Truncates(Wrapped):
    """Codes are cut off instead of rounded."""

    def compress(self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, **kw: Any) -> int:
        used = super().compress(x, wire, table, keys, stream, **kw)
        for row in table.rows:
            values, payload = _row(x, row), wire[row[WIRE] :]
            low, step = _scales(payload, len(values), self.spec)
            _put_codes(payload, values, low, step, self.spec, noise=np.zeros(1))
        return used


class Clips(Wrapped):
    """Scales are rounded to nearest instead of outward, and codes beyond them are clipped."""

    def compress(self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, **kw: Any) -> int:
        used = super().compress(x, wire, table, keys, stream, **kw)
        for row in table.rows:
            values, payload = _row(x, row), wire[row[WIRE] :]
            grid = grid_of(values, self.spec.block_size)
            low = grid.min(axis=1)
            step = (grid.max(axis=1) - low) / np.float32(2**self.spec.bits - 1)
            pairs = from_f32(np.stack([low, step], axis=1).reshape(-1), CARRIERS["bf16"])
            payload[: pairs.nbytes] = pairs.view(np.uint8)
            low, step = _scales(payload, len(values), self.spec)
            key = payload_keys(keys[row[PARAMETER]][None], stream)[0]
            noise = dither(key, int(row[START]), -(-len(values) // TILE)) / 65536
            _put_codes(payload, values, low, step, self.spec, noise=noise)
        return used


def _row(x: Array, row: NDArray[np.int64]) -> Floats:
    return to_f32(x[row[BUFFER] : row[BUFFER] + row[NUMEL]])


def _scales(payload: Bytes, numel: int, spec: Uniform) -> tuple[Floats, Floats]:
    """Low and step of each block, of a row with bf16 scales."""
    pairs = to_f32(payload[: 4 * -(-numel // spec.block_size)].copy().view(CARRIERS["bf16"]))
    return pairs[0::2], pairs[1::2]


def _put_codes(
    payload: Bytes, values: Floats, low: Floats, step: Floats, spec: Uniform, *, noise: NDArray[Any]
) -> None:
    """Writes the codes of `values`, with `noise` (0 to 1) added before they are cut off."""
    grid = grid_of(values, spec.block_size)
    with np.errstate(all="ignore"):
        levels = ((grid - low[:, None]) / step[:, None]).reshape(-1, TILE)
    levels = np.floor(np.nan_to_num(levels)[: -(-len(values) // TILE)] + noise)
    packed = pack(levels.clip(0, 2**spec.bits - 1).astype(np.int32), spec.bits)
    payload[4 * len(low) :][: len(packed)] = packed


class DropsTheTail(Wrapped):
    """The last element of an incomplete tile is forgotten."""

    def decompress(self, wire: Bytes, out: Array, table: SegmentTable, *args: Any, **kw: Any) -> int:
        before = out.copy()
        read = super().decompress(wire, out, table, *args, **kw)
        for row in table.rows[table.rows[:, NUMEL] % TILE != 0]:
            last = row[BUFFER] + row[NUMEL] - 1
            out[last] = before[last]
        return read


class HidesNan(Wrapped):
    """Values that are not finite are replaced before they can do harm."""

    def compress(self, x: Array, *args: Any, **kw: Any) -> int:
        return super().compress(np.nan_to_num(x), *args, **kw)


class ForgetsTheResidual(Wrapped):
    """What encoding lost is not kept."""

    def compress(self, *args: Any, residual: Owed = None, **kw: Any) -> int:
        kept = None if residual is None else residual.copy()
        return super().compress(*args, residual=kept, **kw)


class SharesScales(Wrapped):
    """Two neighbouring blocks share one scale."""

    def __init__(self, spec: Uniform) -> None:
        super().__init__(spec)
        self._claimed = self.real.guarantees
        self.real = UniformCompressor(Uniform(spec.bits, 2 * spec.block_size, spec.rounding, spec.scale))

    @property
    def guarantees(self) -> Guarantees:
        return self._claimed


class RepeatsItsNoise(Wrapped):
    """All ranks and phases draw the same random bits."""

    def compress(self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, **kw: Any) -> int:
        return super().compress(x, wire, table, keys, 0, **kw)

    def decompress(self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, **kw: Any) -> int:
        return super().decompress(wire, out, table, keys, 0, **kw)


class LeavesPadding(Wrapped):
    """The last byte of a row keeps what was in the buffer, padding or not."""

    def compress(self, x: Array, wire: Bytes, table: SegmentTable, *args: Any, **kw: Any) -> int:
        before = wire.copy()
        used = super().compress(x, wire, table, *args, **kw)
        ends = [*table.rows[1:, WIRE], used]
        for row, end in zip(table.rows, ends, strict=True):
            if row[NUMEL] == 1:
                wire[end - 1] = before[end - 1]
        return used


class ReplacesForAdd(Wrapped):
    """Decoding overwrites where it should add."""

    def decompress(self, *args: Any, store: Store = Store.REPLACE, **kw: Any) -> int:
        return super().decompress(*args, **kw)


class RoundsTheResidual(Wrapped):
    """The residual is kept in half precision."""

    def compress(self, x: Array, wire: Bytes, table: SegmentTable, *args: Any, residual: Owed = None, **kw: Any) -> int:
        used = super().compress(x, wire, table, *args, residual=residual, **kw)
        if residual is not None:
            for row in table.rows:
                owed = residual[row[STATE] : row[STATE] + row[NUMEL]]
                owed[:] = owed.astype(np.float16)
        return used
