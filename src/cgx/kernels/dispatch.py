"""Chooses the kernels for a call and spreads it over threads.

Buffers are NumPy arrays: flat float32, float16 or, for bfloat16, uint16. (CUDA buffers will come in as torch tensors
and find Triton kernels here.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.core.env import codec_threads
from cgx.core.segments import NUMEL, WIRE, SegmentTable
from cgx.core.spec import Uniform
from cgx.core.wire import TILE

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
_NOTHING = np.empty(0, np.float32)
_ROUNDING = {"nearest": 0, "stochastic": 1, "dithered": 2}
_MIN_NUMEL_PER_THREAD = 1 << 17  # about 40 us of encoding: below that, waking a thread costs more


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(codec_threads(), thread_name_prefix="cgx-codec")


def _spread(table: SegmentTable, call: Callable[[int, int], None]) -> None:
    """Runs ``call(first_row, stop_row)`` over all rows, on several threads when there is enough work."""
    rows = len(table)
    if rows == 0:
        return
    parts = min(codec_threads(), rows, max(1, table.numel // _MIN_NUMEL_PER_THREAD))
    if parts == 1:
        call(0, rows)
        return
    ends = np.cumsum(table.rows[:, NUMEL])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts).tolist()
    bounds = [0, *cuts, rows]
    for done in [_pool().submit(call, a, b) for a, b in pairwise(bounds)]:
        done.result()


def carrier(x: Array) -> Array:
    """``x`` in the dtype the kernels read its format from: int16 for IEEE halves, the others as they are."""
    return x.view(np.int16) if x.dtype == np.float16 else x


def _spec(spec: Uniform) -> tuple[int, int, int, int]:
    return spec.bits, spec.block_size, _ROUNDING[spec.rounding], int(spec.scale == "fp32")


def _scratch(table: SegmentTable) -> NDArray[np.float32]:
    """Two blocks of the longest row, in whole tiles."""
    longest = -(-int(table.rows[:, NUMEL].max()) // TILE) * TILE
    return np.empty(2 * longest, np.float32)


def _own_at(senders: Sequence[int]) -> int:
    """Place of the own part among the senders, -1 for none."""
    return next((i for i, sender in enumerate(senders) if sender < 0), -1)


def uniform_compress(
    x: Array, wire: Bytes, table: SegmentTable, keys: NDArray[np.uint64], key_stream: int,
    spec: Uniform, *, scale: float, residual: NDArray[np.float32] | None,
) -> None:  # fmt: skip
    """``kernels.reference.compress`` on this machine's fastest kernel."""
    from cgx.kernels.cpu import uniform

    source, keep = carrier(x), residual is not None
    owed = _NOTHING if residual is None else residual

    def call(first: int, stop: int) -> None:
        uniform.compress(
            source, wire, table.rows, keys, key_stream, _spec(spec), np.float32(scale), owed, keep,
            _scratch(table), np.empty(8, source.dtype), first, stop,
        )  # fmt: skip

    _spread(table, call)


def uniform_decompress(
    wire: Bytes, out: Array, table: SegmentTable, keys: NDArray[np.uint64], key_stream: int,
    spec: Uniform, *, add: bool,
) -> None:  # fmt: skip
    """``kernels.reference.decompress`` on this machine's fastest kernel."""
    from cgx.kernels.cpu import uniform

    target = carrier(out)

    def call(first: int, stop: int) -> None:
        uniform.decompress(
            wire, target, table.rows, keys, key_stream, _spec(spec), add,
            np.empty(TILE, target.dtype), first, stop,
        )  # fmt: skip

    _spread(table, call)


def uniform_reduce(
    wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes, table: SegmentTable,
    table_out: SegmentTable, keys: NDArray[np.uint64], spec: Uniform, spec_out: Uniform, *,
    senders: Sequence[int], stream_out: int, scale: float, encode: bool,
) -> None:  # fmt: skip
    """``kernels.reference.reduce`` on this machine's fastest kernel; without ``encode`` only the sum is left.

    A negative sender is the own part.
    """
    from cgx.kernels.cpu import uniform

    mine, rows_out = carrier(own), np.ascontiguousarray(table_out.rows[:, WIRE])
    streams, own_at = np.array(senders, np.int64), _own_at(senders)

    def call(first: int, stop: int) -> None:
        uniform.reduce(
            wires, starts, mine, wire_out, table.rows, rows_out, keys, streams, stream_out,
            _spec(spec), _spec(spec_out), own_at, np.float32(scale), encode, _scratch(table),
            np.empty(8, mine.dtype), first, stop,
        )  # fmt: skip

    _spread(table, call)


def cast_compress(
    x: Array, wire: Array, table: SegmentTable, *, scale: float,
    residual: NDArray[np.float32] | None,
) -> None:  # fmt: skip
    """Writes ``x * scale + residual`` in the dtype of ``wire``."""
    from cgx.kernels.cpu import cast

    source, target, keep = carrier(x), carrier(wire), residual is not None
    owed = _NOTHING if residual is None else residual

    def call(first: int, stop: int) -> None:
        cast.compress(
            source, target, table.rows, np.float32(scale), owed, keep, _scratch(table),
            np.empty(8, source.dtype), np.empty(8, target.dtype), first, stop,
        )  # fmt: skip

    _spread(table, call)


def cast_decompress(wire: Array, out: Array, table: SegmentTable, *, add: bool) -> None:
    """Reads rows in the dtype of ``wire`` into ``out``."""
    from cgx.kernels.cpu import cast

    source, target = carrier(wire), carrier(out)

    def call(first: int, stop: int) -> None:
        cast.decompress(
            source, target, table.rows, add, _scratch(table), np.empty(8, target.dtype),
            np.empty(8, source.dtype), first, stop,
        )  # fmt: skip

    _spread(table, call)


def cast_reduce(
    wires: Array, starts: NDArray[np.int64], own: Array, wire_out: Array, table: SegmentTable,
    table_out: SegmentTable, *, senders: Sequence[int], scale: float, encode: bool,
) -> None:  # fmt: skip
    """Sums in fp32 in the order of ``senders``, scales, writes as ``wire_out`` does, and leaves that in ``own``."""
    from cgx.kernels.cpu import cast

    source, mine, target = carrier(wires), carrier(own), carrier(wire_out)
    rows_out, own_at = np.ascontiguousarray(table_out.rows[:, WIRE]), _own_at(senders)

    def call(first: int, stop: int) -> None:
        cast.reduce(
            source, starts, mine, target, table.rows, rows_out, own_at, np.float32(scale),
            encode, _scratch(table), np.empty(8, mine.dtype), np.empty(8, source.dtype), first,
            stop,
        )  # fmt: skip

    _spread(table, call)
