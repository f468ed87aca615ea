"""Virtual ranks on one thread end with the bits of ranks that are threads of their own, for every flat algorithm."""

from __future__ import annotations

import numpy as np
import pytest

from cgx.collectives.base import Op
from cgx.collectives.virtual import VirtualRanks
from cgx.core.algorithm import Algorithm
from cgx.core.segments import Segment
from cgx.errors import SpecError
from tests.conformance.models import inputs_of, mixed, of_sizes
from tests.conformance.ranks import Array, Settings, reduce_on_threads

FLAT: tuple[Algorithm, ...] = ("scatter_reduce", "all_gather", "ring")


def rows(inputs: list[dict[str, Array]], segments: list[Segment]) -> Array:
    """The ranks' flat buffers, one a row."""
    return np.stack([np.concatenate([values[s.name].reshape(-1) for s in segments]) for values in inputs])


def on_threads(inputs: list[dict[str, Array]], segments: list[Segment], asked: Settings) -> Array:
    """What rank 0 ends with on threads."""
    first, *_ = results = reduce_on_threads(inputs, segments, asked)
    assert all(result.error is None for result in results), first.error
    return np.concatenate([first.values[s.name].reshape(-1) for s in segments])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("algorithm", FLAT)
def test_the_bits_are_those_of_threads(algorithm: Algorithm, world_size: int, dtype: str) -> None:
    segments = mixed(dtype, with_varying=dtype == "fp32")
    for op in Op:
        virtual = VirtualRanks(segments, world_size, algorithm=algorithm, seed=5)
        for index in range(2):  # each reduction has random bits of its own
            inputs = inputs_of(segments, world_size, seed=index)
            asked = Settings(op, seed=5, reduction_index=index, algorithm=algorithm, piece_nbytes=30_000)
            expected = on_threads(inputs, segments, asked)
            assert virtual.all_reduce(rows(inputs, segments), op).tobytes() == expected.tobytes()


@pytest.mark.parametrize("algorithm", ["scatter_reduce", "all_gather"])
def test_residuals_are_those_of_threads(algorithm: Algorithm) -> None:
    segments, world = of_sizes("uniform:2"), 3
    numel = sum(s.numel for s in segments)
    virtual = VirtualRanks(segments, world, algorithm=algorithm, has_error_feedback=True)
    residuals = [np.zeros(numel, np.float32) for _ in range(world)]
    for index in range(3):
        inputs = inputs_of(segments, world, seed=index)
        asked = Settings(Op.AVG, reduction_index=index, algorithm=algorithm)
        (first, *_) = reduce_on_threads(inputs, segments, asked, residuals=residuals)
        found = virtual.all_reduce(rows(inputs, segments), Op.AVG)
        assert found.tobytes() == np.concatenate([first.values[s.name] for s in segments]).tobytes()
        assert virtual.residuals is not None
        assert virtual.residuals.tobytes() == np.stack(residuals).tobytes()
        assert virtual.residuals.any()


@pytest.mark.parametrize("algorithm", FLAT)
def test_bytes_are_counted_as_threads_count_them(algorithm: Algorithm) -> None:
    segments, world = of_sizes("uniform:4"), 3
    inputs = inputs_of(segments, world)
    virtual = VirtualRanks(segments, world, algorithm=algorithm)
    virtual.all_reduce(rows(inputs, segments), Op.SUM)
    results = reduce_on_threads(inputs, segments, Settings(algorithm=algorithm))
    numel = sum(s.numel for s in segments)
    # All in one piece on both sides, or heads would differ.
    assert 4 * numel < 1 << 20
    sent = sum(result.scatter.sent_nbytes + result.gather.sent_nbytes for result in results)
    if algorithm == "all_gather":
        sent_in_phase_one_only = all(not result.gather.sent_nbytes for result in results)
        assert sent_in_phase_one_only
    assert virtual.wire_nbytes == sent // world


def test_what_needs_machines_is_refused() -> None:
    with pytest.raises(SpecError, match="hierarchical"):
        VirtualRanks(of_sizes("uniform:4"), 4, algorithm="hierarchical")
