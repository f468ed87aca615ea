"""NaN or infinity on one rank shows on all ranks, in exactly the blocks it was in."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.collectives.base import Op
from cgx.core.segments import CARRIERS
from cgx.core.spec import Dtype, block_size_of
from cgx.kernels.reference import to_f32
from tests.conformance.models import METHODS, inputs_of, methods_of, same_bytes, segment
from tests.conformance.oracle import reduce_by_oracle
from tests.conformance.ranks import reduce_on_threads
from tests.strategies import DTYPES

NUMEL = 3 * 4096 + 77
PLACES = [5, 4096 + 200, 3 * 4096 + 70]  # of the first three ranks, and owned by different ones
PATTERN = {np.nan: 0x7FC0, np.inf: 0x7F80, -np.inf: 0xFF80}  # as bfloat16


@pytest.mark.parametrize("method", [*methods_of(3), "hierarchical-2x2", "hierarchical-3x2-interleaved"])
@pytest.mark.parametrize("bad", PATTERN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("specs", ["uniform:4", "uniform:4/block=128+uniform:8/block=1024", "identity", "bf16"])
def test_the_blocks_of_bad_elements_are_bad_everywhere_and_no_others(
    specs: str, dtype: Dtype, bad: float, method: str
) -> None:
    segments = [segment("w", NUMEL, specs, dtype)]
    inputs, asked = (
        inputs_of(segments, METHODS[method].world_size),
        METHODS[method].settings(Op.AVG, piece_nbytes=10_000),
    )
    for rank, place in enumerate(PLACES):
        inputs[rank]["w"][place] = PATTERN[bad] if CARRIERS[dtype] == np.uint16 else bad
    results = reduce_on_threads(inputs, segments, asked)
    expected = np.zeros(NUMEL, np.bool_)
    chosen = segments[0].specs
    for place in PLACES:
        size = block_size_of(chosen.scatter)
        if asked.algorithm != "all_gather":
            size = max(size, block_size_of(chosen.gather))
        expected[place // size * size : place // size * size + size] = True
    for result in results:
        assert result.error is None
        assert (np.isfinite(to_f32(result.values["w"])) == ~expected).all()
        assert same_bytes(result.values, reduce_by_oracle(inputs, segments, asked))


@pytest.mark.parametrize("method", methods_of(2))
@pytest.mark.parametrize("op", Op)
def test_finite_inputs_whose_sum_overflows_are_not_hidden(op: Op, method: str) -> None:
    segments = [segment("w", 4096, "uniform:8/block=128"), segment("v", 64, "identity")]
    inputs = [{s.name: np.full(s.numel, 3e38, np.float32) for s in segments} for _ in range(2)]
    for result in reduce_on_threads(inputs, segments, METHODS[method].settings(op)):
        assert not np.isfinite(result.values["w"]).any()
        assert not np.isfinite(result.values["v"]).any()
