"""Codecs without blocks: elements travel in their own dtype (identity) or as bfloat16 (cast)."""

from __future__ import annotations

from collections.abc import Sequence
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
from cgx.core.segments import CARRIERS, SegmentTable
from cgx.core.spec import Cast, Dtype, Identity
from cgx.core.wire import row_nbytes
from cgx.kernels import dispatch


@final
class CastCompressor:
    """Compressor of ``Identity`` and ``Cast`` specs; NaN and infinity pass through."""

    def __init__(self, spec: Identity | Cast) -> None:
        self.spec = spec

    @property
    def guarantees(self) -> Guarantees:
        """Identity is exact; the cast rounds to nearest: at most 2**-8 of an element, squared for the contraction."""
        exact = isinstance(self.spec, Identity)
        return Guarantees(
            unbiased=exact,
            error_bound=0.0,
            contraction=0.0 if exact else 2.0**-16,
            fixed_size=True,
            granule=1,
        )

    def row_nbytes(self, numel: int, dtype: Dtype) -> int:
        """See ``core.wire.row_nbytes``."""
        return row_nbytes(self.spec, numel, dtype)

    def _view(self, wire: Bytes, table: SegmentTable) -> Array:
        """The payload in the dtype its elements travel in."""
        dtype = CARRIERS[table.dtype if isinstance(self.spec, Identity) else self.spec.dtype]
        return wire[: len(wire) // dtype.itemsize * dtype.itemsize].view(dtype)

    def compress(
        self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, *,
        scale: float = 1.0, residual: NDArray[np.float32] | None = None,
    ) -> int:  # fmt: skip
        """See ``Compressor.compress``."""
        dispatch.cast_compress(x, self._view(wire, table), table, scale=scale, residual=residual)
        return table.wire_nbytes

    def decompress(
        self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, *,
        store: Store = Store.REPLACE,
    ) -> int:  # fmt: skip
        """See ``Compressor.decompress``."""
        dispatch.cast_decompress(self._view(wire, table), out, table, add=store is Store.ADD)
        return table.wire_nbytes

    def reduce(
        self, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
        table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
        senders: Sequence[int], stream_out: int, scale: float,
    ) -> int:  # fmt: skip
        """See ``Compressor.reduce``."""
        same = isinstance(into, CastCompressor) and into.spec == self.spec
        if into is not None and not same:
            return reduce_by_steps(
                self, wires, starts, own, wire_out, table, table_out, keys, into=into,
                senders=senders, stream_out=stream_out, scale=scale,
            )  # fmt: skip
        dispatch.cast_reduce(
            self._view(wires, table), starts, own, self._view(wire_out, table), table, table_out,
            senders=senders, scale=scale, encode=into is not None,
        )  # fmt: skip
        starts += table.wire_nbytes
        return table_out.wire_nbytes
