"""Laws about the bytes: 1 size, 6 determinism, 7 independence, 8 non-finite values, 9 fusion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cgx.compressors.base import OWN, Compressor, Store, reduce_by_steps
from cgx.compressors.registry import compressor_for
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.segments import BUFFER, CARRIERS, NUMEL, WIRE, SegmentTable
from cgx.core.spec import Cast, Identity, Uniform
from cgx.kernels import dispatch
from cgx.kernels.reference import from_f32, to_f32
from tests.laws.batch import STREAM, Batch
from tests.laws.families import Subject
from tests.strategies import DTYPES, SIZES, Floats, gradient, in_dtype

_NOT_FINITE = (np.nan, np.inf, -np.inf)


def check_size(subject: Subject) -> None:
    """A row takes what `row_nbytes` says, every byte of it is written, and none beyond it is written or read."""
    codec = subject.compressor
    for dtype in DTYPES:
        rows = [gradient("normal", numel, seed=subject) for numel in SIZES]
        batch = Batch(codec, rows, dtype)
        payload = batch.compress(garbage=0).payload
        if codec.guarantees.fixed_size:
            assert len(payload) == batch.table.wire_nbytes, f"{dtype}: not the size row_nbytes says"
        again = batch.compress(garbage=0xFF).payload
        assert payload.tobytes() == again.tobytes(), f"{dtype}: bytes were left unwritten"
        found = batch.decompress(payload, garbage=0)
        for row, other in zip(found, batch.decompress(payload, garbage=0xFF), strict=True):
            assert row.tobytes() == other.tobytes(), f"{dtype}: read past the payload"
        _check_odd_address(batch, payload.tobytes(), found)
        for numel in SIZES:
            assert codec.row_nbytes(numel, dtype) % 8 == 0
            assert len(Batch(codec, [gradient("normal", numel)], dtype).compress().payload) <= (
                codec.row_nbytes(numel, dtype)
            )


def _check_odd_address(batch: Batch, payload: bytes, found: Sequence[Floats]) -> None:
    """A wire may start at any address."""
    wire = np.zeros(batch.table.wire_nbytes + 1, np.uint8)[1:]
    used = batch.compressor.compress(batch.x, wire, batch.table, batch.keys, STREAM)
    assert wire[:used].tobytes() == payload
    out = np.zeros(batch.buffer_numel, np.float32)
    batch.compressor.decompress(wire, out, batch.table, batch.keys, STREAM)
    for place, row in zip(batch.table.rows, found, strict=True):
        assert out[place[BUFFER] :][: place[NUMEL]].tobytes() == row.tobytes()


def check_determinism(subject: Subject) -> None:
    """The same input and key give the same bytes, on any number of threads; another stream or key gives others."""
    rows = [gradient("normal", numel, seed=subject) for numel in (4096, 129, 1000, 4097, 33, 4096)]
    batch = Batch(subject.compressor, rows)
    payload = batch.compress().payload
    found = b"".join(row.tobytes() for row in batch.decompress(payload))
    assert payload.tobytes() == batch.compress().payload.tobytes()
    for count in (2, 5):
        with threads(count):
            assert payload.tobytes() == batch.compress().payload.tobytes(), f"{count} threads"
            again = b"".join(row.tobytes() for row in batch.decompress(payload))
            assert found == again, f"{count} threads"
    elsewhere = batch.compress(stream=stream(SCATTER, STREAM + 1)).payload
    assert (payload.tobytes() != elsewhere.tobytes()) == subject.is_random
    batch.keys = batch.keys + np.uint64(1)
    assert (payload.tobytes() != batch.compress().payload.tobytes()) == subject.is_random


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Spreads calls over `count` threads, however little there is to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGX_THREADS", str(count))
        patch.setattr(dispatch, "_MIN_NUMEL_PER_THREAD", 64)
        dispatch._pool.cache_clear()
        try:
            yield
        finally:
            dispatch._pool().shutdown()
            dispatch._pool.cache_clear()


def check_independence(subject: Subject) -> None:
    """A granule's bytes depend on nothing but its elements, their place in the parameter and the key."""
    size = subject.granule_numel
    numel = 3 * size + min(33, size)
    x = gradient("normal", numel, seed=subject)
    whole = _granules(subject, x, 0)
    if subject.compressor.guarantees.granule:
        cut = [piece for first in range(0, numel, size) for piece in _alone(subject, x, first)]
        assert cut == whole, "a granule alone has other bytes than in its tensor"
        halves = _granules(subject, x[: 2 * size], 0) + _granules(subject, x[2 * size :], 2 * size)
        assert halves == whole, "bytes depend on how a tensor is cut in rows"
        changed = x * np.float32(1000)
        changed[size : 2 * size] = x[size : 2 * size]
        assert _granules(subject, changed, 0)[1] == whole[1], "a neighbour changed a granule"
    rows = [x, x[:33], gradient("outlier", numel), x[:0]]
    together = Batch(subject.compressor, rows).compress().payload.tobytes()
    singly = [Batch(subject.compressor, [row] * (i + 1), starts=[0] * i + [i * 8192]) for i, row in enumerate(rows)]
    last = [_last_row(batch) for batch in singly]
    assert together == b"".join(last), "a row's bytes depend on the rows around it"


