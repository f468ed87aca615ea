"""Bytes that no encoder wrote decode to the same numbers everywhere: a payload may be wrong, ranks may not differ."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.compressors.registry import compressor_for
from cgx.core.spec import Uniform
from cgx.kernels import reference
from tests.kernels.compare import same_values
from tests.laws.batch import STREAM, Batch
from tests.strategies import ALL_UNIFORM, rng_of


@pytest.mark.parametrize("spec", ALL_UNIFORM, ids=str)
def test_random_bytes_decode_alike(spec: Uniform) -> None:
    rng = rng_of("hostile", spec)
    batch = Batch(compressor_for(spec), [np.zeros(n, np.float32) for n in (1, 40, 300, 1100)])
    for _ in range(5):
        payload = rng.integers(0, 256, batch.table.wire_nbytes, dtype=np.uint8)
        found = batch.decompress(payload)
        out = batch.flat([np.zeros(len(row), np.float32) for row in batch.rows])
        reference.decompress(payload, out, batch.table.rows, batch.keys, STREAM, spec)
        for a, b in zip(found, batch.cut(out), strict=True):
            assert same_values(a, b)


@pytest.mark.parametrize(
    ("low", "step", "expected"),
    [
        (1.5, -1.0, np.nan),
        (1.5, -0.0, 1.5),
        (1.5, np.nan, np.nan),
        (np.nan, 1.0, np.nan),
        (-np.inf, 1.0, -np.inf),
        (np.inf, 0.0, np.inf),
    ],
)
def test_odd_scales(low: float, step: float, expected: float) -> None:
    spec = Uniform(4, 32, "nearest", "fp32")
    batch = Batch(compressor_for(spec), [np.zeros(32, np.float32)])
    payload = np.zeros(batch.table.wire_nbytes, np.uint8)
    payload[:8] = np.array([low, step], np.float32).view(np.uint8)
    (found,) = batch.decompress(payload)
    assert np.array_equal(found, np.full(32, expected, np.float32), equal_nan=True)
