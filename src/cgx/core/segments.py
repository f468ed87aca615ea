"""Which elements travel where: segments, the stripes that ranks own, and the table that kernels read.

Ownership is a function of the parameter, the position inside it and the world size alone. Buckets and pieces may
change from step to step and after a restart; what a block decodes to does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.core.random import name_hash
from cgx.core.spec import Dtype, PhaseSpecs, block_size_of

STRIPE_NUMEL = 4096  # 16 KiB of fp32: stays in the first-level cache, yet balances layers of a few thousand elements
# NumPy dtype that holds a gradient dtype's elements; bfloat16 travels as its 16-bit pattern.
CARRIERS: dict[Dtype, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
PARAMETER, START, NUMEL, BUFFER, STATE, WIRE = range(6)


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's slice of a flat buffer.

    Args:
        name: The parameter's name, equal on all ranks; it seeds ownership and random bits.
        shape: The parameter's shape (elements lie in memory order, whatever the strides).
        dtype: Dtype of the gradient.
        specs: Specs of both phases.
        owner: Rank that reduces the whole segment, or None to deal its stripes round-robin.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    specs: PhaseSpecs
    owner: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stripe_numel(self) -> int:
        """Elements of a stripe: whole blocks of both phases."""
        return max(STRIPE_NUMEL, block_size_of(self.specs.scatter), block_size_of(self.specs.gather))

    def owners(self, world_size: int) -> NDArray[np.int64]:
        """Owner of each stripe, shape (stripes,).

        Example:
            >>> from cgx.core.spec import EXACT
            >>> Segment("w", (9000,), "fp32", EXACT).owners(2).tolist()
            [0, 1, 0]
        """
        count = -(-self.numel // self.stripe_numel)
        if self.owner is not None:
            return np.full(count, self.owner, np.int64)
        first = name_hash(self.name) % world_size
        return (first + np.arange(count, dtype=np.int64)) % world_size


@final
@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The rows one kernel call works on, all of one spec.

    Shapes:
        rows: (rows, 6) int64, C-contiguous, columns PARAMETER (index into the keys), START (first element inside the
        parameter, a multiple of the block size), NUMEL, BUFFER (first element in the flat buffer), STATE (first
        element in the residual arena) and WIRE (first byte in the payload).

    Args:
        wire_nbytes: Bytes (capacity, for codecs of varying size) of all rows together.
        dtype: Dtype of the parameters, which identity segments keep on the wire.
    """

    rows: NDArray[np.int64]
    wire_nbytes: int
    dtype: Dtype

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numel(self) -> int:
        """Number of elements in all rows."""
        return int(self.rows[:, NUMEL].sum())


def single_row(numel: int, *, wire_nbytes: int, dtype: Dtype = "fp32") -> SegmentTable:
    """A table of one row at offset zero: one tensor, for tests and for the codec as a library."""
    return SegmentTable(np.array([[0, 0, numel, 0, 0, 0]], np.int64), wire_nbytes, dtype)
