"""The codec of varying length is a real one: its size follows the data, and it refuses what it cannot read."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.compressors.registry import compressor_for
from cgx.errors import WireError
from tests.laws.batch import STREAM, Batch
from tests.laws.varlen import ZeroSuppressed

_CODEC = compressor_for(ZeroSuppressed())


def test_size_follows_the_data() -> None:
    x = np.zeros(800, np.float32)
    sparse = Batch(_CODEC, [x]).compress().payload
    x[:100] = 1
    dense = Batch(_CODEC, [x]).compress().payload
    assert (len(sparse), len(dense)) == (104, 504)


@pytest.mark.parametrize("kept_nbytes", [0, 3, 4, 100, 495])
def test_truncated_payload_is_refused(kept_nbytes: int) -> None:
    batch = Batch(_CODEC, [np.ones(120, np.float32)])
    payload = batch.compress().payload[:kept_nbytes]
    out = np.zeros(batch.buffer_numel, np.float32)
    with pytest.raises(WireError):
        _CODEC.decompress(payload, out, batch.table, batch.keys, STREAM)


@pytest.mark.parametrize("length", [0, 18, 498, 2**31])
def test_lying_length_is_refused(length: int) -> None:
    batch = Batch(_CODEC, [np.ones(120, np.float32)])
    payload = batch.compress().payload.copy()
    payload[:4] = np.array([length], np.uint32).view(np.uint8)
    out = np.zeros(batch.buffer_numel, np.float32)
    with pytest.raises(WireError):
        _CODEC.decompress(payload, out, batch.table, batch.keys, STREAM)
