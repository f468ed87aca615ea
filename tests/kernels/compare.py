"""Runs a kernel and the oracle on the same rows, and compares every byte they leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.base import OWN, Compressor, Store
from cgx.compressors.registry import compressor_for
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.segments import STATE, WIRE, SegmentTable
from cgx.core.spec import Dtype, Uniform
from cgx.kernels import reference
from tests.laws.batch import STREAM, Batch
from tests.strategies import Floats, in_dtype


def same_values(found: NDArray[np.generic], expected: NDArray[np.generic]) -> bool:
    """Equal bits, except that one NaN is as good as another outside a payload."""
    a, b = reference.to_f32(found), reference.to_f32(expected)
    both_nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | both_nan).all())


def check_codec(
    spec: Uniform, rows: Sequence[Floats], dtype: Dtype, *, scale: float, with_residual: bool,
    starts: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Compress, then decompress with both stores, in the gradient's dtype and in fp32."""
    batch = Batch(compressor_for(spec), rows, dtype, starts=starts)
    residual = [row[::-1] * np.float32(0.125) for row in rows] if with_residual else None
    if residual is not None:
        residual = [np.where(np.isfinite(row), row, np.float32(0)) for row in residual]
    encoded = batch.compress(scale=scale, residual=residual)
    expected = np.zeros(batch.table.wire_nbytes, np.uint8)
    arena = None if residual is None else batch.flat(residual, column=STATE)
    reference.compress(batch.x, expected, batch.table.rows, batch.keys, STREAM, spec, scale=scale, residual=arena)
    assert encoded.payload.tobytes() == expected.tobytes(), f"payload of {spec}, {dtype}"
    if arena is not None:
        for found, left in zip(encoded.residual, batch.cut(arena, column=STATE), strict=True):
            assert same_values(found, left), f"residual of {spec}, {dtype}"
    for into in {dtype, "fp32"}:
        for store in Store:
            there = [in_dtype(row, into) for row in rows]
            found_rows = batch.decompress(encoded.payload, into=there, store=store)
            out = batch.flat(there)
            reference.decompress(expected, out, batch.table.rows, batch.keys, STREAM, spec, add=store is Store.ADD)
            for found, left in zip(found_rows, batch.cut(out), strict=True):
                assert same_values(found, left), f"{store} of {spec} into {into}"


def check_reduce(
    spec: Uniform, into: Uniform, ranks: Sequence[Sequence[Floats]], dtype: Dtype, *,
    own_rank: int, scale: float,
) -> None:  # fmt: skip
    """Fused reduce of one rank's chunk; `ranks[r]` holds rank `r`'s rows."""
    scatter, gather = compressor_for(spec), compressor_for(into)
    batches = [Batch(scatter, rows, dtype) for rows in ranks]
    mine, world_size = batches[own_rank], len(ranks)
    payloads = [
        None if r == own_rank else batch.compress(stream=stream(SCATTER, r)).payload for r, batch in enumerate(batches)
    ]
    room = mine.table.wire_nbytes + 8
    wires = np.full(world_size * room, 0xEE, np.uint8)
    for r, payload in enumerate(payloads):
        if payload is not None:
            wires[r * room : r * room + len(payload)] = payload
    table_out = with_wire_of(mine.table, gather)
    own, wire_out = mine.x.copy(), np.full(table_out.wire_nbytes, 0xEE, np.uint8)
    scatter.reduce(
        wires, np.arange(world_size, dtype=np.int64) * room, own, wire_out, mine.table, table_out,
        mine.keys, into=gather, senders=[OWN if r == own_rank else stream(SCATTER, r) for r in range(world_size)],
        stream_out=stream(GATHER, own_rank), scale=scale,
    )  # fmt: skip
    own_expected, expected = mine.x.copy(), np.zeros(table_out.wire_nbytes, np.uint8)
    reference.reduce(
        payloads, own_expected, expected, mine.table.rows, table_out.rows, mine.keys,
        [stream(SCATTER, r) for r in range(world_size)], stream(GATHER, own_rank), spec, into,
        scale=scale,
    )  # fmt: skip
    assert wire_out.tobytes() == expected.tobytes(), f"payload of {spec} into {into}, {dtype}"
    for found, left in zip(mine.cut(own), mine.cut(own_expected), strict=True):
        assert same_values(found, left), f"own part of {spec} into {into}, {dtype}"


def with_wire_of(table: SegmentTable, compressor: Compressor) -> SegmentTable:
    """The same rows with the wire offsets of another compressor."""
    rows, at = table.rows.copy(), 0
    for row in rows:
        row[WIRE] = at
        at += compressor.row_nbytes(int(row[2]), table.dtype)
    return SegmentTable(rows, at, table.dtype)
