"""What a reducer does with a peer that is elsewhere, or whose bytes are not what they should be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cgx.collectives.nodes import Nodes
from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.core.wire import HEAD_NBYTES
from cgx.errors import CgxError, PeerLostError, PlanMismatchError, TransportError, WireError
from cgx.transports.base import Bytes, Channel
from tests.conformance.models import SUPPRESSED, hosts, inputs_of, of_sizes
from tests.conformance.ranks import Change, RankResult, Settings, reduce_on_threads

WORLD, LIAR, VICTIM = 3, 1, 2
SCATTER, GATHER = 0, 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("odd_one", range(WORLD))
def test_a_rank_in_another_reduction_is_found_by_everybody_before_any_payload(
    odd_one: int, algorithm: Algorithm
) -> None:
    segments = of_sizes("uniform:4")
    tags = [7 if rank == odd_one else 6 for rank in range(WORLD)]
    asked = Settings(tags=tags, algorithm=algorithm, nodes=hosts(WORLD, 1))
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, asked)
    for rank, result in enumerate(results):
        assert isinstance(result.error, PlanMismatchError), result.error
        other = odd_one if rank != odd_one else min({0, 1, 2} - {odd_one})
        assert f"bucket 0: rank {other} is in another reduction" in str(result.error)
        assert result.scatter.nbytes[Channel.BODY] == 0


def with_head(change: Callable[[Bytes], None]) -> Change:
    """Return a change of the first head on its way to the victim."""
    has_lied = False

    def lie(channel: Channel, post: int, peer: int, message: Bytes) -> Bytes:
        nonlocal has_lied
        if channel is Channel.BODY and peer == VICTIM and not has_lied:
            change(message[:HEAD_NBYTES])
            has_lied = True
        return message

    return lie


def _set(place: slice, value: int, dtype: type[np.unsignedinteger]) -> Callable[[Bytes], None]:
    def change(head: Bytes) -> None:
        head[place] = np.array([value], dtype).view(np.uint8)

    return change


def _add_to_size(by: int) -> Callable[[Bytes], None]:
    def change(head: Bytes) -> None:
        head[4:8].view(np.int32)[0] += by

    return change


# What is wrong with the head, and what the message must say.
LIES = {
    "magic": (_set(slice(0, 1), 0x55, np.uint8), "head 0x55"),
    "version": (_set(slice(1, 2), 99, np.uint8), "version 99"),
    "foreign": (_set(slice(8, 16), 12345, np.uint64), "another reduction"),
    "oversized": (_add_to_size(8), "bytes"),
    "truncated": (_add_to_size(-8), "bytes"),
    "empty": (_set(slice(4, 8), 0, np.uint32), "bytes"),
    "huge": (_set(slice(4, 8), 2**32 - 1, np.uint32), "bytes"),
}


@pytest.mark.parametrize("specs", ["uniform:4", "identity", "varying"])
@pytest.mark.parametrize("phase", [SCATTER, GATHER])
@pytest.mark.parametrize("lie", LIES)
def test_a_head_that_is_wrong_names_bucket_piece_phase_and_sender(lie: str, phase: int, specs: str) -> None:
    change, says = LIES[lie]
    segments = of_sizes(SUPPRESSED if specs == "varying" else specs)
    changes = {LIAR: (with_head(change), None) if phase == SCATTER else (None, with_head(change))}
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, Settings(changes=changes, piece_nbytes=30_000))
    error = results[VICTIM].error
    assert isinstance(error, WireError), error
    for part in ("bucket 0", "piece 0", f"phase {phase + 1}", f"rank {LIAR}", says):
        assert part in str(error), error
    assert str(error).count("bucket 0") == 1
    assert_others_hear_of_it(results)


@pytest.mark.parametrize("specs", ["uniform:4", "varying"])
@pytest.mark.parametrize(
    ("algorithm", "nodes", "lane", "phase"),
    [
        ("all_gather", None, SCATTER, "phase 1,"),
        ("ring", None, SCATTER, "phase 1,"),
        ("ring", None, GATHER, "phase 2,"),
        ("hierarchical", hosts(WORLD, 1), SCATTER, "phase 1,"),
        ("hierarchical", hosts(WORLD, 1), GATHER, "phase 2,"),
        ("hierarchical", hosts(1, WORLD), SCATTER, "phase 1 inside the node,"),
        ("hierarchical", hosts(1, WORLD), GATHER, "phase 2,"),
    ],
)
@pytest.mark.parametrize("lie", LIES)
def test_every_algorithm_refuses_a_head_that_is_wrong(
    lie: str, algorithm: Algorithm, nodes: Nodes | None, lane: int, phase: str, specs: str
) -> None:
    change, says = LIES[lie]
    segments = of_sizes(SUPPRESSED if specs == "varying" else specs)
    changes = {LIAR: (with_head(change), None) if lane == SCATTER else (None, with_head(change))}
    asked = Settings(changes=changes, piece_nbytes=1 << 30, algorithm=algorithm, nodes=nodes)
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, asked)
    error = results[VICTIM].error
    assert isinstance(error, WireError), error
    for part in ("bucket 0", "piece 0", phase, f"rank {LIAR}", says):
        assert part in str(error), error
    # The bytes of a sum are passed on as they came: whoever gets them refuses them too.
    heard = [result.error for rank, result in enumerate(results) if rank != VICTIM and result.error is not None]
    assert all(isinstance(error, PeerLostError) or str(error) == str(results[VICTIM].error) for error in heard), heard


def assert_others_hear_of_it(results: list[RankResult]) -> None:
    """Peers of a failed rank end at once, with the error of one who lost a peer or with a result."""
    for rank, result in enumerate(results):
        if rank != VICTIM and result.error is not None:
            assert isinstance(result.error, PeerLostError), result.error
            assert "bucket 0" in str(result.error)


@pytest.mark.parametrize("nbytes", [0, HEAD_NBYTES - 1, HEAD_NBYTES, 1 << 40])
@pytest.mark.parametrize("phase", [SCATTER, GATHER])
def test_an_announced_size_out_of_range_names_bucket_piece_phase_and_sender(nbytes: int, phase: int) -> None:
    def lie(channel: Channel, post: int, peer: int, message: Bytes) -> Bytes:
        if channel is Channel.SIZES and peer == VICTIM:
            message.view(np.int64)[0] = nbytes
        return message

    segments = of_sizes(SUPPRESSED)
    changes: dict[int, tuple[Change | None, Change | None]]
    changes = {LIAR: (lie, None) if phase == SCATTER else (None, lie)}
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, Settings(changes=changes))
    error = results[VICTIM].error
    assert isinstance(error, WireError), error
    assert f"rank {LIAR}" in str(error)
    assert "bucket 0" in str(error)
    if nbytes != HEAD_NBYTES:  # a size that may be true until the payload comes: the transport's error then
        assert f"announces {nbytes} bytes" in str(error)
        assert f"piece 0, phase {phase + 1}" in str(error)
    assert_others_hear_of_it(results)


@pytest.mark.parametrize("phase", [SCATTER, GATHER])
def test_a_payload_of_the_wrong_length_is_no_result(phase: int) -> None:
    def cut(channel: Channel, post: int, peer: int, message: Bytes) -> Bytes:
        return message[:-8] if channel is Channel.BODY and peer == VICTIM else message

    segments = of_sizes("uniform:4")
    changes: dict[int, tuple[Change | None, Change | None]]
    changes = {LIAR: (cut, None) if phase == SCATTER else (None, cut)}
    error = reduce_on_threads(inputs_of(segments, WORLD), segments, Settings(changes=changes))[VICTIM].error
    assert isinstance(error, WireError), error
    assert f"rank {LIAR} sent" in str(error)


def test_a_varying_payload_whose_rows_end_early_is_refused() -> None:
    def stretch(channel: Channel, post: int, peer: int, message: Bytes) -> Bytes:
        if channel is Channel.BODY and peer == VICTIM:  # the first row claims more than it holds
            message[HEAD_NBYTES : HEAD_NBYTES + 4].view(np.uint32)[0] += 4
        return message

    segments = of_sizes(SUPPRESSED, sizes=[5000, 5000])
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, Settings(changes={LIAR: (stretch, None)}))
    assert isinstance(results[VICTIM].error, CgxError)
    assert "bucket 0" in str(results[VICTIM].error)


def test_an_error_of_the_codec_reaches_its_own_rank_by_name_and_the_others_as_a_lost_peer() -> None:
    def fail(channel: Channel, post: int, peer: int, message: Bytes) -> Bytes:
        if channel is Channel.BODY and post >= 1:
            raise ZeroDivisionError("on purpose")
        return message

    segments = of_sizes("uniform:4")
    asked = Settings(changes={LIAR: (fail, None)}, piece_nbytes=20_000, buckets=[[s.name] for s in segments])
    results = reduce_on_threads(inputs_of(segments, WORLD), segments, asked)
    assert isinstance(results[LIAR].error, TransportError)
    assert "ZeroDivisionError: on purpose" in str(results[LIAR].error)
    for rank in {0, 1, 2} - {LIAR}:
        assert isinstance(results[rank].error, PeerLostError), results[rank].error
