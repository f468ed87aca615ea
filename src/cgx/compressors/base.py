"""What a compressor is, and the laws it keeps (``tests/laws`` runs them over every registered spec).

1 size: exactly ``row_nbytes`` bytes per row (at most, when not ``fixed_size``), for every numel >= 0.
2 bound: every element's error stays within ``error_bound`` steps of its granule.
3 unbiased, where declared.  4 conservation: input + old residual = decoded + new residual, to 2 ulp.
5 fixed points: all-zero granules always, constant ones when ``low`` is representable, on-grid values for nearest and
stochastic when the step is a power of two.
6 determinism: same input and key, same bytes, on every kernel and machine.
7 independence: a granule's bytes do not depend on its neighbours.
8 non-finite: NaN or infinity poisons its whole granule to NaN, with canonical bytes; codecs without blocks pass it on.
9 fusion: ``Add`` equals decode then add; ``reduce`` equals its steps.  10 contraction, where declared.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from cgx.core.segments import BUFFER, NUMEL, SegmentTable
from cgx.core.spec import Dtype
from cgx.kernels.reference import from_f32, to_f32

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Keys = NDArray[np.uint64]
OWN = -1  # among senders: the caller's own part, exact


class Store(enum.Enum):
    """What decoding does with what is already there."""

    REPLACE = enum.auto()
    ADD = enum.auto()


@final
@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a compressor declares about itself; the law suite holds it to this.

    Args:
        unbiased: The mean over keys is the input (to 2**-16 of a step).
        error_bound: Largest error of an element, in steps of its block (0: exact up to the wire dtype).
        contraction: Upper bound of squared error over squared norm, or None.
        fixed_size: Payload sizes follow from numel alone.
        granule: Elements whose bytes belong together; 0 for the whole row.
    """

    unbiased: bool
    error_bound: float
    contraction: float | None
    fixed_size: bool
    granule: int


class Compressor(Protocol):
    """Floats to bytes and back, for one spec, on all rows of a table in one call.

    ``x``, ``out`` and ``own`` are flat float32, float16 or (bfloat16) uint16 arrays, wires flat uint8 arrays. The
    caller allocates everything. ``stream`` is the payload's part of the key.
    """

    @property
    def guarantees(self) -> Guarantees:
        """What this compressor promises."""
        ...

    def row_nbytes(self, numel: int, dtype: Dtype) -> int:
        """Bytes of a row (its capacity when sizes vary)."""
        ...

    def compress(
        self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, *,
        scale: float = 1.0, residual: NDArray[np.float32] | None = None,
    ) -> int:  # fmt: skip
        """Writes ``x * scale + residual``, leaves the new residual, and returns the bytes used."""
        ...

    def decompress(
        self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, *,
        store: Store = Store.REPLACE,
    ) -> int:  # fmt: skip
        """Reads all rows into ``out`` and returns the bytes read."""
        ...

    def reduce(
        self, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
        table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
        senders: Sequence[int], stream_out: int, scale: float,
    ) -> int:  # fmt: skip
        """Sums the rows of all senders in their order in fp32, scales, and re-encodes with ``into``.

        ``wires[starts[i]:]`` is the payload of stream ``senders[i]``; ``OWN`` stands, at most once, for the exact rows
        in ``own`` (its start is unused). ``starts`` moves past what was read. ``own`` ends as the decoded value of
        ``wire_out``, which is written under ``stream_out``, or as the plain scaled sum when ``into`` is None.
        Returns the bytes used in ``wire_out``.
        """
        ...


@np.errstate(all="ignore")  # infinities and NaN are data here: they must arrive, not warn
def reduce_by_steps(
    scatter: Compressor, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
    table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
    senders: Sequence[int], stream_out: int, scale: float,
) -> int:  # fmt: skip
    """``Compressor.reduce`` written with the other two methods: the default, and what fusion must equal."""
    total = np.zeros(table.numel, np.float32)
    rows, ends = table.rows, np.cumsum(table.rows[:, NUMEL])
    flat, flat_out = rows.copy(), table_out.rows.copy()
    flat[:, BUFFER] = flat_out[:, BUFFER] = ends - rows[:, NUMEL]
    flat_table = replace(table, rows=flat)
    slices = [
        (slice(int(r[BUFFER]), int(r[BUFFER] + r[NUMEL])), slice(int(e - r[NUMEL]), int(e)))
        for r, e in zip(rows, ends, strict=True)
    ]
    for i, sender in enumerate(senders):
        if sender == OWN:
            for theirs, ours in slices:
                part = to_f32(own[theirs])
                total[ours] = total[ours] + part if i else part
            continue
        starts[i] += scatter.decompress(
            wires[starts[i] :], total, flat_table, keys, sender, store=Store.ADD if i else Store.REPLACE
        )
    total *= np.float32(scale)
    used = 0
    if into is not None:
        out_table = replace(table_out, rows=flat_out)
        used = into.compress(total, wire_out, out_table, keys, stream_out)
        into.decompress(wire_out, total, out_table, keys, stream_out)
    for theirs, ours in slices:
        own[theirs] = from_f32(total[ours], own.dtype)
    return used
