"""Inputs that several suites share: sizes around every boundary, awkward gradients, and strategies that mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cgx.core.segments import CARRIERS
from cgx.core.spec import Dtype, Rounding, ScaleDtype, Uniform
from cgx.kernels.reference import from_f32

Floats = NDArray[np.float32]

# Around a tile (32), a block of the default spec (128) and a stripe (4096).
SIZES = (0, 1, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
SCALES: tuple[ScaleDtype, ...] = get_args(ScaleDtype)
BLOCK_SIZES = (32, 128, 1024)
ALL_UNIFORM = tuple(
    Uniform(bits, block_size, rounding, scale)
    for bits in range(1, 9)
    for block_size in BLOCK_SIZES
    for rounding in ROUNDINGS
    for scale in SCALES
)

Pattern = Callable[[np.random.Generator, int], NDArray[Any]]


def _outlier(rng: np.random.Generator, numel: int) -> NDArray[Any]:
    values = rng.standard_normal(numel)
    values[numel // 2 : numel // 2 + 1] = 1e4
    return values


PATTERNS: dict[str, Pattern] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "small": lambda rng, n: rng.standard_normal(n) * 1e-12,
    "magnitudes": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-6, 5, n),
    "shifted": lambda rng, n: 100 + rng.standard_normal(n),
    "outlier": _outlier,
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.05),
    "signs": lambda rng, n: rng.choice([-1.0, 1.0], n),
    "on_grid": lambda rng, n: rng.integers(-8, 8, n) / 4.0,
    "zeros": lambda rng, n: np.zeros(n),
    "signed_zeros": lambda rng, n: rng.choice([-0.0, 0.0], n),
    "constant": lambda rng, n: np.full(n, -1.1),
    # Subnormal in fp32: steps this small are raised to 2**-110.
    "subnormal": lambda rng, n: rng.integers(-200, 200, n) * 2.0**-149,
    "largest_fp16": lambda rng, n: rng.choice([-65504.0, 0.0, 65504.0], n),
    # The range of such a block overflows fp32 (poison), or nearly does.
    "huge": lambda rng, n: rng.uniform(-1, 1, n) * 10.0 ** rng.uniform(36, 38.5),
}


def rng_of(*words: object) -> np.random.Generator:
    """Return a generator that depends on nothing but the words."""
    return np.random.default_rng(list("/".join(map(str, words)).encode()))


def gradient(pattern: str, numel: int, *, seed: object = 0) -> Floats:
    """Return `numel` float32 elements of a pattern."""
    return PATTERNS[pattern](rng_of(pattern, numel, seed), numel).astype(np.float32)


def in_dtype(values: Floats, dtype: Dtype) -> NDArray[Any]:
    """Round float32 to a gradient's dtype, in the carrier that kernels read."""
    return from_f32(np.ascontiguousarray(values, np.float32), CARRIERS[dtype])


uniform_specs: st.SearchStrategy[Uniform] = st.builds(
    Uniform,
    bits=st.integers(1, 8),
    block_size=st.sampled_from([32, 64, 128, 256, 1024]),
    rounding=st.sampled_from(ROUNDINGS),
    scale=st.sampled_from(SCALES),
)
numels = st.one_of(st.sampled_from(SIZES), st.integers(0, 700))
dtypes = st.sampled_from(DTYPES)


@st.composite
def gradients(draw: st.DrawFn) -> Floats:
    """Draw a whole pattern with a few elements replaced by any float32, NaN and infinities included."""
    values = gradient(draw(st.sampled_from(sorted(PATTERNS))), draw(numels), seed=draw(st.integers(0, 99)))
    if len(values):
        places = st.integers(0, len(values) - 1)
        for place, value in draw(st.lists(st.tuples(places, st.floats(width=32)), max_size=3)):
            values[place] = value
    return values
