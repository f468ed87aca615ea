"""The cost model: what it must say at its limits, whatever the numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.policies.cost import (
    CodecSpeed,
    Line,
    Measured,
    Work,
    compressed_seconds,
    exact_floor_seconds,
    exact_seconds,
    wire_seconds,
)
from cgx.policies.step import Bucket, evenly, exposed_seconds

_SPEC = "uniform:4"
sizes = st.integers(1 << 10, 1 << 28)
rates = st.floats(1e6, 1e12)  # bits per second


def measured(bit_s: float, *, world_size: int = 4, ranks_per_node: int = 2) -> Measured:
    """A link of this rate under an ideal ring, and codecs of a few gigabytes per second."""
    byte_s = 8 / bit_s
    ring = Line(1e-3, 2 * (world_size - 1) / world_size * byte_s)
    return Measured(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        exact=ring,
        exact_busy=0.0,
        flat=Line(3e-4, byte_s),
        intra=Line(1e-4, 1e-10),
        inter=Line(3e-4, byte_s * ranks_per_node),
        fixed_s=dict.fromkeys(ALGORITHMS, 1e-3),
        codecs={_SPEC: CodecSpeed(4e-10, 4e-10)},
    )


def work(raw_nbytes: int) -> Work:
    return Work(raw_nbytes // 4, raw_nbytes, raw_nbytes / 7.5, pieces=8)


def is_compressed(bit_s: float, raw_nbytes: int, algorithm: Algorithm) -> bool:
    found = measured(bit_s)
    return compressed_seconds(found, algorithm, _SPEC, work(raw_nbytes)) < exact_seconds(found, raw_nbytes)


@given(sizes)
def test_compression_never_pays_on_an_endlessly_fast_link(raw_nbytes: int) -> None:
    assert not any(is_compressed(1e15, raw_nbytes, algorithm) for algorithm in ALGORITHMS)


@given(sizes, rates, rates)
def test_what_pays_on_a_link_pays_on_every_slower_one(raw_nbytes: int, one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    for algorithm in ("scatter_reduce", "hierarchical", "ring"):
        if is_compressed(fast, raw_nbytes, algorithm):
            assert is_compressed(slow, raw_nbytes, algorithm)


@given(sizes, rates)
def test_every_prediction_grows_with_the_message_and_stays_above_its_wire_time(raw_nbytes: int, bit_s: float) -> None:
    found = measured(bit_s)
    for algorithm in ALGORITHMS:
        small, large = (compressed_seconds(found, algorithm, _SPEC, work(n)) for n in (raw_nbytes, 2 * raw_nbytes))
        assert wire_seconds(found, algorithm, work(raw_nbytes)) < small < large
    assert exact_floor_seconds(found, raw_nbytes) <= exact_seconds(found, raw_nbytes)


def test_a_hierarchy_divides_the_time_on_the_network_card_by_its_ranks() -> None:
    found, job = measured(1e9, world_size=8, ranks_per_node=4), work(1 << 26)
    flat, tree = (wire_seconds(found, algorithm, job) for algorithm in ("scatter_reduce", "hierarchical"))
    assert tree < 0.65 * flat


@given(st.floats(0.01, 10), st.lists(st.floats(1e-4, 1), min_size=1, max_size=10))
def test_what_is_exposed_is_at_least_the_last_reduction_and_at_most_all(backward_s: float, times: list[float]) -> None:
    exposed = exposed_seconds(backward_s, evenly(backward_s, [1.0] * len(times), times))
    assert times[-1] - 1e-9 <= exposed <= sum(times) + 1e-9


def test_a_reduction_that_fits_behind_the_backward_pass_is_not_exposed() -> None:
    assert exposed_seconds(1.0, [Bucket(0.2, 0.3), Bucket(0.4, 0.3)]) == 0.0
