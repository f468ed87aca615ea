"""The uniform quantizer: blocks on equally spaced levels (CGX, arXiv 2111.08617; QSGD, arXiv 1610.02132)."""

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
from cgx.core.segments import SegmentTable
from cgx.core.spec import Dtype, Uniform
from cgx.core.wire import row_nbytes
from cgx.kernels import dispatch


@final
class UniformCompressor:
    """Compressor of ``Uniform`` specs; its ``reduce`` is one fused pass when phase two is uniform as well."""

    def __init__(self, spec: Uniform) -> None:
        self.spec = spec

    @property
    def guarantees(self) -> Guarantees:
        """Error at most half a step for nearest and dithered, one step for stochastic rounding.

        Contraction: an element's squared error is at most ``(bound * step)**2`` and the range of a block at most
        ``sqrt(2)`` times its norm, hence ``2 B (bound / top)**2``, with 5 % for scales rounded outward.
        """
        spec = self.spec
        bound = 1.0 if spec.rounding == "stochastic" else 0.5
        contraction = spec.block_size * bound**2 * 2 / (2**spec.bits - 1) ** 2
        return Guarantees(
            unbiased=spec.rounding != "nearest",
            error_bound=bound,
            contraction=contraction * 1.05 if contraction * 1.05 < 1 else None,
            fixed_size=True,
            granule=spec.block_size,
        )

    def row_nbytes(self, numel: int, dtype: Dtype) -> int:
        """See ``core.wire.row_nbytes``."""
        return row_nbytes(self.spec, numel, dtype)

    def compress(
        self, x: Array, wire: Bytes, table: SegmentTable, keys: Keys, stream: int, *,
        scale: float = 1.0, residual: NDArray[np.float32] | None = None,
    ) -> int:  # fmt: skip
        """See ``Compressor.compress``."""
        dispatch.uniform_compress(x, wire, table, keys, stream, self.spec, scale=scale, residual=residual)
        return table.wire_nbytes

    def decompress(
        self, wire: Bytes, out: Array, table: SegmentTable, keys: Keys, stream: int, *,
        store: Store = Store.REPLACE,
    ) -> int:  # fmt: skip
        """See ``Compressor.decompress``."""
        dispatch.uniform_decompress(wire, out, table, keys, stream, self.spec, add=store is Store.ADD)
        return table.wire_nbytes

    def reduce(
        self, wires: Bytes, starts: NDArray[np.int64], own: Array, wire_out: Bytes,
        table: SegmentTable, table_out: SegmentTable, keys: Keys, *, into: Compressor | None,
        senders: Sequence[int], stream_out: int, scale: float,
    ) -> int:  # fmt: skip
        """See ``Compressor.reduce``."""
        if into is not None and not isinstance(into, UniformCompressor):
            return reduce_by_steps(
                self, wires, starts, own, wire_out, table, table_out, keys, into=into,
                senders=senders, stream_out=stream_out, scale=scale,
            )  # fmt: skip
        dispatch.uniform_reduce(
            wires, starts, own, wire_out, table, table_out, keys, self.spec,
            self.spec if into is None else into.spec, senders=senders, stream_out=stream_out,
            scale=scale, encode=into is not None,
        )  # fmt: skip
        starts += table.wire_nbytes
        return table_out.wire_nbytes
