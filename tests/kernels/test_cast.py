"""The compiled kernels of codecs without blocks round as the oracle's converters do."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.compressors.registry import compressor_for
from cgx.core.segments import CARRIERS
from cgx.core.spec import Cast, Dtype, Identity
from cgx.kernels.reference import from_f32, to_f32
from tests.kernels.compare import same_values
from tests.laws.batch import Batch
from tests.strategies import DTYPES, PATTERNS, SIZES, gradient, in_dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [Identity(), Cast()], ids=str)
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_rounds_once_to_nearest_even(spec: Identity | Cast, dtype: Dtype, pattern: str) -> None:
    on_wire = CARRIERS[dtype if spec == Identity() else "bf16"]
    rows = [gradient(pattern, numel) for numel in SIZES]
    batch = Batch(compressor_for(spec), rows, dtype)
    for scale in (1.0, 1 / 3):
        owed = [row[::-1] * np.float32(0.01) for row in rows]
        encoded = batch.compress(scale=scale, residual=owed)
        for x, old, found, left in zip(
            batch.inputs, owed, batch.decompress(encoded.payload), encoded.residual, strict=True
        ):
            with np.errstate(all="ignore"):
                values = x * np.float32(scale) + old
                sent = to_f32(from_f32(values, on_wire))
                lost = values - sent
            assert same_values(found, sent)
            assert same_values(left, np.where(np.isfinite(lost), lost, np.float32(0)))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_16_bit_pattern_survives_identity(dtype: Dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = to_f32(bits.view(CARRIERS[dtype]))
    batch = Batch(compressor_for(Identity()), [values], dtype)
    (found,) = batch.decompress(batch.compress().payload, into=[in_dtype(np.zeros_like(values), dtype)])
    is_nan = np.isnan(values)
    assert (found.view(np.uint16)[~is_nan] == bits[~is_nan]).all()
    assert np.isnan(to_f32(found[is_nan])).all()


def test_cast_rounds_ties_to_even_and_overflows_to_infinity() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x807FFFFF, 0x7F800001, 0x80000000]
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8080, 0x7FC0, 0x8000]
    batch = Batch(compressor_for(Cast()), [np.array(bits, np.uint32).view(np.float32)])
    payload = batch.compress().payload.view(np.uint16)
    assert [hex(word) for word in payload[: len(bits)]] == [hex(word) for word in expected]
