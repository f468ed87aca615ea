"""How far a result may be off, from what its codec guarantees, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.registry import compressor_for
from cgx.core.spec import MAX_BLOCK_SIZE, PhaseSpecs, Spec, Uniform, block_size_of
from cgx.kernels.reference import block_scales

Floats = NDArray[np.float32]

_RUN_NUMEL = 1 << 20  # whole blocks of any size; keeps the copies in double precision small
assert _RUN_NUMEL % MAX_BLOCK_SIZE == 0
# Outward rounding to bf16 of scales that differ a little (2**-7), and fp32 arithmetic.
_SLACK = 1.02
_FP32_LOSS = 2.0**-22


def runs(numel: int) -> Iterator[slice]:
    """Slices that cover ``numel`` elements, in runs of whole blocks."""
    return (slice(start, min(start + _RUN_NUMEL, numel)) for start in range(0, numel, _RUN_NUMEL))


def scales(spec: Uniform, x: Floats) -> tuple[Floats, Floats]:
    """``(low, step)`` of each block of ``x``, as the oracle finds them."""
    size = spec.block_size
    fill = np.full(-len(x) % size, x[-1])  # of the last block, so it changes neither minimum nor maximum
    return block_scales(np.concatenate([x, fill]).reshape(-1, size), spec)


def norm(x: NDArray[Any]) -> float:
    """Euclidean norm, in double precision."""
    return math.sqrt(sum(float(np.square(x[run], dtype=np.float64).sum()) for run in runs(len(x))))


def largest_loss(spec: Spec, x: Floats) -> float:
    """Largest Euclidean norm that the error of encoding ``x`` can have, by the codec's declared bound."""
    guarantees = compressor_for(spec).guarantees
    if not isinstance(spec, Uniform):
        return math.sqrt(guarantees.contraction or 0.0) * norm(x)
    squares = 0.0
    for run in runs(len(x)):
        _, step = scales(spec, x[run])
        squares += spec.block_size * float(np.square(step, dtype=np.float64).sum())
    return guarantees.error_bound * math.sqrt(squares)


def allowed_nmse(specs: PhaseSpecs, parts: Iterable[Floats], mean: NDArray[np.float64]) -> float:
    """Largest relative squared error that a correct reduction of ``parts`` to ``mean`` can have.

    Phase one loses at most the mean of the ranks' losses. Phase two encodes the mean with these errors on it: its
    blocks, and so its steps, are wider by what two elements at the ends of a block can be off.
    """
    losses = [largest_loss(specs.scatter, part) for part in parts]
    one = sum(losses) / len(losses)
    two = largest_loss(specs.gather, mean.astype(np.float32)) + widening(specs) * one
    return float(((one + two) * _SLACK / norm(mean) + _FP32_LOSS) ** 2)


def widening(specs: PhaseSpecs) -> float:
    """Loss of phase two per unit of error that its input carries."""
    guarantees = compressor_for(specs.gather).guarantees
    if not isinstance(specs.gather, Uniform):
        return math.sqrt(guarantees.contraction or 0.0)
    # The largest error may be that of one of the phase-one blocks inside a block of phase two.
    blocks = max(1, specs.gather.block_size // block_size_of(specs.scatter))
    top: int = 2**specs.gather.bits - 1
    return 2 * guarantees.error_bound / top * math.sqrt(blocks)


def nmse(found: Floats, exact: NDArray[np.float64]) -> float:
    """Relative squared error: ``|found - exact|**2 / |exact|**2``; NaN stays NaN."""
    squares = sum(float(np.square(found[run] - exact[run]).sum()) for run in runs(len(exact)))
    return squares / norm(exact) ** 2
