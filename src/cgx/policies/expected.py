"""What specs will cost and lose, in closed form: a table's entries without encoding anything.

The error of a uniform spec depends on the ranges of the blocks alone. ``Ranges`` keeps them as one number per block
size, so a new candidate costs one multiplication per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from cgx.core.algorithm import Algorithm, cost
from cgx.core.spec import Cast, Dtype, Identity, PhaseSpecs, Rounding, Spec, Uniform
from cgx.core.wire import row_nbytes
from cgx.errors import SpecError
from cgx.policies.base import Floats

# Variance of an element's error in squared steps. Dithered: that of a uniform error, whatever the input. Stochastic:
# f (1 - f) for the fraction f between two levels, averaged over f, and nearest likewise; so both assume steps that are
# small beside the distribution, which holds within some 5 % from three bits on and fails at one.
_VARIANCE: dict[Rounding, float] = {"nearest": 1 / 12, "dithered": 1 / 12, "stochastic": 1 / 6}
# Stochastic and nearest rounding reproduce a block's minimum and maximum. Under bf16 scales these lie on levels only
# while steps are wide beside what the scales were rounded by.
_MAX_BITS_OF_EXACT_ENDS = {"fp32": 8, "bf16": 5}
# bf16 has 8 significant bits and scales are rounded outward: by half a unit of 2**-7 / m on average for a mantissa m,
# which is 2**-8 / (2 ln 2) = 0.28 % for the step, and as much of |low|, about half the range; squared, (1.0042)**2.
_OUTWARD = {"fp32": 1.0, "bf16": 1.0085}
# To bf16, round to nearest: (2**-7)**2 / 12 of the squared power of two below an element, which is on average
# 3 / (8 ln 2) of its square.
_CAST = 2.0**-14 / 12 * 3 / (8 * math.log(2))


@final
@dataclass(frozen=True, slots=True)
class Ranges:
    """What the closed forms need of one tensor; all sums in the metric of the caller.

    Args:
        energy: Sum of squared elements.
        squared: By block size: sum over elements of the squared range (maximum - minimum) of their block.
    """

    energy: float
    squared: Mapping[int, float]


def gather_ranges(
    low: Floats, high: Floats, weight: Floats, *, block_size: int, energy: float, doublings: int = 0
) -> Ranges:
    """Sums up the ranges of a tensor's blocks, for their size and for larger ones.

    Shapes:
        low, high, weight: (blocks,), blocks in order.

    Args:
        low: Minimum of each block.
        high: Maximum of each block.
        weight: Elements of each block, times what one of their squared errors counts in the metric.
        block_size: Of these blocks.
        energy: Sum of squared elements in the same metric.
        doublings: How many times two neighbours are joined to one block.

    Example:
        >>> gather_ranges(np.array([0.0, 1.0]), np.array([2.0, 4.0]), np.array([32.0, 32.0]), block_size=32, energy=1.0,
        ...               doublings=1).squared
        {32: 416.0, 64: 1024.0}
    """
    squared: dict[int, float] = {}
    for _ in range(doublings + 1):
        squared[block_size] = float(np.dot(weight, (high - low) ** 2))
        starts = np.arange(0, len(low), 2)
        if len(starts):
            low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
            weight = np.add.reduceat(weight, starts)
        block_size *= 2
    return Ranges(energy, squared)


def predict_pass_error(spec: Spec, ranges: Ranges, *, dtype: Dtype = "fp32") -> float:
    """Expected squared error of encoding and decoding a tensor once.

    Raises:
        SpecError: ``ranges`` lacks the block size of ``spec``.

    Example:
        >>> predict_pass_error(Uniform(4, scale="fp32"), Ranges(1.0, {128: 2700.0}))
        1.0
    """
    match spec:
        case Identity():
            return 0.0
        case Cast():
            return 0.0 if dtype == "bf16" else _CAST * ranges.energy
        case Uniform(bits=bits, block_size=block_size, rounding=rounding, scale=scale):
            if block_size not in ranges.squared:
                raise SpecError(f"{spec}: the ranges of blocks of {sorted(ranges.squared)} elements are known")
            step_squared = ranges.squared[block_size] / float(2**bits - 1) ** 2
            has_exact_ends = rounding != "dithered" and bits <= _MAX_BITS_OF_EXACT_ENDS[scale]
            rounded = 1 - 2 / block_size if has_exact_ends else 1.0
            return _VARIANCE[rounding] * _OUTWARD[scale] * rounded * step_squared


def predict_mean_error(
    specs: PhaseSpecs, part: Ranges, mean: Ranges, *, world_size: int, dtype: Dtype = "fp32"
) -> float:
    """Expected squared error of the reduced mean under ``scatter_reduce``.

    Phase one: the owner's part is exact, the errors of the other ``W - 1`` parts are independent and divided by ``W``;
    so ``(W - 1) / W**2`` of one pass over a part. Phase two: one pass over the mean, whole.

    Args:
        specs: Specs of both phases.
        part: Ranges of a rank's gradient, averaged over ranks.
        mean: Ranges of the mean.
        world_size: Ranks.
        dtype: Dtype of the gradient.
    """
    if world_size == 1:
        return 0.0
    scattered = predict_pass_error(specs.scatter, part, dtype=dtype) * (world_size - 1) / world_size**2
    return scattered + predict_pass_error(specs.gather, mean, dtype=dtype)


def predict_nbytes(
    specs: PhaseSpecs, numel: int, *, world_size: int, dtype: Dtype = "fp32", algorithm: Algorithm = "scatter_reduce"
) -> int:
    """Bytes that a rank sends for one layer in all phases, heads aside.

    Example:
        >>> predict_nbytes(PhaseSpecs(Uniform(4), Uniform(4)), 4096, world_size=4)
        3264
    """
    scatter, gather = (row_nbytes(spec, numel, dtype) for spec in (specs.scatter, specs.gather))
    return round(cost(algorithm, scatter, gather_copy_nbytes=gather, world_size=world_size).nbytes)