def _alone(subject: Subject, x: Floats, first: int) -> list[bytes]:
    return _granules(subject, x[first : first + subject.granule_numel], first)


def _granules(subject: Subject, x: Floats, start: int) -> list[bytes]:
    """Bytes of each granule of one row that starts at element `start` of the parameter."""
    payload = Batch(subject.compressor, [x], starts=[start]).compress().payload
    return subject.family.granules(subject.spec, payload, len(x), "fp32")


def _last_row(batch: Batch) -> bytes:
    """Bytes of the last row, compressed by itself (under the key that it has in `batch`)."""
    rows = batch.table.rows[-1:].copy()
    rows[:, WIRE] = 0
    table = SegmentTable(rows, batch.compressor.row_nbytes(int(rows[0, NUMEL]), "fp32"), "fp32")
    wire = np.zeros(table.wire_nbytes, np.uint8)
    used = batch.compressor.compress(batch.x, wire, table, batch.keys, STREAM)
    return wire[:used].tobytes()


def check_non_finite(subject: Subject) -> None:
    """NaN and infinity reach every receiver: a whole poisoned granule in canonical bytes, or the element itself."""
    size = subject.granule_numel
    numel = 3 * size + min(33, size)
    clean = gradient("normal", numel, seed=subject)
    for first in (0, size, 3 * size):
        canonical = set()
        inside = np.zeros(numel, np.bool_)
        inside[first : first + size] = subject.poisons
        for value in _NOT_FINITE:
            for place in {first, min(first + size, numel) - 1}:
                x = clean.copy()
                x[place] = value
                inside[place] = True
                canonical.add(_check_poison(subject, clean, x, inside))
                if not subject.poisons:
                    inside[place] = False
        if subject.poisons:
            assert len(canonical) == 1, "the bytes of a poisoned granule are not canonical"
    _check_finite_stays_finite(subject)


