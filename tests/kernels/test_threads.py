"""How many threads share a call changes nothing that the call leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cgx.compressors.base import OWN, Store
from cgx.compressors.registry import compressor_for
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.spec import Cast, Identity, Spec, Uniform
from tests.laws.batch import Batch
from tests.laws.payloads import threads
from tests.strategies import gradient


def _everything(spec: Spec) -> list[bytes]:
    """Bytes of all that compress, decompress and reduce leave, over rows of uneven lengths."""
    codec = compressor_for(spec)
    rows = [gradient("normal", n, seed=n) for n in (4096, 33, 0, 4096, 1000, 129, 4096, 1)]
    batch = Batch(codec, rows)
    encoded = batch.compress(residual=[row * np.float32(0.1) for row in rows])
    left = [encoded.payload.tobytes(), *(row.tobytes() for row in encoded.residual)]
    added = batch.decompress(encoded.payload, into=rows, store=Store.ADD)
    left += [row.tobytes() for row in added]
    wires = np.concatenate([batch.compress(stream=stream(SCATTER, rank)).payload for rank in range(3)])
    starts = np.arange(3, dtype=np.int64) * batch.table.wire_nbytes
    own, out = batch.x.copy(), np.zeros(batch.table.wire_nbytes, np.uint8)
    codec.reduce(
        wires, starts, own, out, batch.table, replace(batch.table), batch.keys, into=codec,
        senders=[stream(SCATTER, 0), OWN, stream(SCATTER, 2)], stream_out=stream(GATHER, 1), scale=0.5,
    )  # fmt: skip
    return [*left, own.tobytes(), out.tobytes()]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("spec", [Uniform(4), Uniform(7, 1024, "nearest"), Identity(), Cast()], ids=str)
def test_thread_count_changes_nothing(spec: Spec, count: int) -> None:
    with threads(1):
        alone = _everything(spec)
    with threads(count):
        assert _everything(spec) == alone
