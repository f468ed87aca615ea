"""What the laws must know about a family of specs: how far an element may be off, and where a granule's bytes are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.base import Bytes, Compressor
from cgx.core.segments import CARRIERS
from cgx.core.spec import Dtype, Uniform
from cgx.core.wire import TILE
from cgx.kernels.reference import block_scales
from tests.strategies import Floats

Floats64 = NDArray[np.float64]
Poison = NDArray[np.bool_]

F32_MAX = float(np.finfo(np.float32).max)


@final
@dataclass(frozen=True)
class Family:
    """How to judge any codec of a family.

    Args:
        step: `(spec, values)` to the distance between levels at each element; NaN where the block is poisoned.
        precision: `(spec, values, step)` to the rounding allowed on top of `error_bound` steps.
        granules: `(spec, payload of one row, numel, dtype)` to the bytes of each granule.
    """

    step: Callable[[Any, Floats], Floats64]
    precision: Callable[[Any, Floats, Floats64], Floats64]
    granules: Callable[[Any, Bytes, int, Dtype], list[bytes]]


def grid_of(values: Floats, block_size: int) -> Floats:
    """Return `values` as rows of blocks, the last one filled with its own first element."""
    numel = len(values)
    last = (numel - 1) // block_size * block_size
    fill = np.repeat(values[last : last + 1], -numel % block_size)
    return np.concatenate([values, fill]).reshape(-1, block_size)


def _spread(per_block: Floats, numel: int, block_size: int) -> Floats64:
    return np.repeat(per_block.astype(np.float64), block_size)[:numel]


def _uniform_step(spec: Uniform, values: Floats) -> Floats64:
    _, step = block_scales(grid_of(values, spec.block_size), spec)
    return _spread(step, len(values), spec.block_size)


def _uniform_precision(spec: Uniform, values: Floats, step: Floats64) -> Floats64:
    """Rounding of codes and decoded values.

    A fixed-point code is truncated once (2**-16 steps) and loses three fp32 roundings of numbers below 2**bits steps
    (3 * 2**bits * 2**-24). Decoding rounds a product and a sum, each below |low| + (2**bits) steps.
    """
    top = 2.0**spec.bits
    low, _ = block_scales(grid_of(values, spec.block_size), spec)
    reach = np.abs(_spread(low, len(values), spec.block_size)) + top * step
    return step * (2.0**-16 + 3 * top * 2.0**-24) + reach * 2.0**-23 + 2.0**-149


def _uniform_granules(spec: Uniform, payload: Bytes, numel: int, dtype: Dtype) -> list[bytes]:
    pair = 8 if spec.scale == "fp32" else 4
    blocks, tiles = -(-numel // spec.block_size), -(-numel // TILE)
    scales, codes = payload[: blocks * pair], payload[blocks * pair :][: tiles * 4 * spec.bits]
    per_block = spec.block_size // TILE * 4 * spec.bits
    return [
        scales[i * pair : (i + 1) * pair].tobytes() + codes[i * per_block : (i + 1) * per_block].tobytes()
        for i in range(blocks)
    ]


def _no_step(spec: object, values: Floats) -> Floats64:
    return np.zeros(len(values))


def _exactly(spec: object, values: Floats, step: Floats64) -> Floats64:
    return np.zeros(len(values))


def _to_bf16(spec: object, values: Floats, step: Floats64) -> Floats64:
    """Half a unit of 8 significant bits; below 2**-126 the unit is 2**-133."""
    _, exponent = np.frexp(np.abs(values.astype(np.float64)))
    half_units: Floats64 = np.exp2(np.maximum(exponent - 8, -133) - 1.0)
    return half_units


def _elements(itemsize: Callable[[Dtype], int]) -> Callable[..., list[bytes]]:
    def granules(spec: object, payload: Bytes, numel: int, dtype: Dtype) -> list[bytes]:
        size = itemsize(dtype)
        return [payload[i * size : (i + 1) * size].tobytes() for i in range(numel)]

    return granules


def _one_granule(spec: object, payload: Bytes, numel: int, dtype: Dtype) -> list[bytes]:
    return [payload.tobytes()]


UNIFORM = Family(_uniform_step, _uniform_precision, _uniform_granules)
IN_OWN_DTYPE = Family(_no_step, _exactly, _elements(lambda dtype: CARRIERS[dtype].itemsize))
IN_BF16 = Family(_no_step, _to_bf16, _elements(lambda dtype: 2))
WHOLE_ROWS = Family(_no_step, _exactly, _one_granule)


@final
@dataclass(frozen=True)
class Subject:
    """A compressor on trial."""

    spec: Any
    family: Family
    compressor: Compressor

    def __str__(self) -> str:
        return str(self.spec)

    @property
    def granule_numel(self) -> int:
        """Elements of a granule; for codecs whose granule is a whole row, of a row of that size."""
        return self.compressor.guarantees.granule or 128

    @property
    def is_random(self) -> bool:
        """True when the payload depends on the key."""
        return self.compressor.guarantees.unbiased and self.compressor.guarantees.error_bound > 0

    @property
    def poisons(self) -> bool:
        """True when a value that is not finite takes its whole granule with it."""
        return self.compressor.guarantees.error_bound > 0

    def error_allowed(self, values: Floats) -> tuple[Floats64, Poison]:
        """Largest error of each element, and which elements must decode to NaN."""
        step = self.family.step(self.spec, values)
        with np.errstate(all="ignore"):
            bound = self.compressor.guarantees.error_bound * step
            return bound + self.family.precision(self.spec, values, step), np.isnan(step)
