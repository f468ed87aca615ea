"""The compiled kernels of the uniform quantizer write the oracle's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx.core.spec import Dtype, Uniform
from tests.kernels.compare import check_codec, check_reduce
from tests.strategies import (
    ALL_UNIFORM,
    DTYPES,
    PATTERNS,
    SIZES,
    Floats,
    dtypes,
    gradient,
    gradients,
    uniform_specs,
)


def _rows(seed: object) -> list[Floats]:
    """All boundary sizes, each with another kind of input; a NaN, an infinity and a largest value among them."""
    patterns = sorted(PATTERNS)
    rows = [gradient(patterns[i % len(patterns)], n, seed=seed) for i, n in enumerate(SIZES)]
    rows[-1][5], rows[-2][4000], rows[6][126] = np.nan, -np.inf, np.finfo(np.float32).max
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ALL_UNIFORM, ids=str)
def test_codec_equals_the_oracle(spec: Uniform, dtype: Dtype) -> None:
    check_codec(spec, _rows(0), dtype, scale=1.0, with_residual=False)
    check_codec(spec, _rows(1)[3:9], dtype, scale=1 / 3, with_residual=False)
    check_codec(spec, _rows(2)[3:9], dtype, scale=0.1, with_residual=True)


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("scale", [1.0, 0.37], ids=["unscaled", "scaled"])
def test_every_pattern(pattern: str, scale: float) -> None:
    for spec in (Uniform(4), Uniform(8, 32, "nearest", "fp32"), Uniform(1, 64, "stochastic")):
        rows = [gradient(pattern, numel) for numel in (1, 33, 129, 1000)]
        for dtype in DTYPES:
            check_codec(spec, rows, dtype, scale=scale, with_residual=True)


@pytest.mark.parametrize("start", [2**31 - 1024, 2**32, 2**33 - 1024, 2**36])
def test_far_elements(start: int) -> None:
    """Element numbers beyond 32 bits wrap in the same way."""
    for spec in (Uniform(4), Uniform(3, 32, "stochastic")):
        check_codec(spec, [gradient("normal", 2100)], "fp32", scale=1.0, with_residual=False, starts=[start])


@pytest.mark.parametrize("nan_bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC12345], ids=hex)
def test_any_nan_is_written_as_one(nan_bits: int) -> None:
    row = gradient("normal", 300)
    row[[3, 299]] = np.array([nan_bits] * 2, np.uint32).view(np.float32)
    for spec in (Uniform(4), Uniform(4, scale="fp32")):
        check_codec(spec, [row], "fp32", scale=1.0, with_residual=False)


@settings(max_examples=500)
@given(gradients(), uniform_specs, dtypes, st.floats(2**-10, 8, width=32), st.booleans())
def test_codec_property(row: Floats, spec: Uniform, dtype: Dtype, scale: float, with_residual: bool) -> None:
    with np.errstate(all="ignore"):
        check_codec(spec, [row], dtype, scale=scale, with_residual=with_residual)


@pytest.mark.parametrize("spec", ALL_UNIFORM[::3], ids=str)
def test_reduce_equals_the_oracle(spec: Uniform) -> None:
    index = ALL_UNIFORM.index(spec)
    into = ALL_UNIFORM[(index * 37 + 5) % len(ALL_UNIFORM)]
    for world_size in (1, 2, 3, 5):
        ranks = [_rows(("rank", rank))[2:9] for rank in range(world_size)]
        own_rank, dtype = index % world_size, DTYPES[(index + world_size) % 3]
        scale = 1 / world_size if index % 2 else 1.0
        with np.errstate(all="ignore"):
            check_reduce(spec, into, ranks, dtype, own_rank=own_rank, scale=scale)


@settings(max_examples=300)
@given(
    st.lists(gradients(), min_size=1, max_size=4), uniform_specs, uniform_specs, dtypes,
    st.integers(0, 3), st.sampled_from([1.0, 0.5, 1 / 3]),
)  # fmt: skip
def test_reduce_property(
    ranks: list[Floats], spec: Uniform, into: Uniform, dtype: Dtype, own_rank: int, scale: float
) -> None:
    numel = min(len(row) for row in ranks)
    with np.errstate(all="ignore"):
        check_reduce(
            spec, into, [[row[:numel]] for row in ranks], dtype, own_rank=own_rank % len(ranks),
            scale=scale,
        )  # fmt: skip