def _check_poison(subject: Subject, clean: Floats, x: Floats, inside: NDArray[np.bool_]) -> bytes:
    """Checks one input with one bad element; returns the bytes of the granule it is in."""
    batch, reference = Batch(subject.compressor, [x]), Batch(subject.compressor, [clean])
    old = [np.full(len(x), 0.25, np.float32)]
    encoded = batch.compress(residual=old)
    (found,) = batch.decompress(encoded.payload)
    if subject.poisons:
        assert np.isnan(found[inside]).all(), "a value that is not finite was hidden"
    else:
        assert np.array_equal(found[inside], x[inside], equal_nan=True), "not passed through"
    assert (encoded.residual[0][inside] == 0).all(), "a poisoned element kept a residual"
    expected = reference.compress(residual=old)
    (untouched,) = reference.decompress(expected.payload)
    assert (found[~inside] == untouched[~inside]).all(), "poison reached another granule"
    assert (encoded.residual[0][~inside] == expected.residual[0][~inside]).all()
    (there,) = [int(i) for i in np.flatnonzero(~np.isfinite(x))]
    granules = subject.family.granules(subject.spec, encoded.payload, len(x), "fp32")
    return granules[there // subject.granule_numel if len(granules) > 1 else 0]


def _check_finite_stays_finite(subject: Subject) -> None:
    """Poison needs a cause: only a range that overflows float32 may poison finite elements."""
    for dtype in DTYPES:
        x = in_dtype(gradient("largest_fp16", 300, seed=subject), dtype)
        batch = Batch(subject.compressor, [to_f32(x)], dtype)
        assert np.isfinite(batch.round_trip()[0]).all()


def check_fusion(subject: Subject) -> None:
    """`Add` equals decode then add; `reduce` equals its steps: any place of the own part, or none, any second phase."""
    _check_add(subject)
    second = [
        subject.compressor,
        compressor_for(Uniform(3, 256, "dithered", "fp32")),
        compressor_for(Uniform(5, 32, "nearest", "bf16")),
        compressor_for(Cast()),
        compressor_for(Identity()),
        None,
    ]
    for i, into in enumerate(second):
        for world_size in (2, 3, 5):
            for own_rank in range(-1, world_size):
                _check_reduce(subject, into, world_size, own_rank, i)


def _check_add(subject: Subject) -> None:
    for dtype in DTYPES:
        rows = [gradient("normal", numel, seed=subject) for numel in (0, 1, 33, 129, 1100)]
        batch = Batch(subject.compressor, rows, dtype)
        payload = batch.compress().payload
        decoded = batch.decompress(payload)
        there = [in_dtype(gradient("shifted", len(row)), dtype) for row in rows]
        replaced = batch.decompress(payload, into=there)
        added = batch.decompress(payload, into=there, store=Store.ADD)
        for value, old, new, total in zip(decoded, there, replaced, added, strict=True):
            assert new.tobytes() == from_f32(value, CARRIERS[dtype]).tobytes()
            total_by_steps = from_f32(to_f32(old) + value, CARRIERS[dtype])
            assert total.tobytes() == total_by_steps.tobytes(), f"{dtype}: ADD is not decode then add"


def _check_reduce(subject: Subject, into: Compressor | None, world_size: int, own_rank: int, variant: int) -> None:
    scatter, dtype = subject.compressor, DTYPES[(variant + world_size + own_rank) % 3]
    senders = [OWN if rank == own_rank else stream(SCATTER, 7 * rank) for rank in range(world_size)]
    scale = 1 / world_size if variant % 2 else 1.0
    batches = [
        Batch(scatter, [gradient("normal", n, seed=(r, n)) for n in (1100, 33, 0, 128)], dtype)
        for r in range(world_size)
    ]
    mine = batches[own_rank]
    room = mine.table.wire_nbytes + 8
    wires = np.full(world_size * room, 0xEE, np.uint8)
    for rank, batch in enumerate(batches):
        if rank != own_rank:
            payload = batch.compress(stream=senders[rank]).payload
            wires[rank * room + 8 :][: len(payload)] = payload
    table_out = _placed(mine.table, into)
    results: list[tuple[Any, ...]] = []
    for reduce in (scatter.reduce, lambda *a, **k: reduce_by_steps(scatter, *a, **k)):
        own, starts = mine.x.copy(), np.arange(world_size, dtype=np.int64) * room + 8
        out = np.full(table_out.wire_nbytes + 16, 0xEE, np.uint8)
        used = reduce(
            wires, starts, own, out, mine.table, table_out, mine.keys, into=into,
            senders=senders, stream_out=stream(GATHER, 5), scale=scale,
        )  # fmt: skip
        mine.cut(own)
        if into is not None:
            assert (out[used:] == 0xEE).all(), "reduce wrote past its payload"
        results.append((out[:used].tobytes() if into else b"", own.tobytes(), _others(starts, own_rank)))
    assert results[0] == results[1], f"reduce is not its steps: {world_size} ranks, own {own_rank}, {into}"


def _placed(table: SegmentTable, into: Compressor | None) -> SegmentTable:
    """The same rows with the wire offsets of `into`."""
    rows, at = table.rows.copy(), 0
    for row in rows:
        row[WIRE] = at
        at += 0 if into is None else into.row_nbytes(int(row[NUMEL]), table.dtype)
    return replace(table, rows=rows, wire_nbytes=at)


def _others(starts: NDArray[np.int64], own_rank: int) -> list[int]:
    """How far `starts` moved; the own entry is unused."""
    return [int(start) for rank, start in enumerate(starts) if rank != own_rank]
