"""What must not change a result: buckets, pieces, arrival, a restart; and phase-one bytes under the world size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx.collectives.base import Op
from cgx.collectives.layout import cut
from cgx.core.algorithm import ALGORITHMS, Algorithm
from cgx.core.segments import NUMEL, PARAMETER, START, WIRE, Segment
from cgx.core.spec import Dtype
from cgx.core.wire import HEAD_NBYTES
from cgx.transports.base import Channel
from tests.conformance.models import (
    METHODS,
    SUPPRESSED,
    hosts,
    inputs_of,
    methods_of,
    mixed,
    of_sizes,
    same_bytes,
    segment,
)
from tests.conformance.oracle import reduce_by_oracle
from tests.conformance.ranks import Settings, Tap, reduce_on_threads
from tests.strategies import DTYPES

WORLD = 3
PIECES = (1, 4096, 16_384, 100_000, None)


@settings(max_examples=40)
@given(
    data=st.data(), dtype=st.sampled_from(DTYPES), piece_nbytes=st.sampled_from(PIECES), with_varying=st.booleans(),
    method=st.sampled_from([*methods_of(3), *methods_of(4)]),
)  # fmt: skip
def test_buckets_and_pieces_change_nothing(
    data: st.DataObject, dtype: Dtype, piece_nbytes: int | None, with_varying: bool, method: str
) -> None:
    segments = mixed(dtype, with_varying=with_varying)
    names = data.draw(st.permutations([s.name for s in segments]), label="order")
    ends = sorted(data.draw(st.sets(st.integers(1, len(names) - 1)), label="ends of buckets"))
    buckets = [names[a:b] for a, b in zip([0, *ends], [*ends, len(names)], strict=True)]
    inputs = inputs_of(segments, METHODS[method].world_size)
    asked = METHODS[method].settings(Op.AVG, buckets, piece_nbytes)
    expected = reduce_by_oracle(inputs, segments, asked)
    for result in reduce_on_threads(inputs, segments, asked):
        assert result.error is None, result.error
        assert same_bytes(result.values, expected)


@pytest.mark.parametrize("piece_nbytes", PIECES)
def test_residuals_do_not_depend_on_pieces(piece_nbytes: int | None) -> None:
    segments = mixed()
    inputs = inputs_of(segments, WORLD)
    left = []
    for nbytes in (piece_nbytes, 1 << 30):
        residuals = [np.zeros(sum(s.numel for s in segments), np.float32) for _ in range(WORLD)]
        for step in range(2):
            asked = Settings(piece_nbytes=nbytes, reduction_index=step)
            results = reduce_on_threads(inputs, segments, asked, residuals=residuals)
            assert all(result.error is None for result in results)
        left.append(residuals)
    for a, b in zip(*left, strict=True):
        assert a.any()
        assert a.tobytes() == b.tobytes()


def test_a_restart_with_the_saved_counters_and_residuals_continues_bit_for_bit() -> None:
    segments, steps = mixed(), 4
    names = [s.name for s in segments]

    def train(first: int, stop: int, residuals: Sequence[np.ndarray], buckets: Sequence[Sequence[str]]) -> list:
        return [
            reduce_on_threads(
                inputs_of(segments, WORLD, seed=step), segments,
                Settings(Op.AVG, buckets, reduction_index=step), residuals=residuals,
            )[0].values
            for step in range(first, stop)
        ]  # fmt: skip

    fresh = [np.zeros(sum(s.numel for s in segments), np.float32) for _ in range(WORLD)]
    whole = train(0, steps, fresh, [names])
    saved = [np.zeros_like(r) for r in fresh]
    begun = train(0, 2, saved, [names])
    resumed = train(2, steps, [r.copy() for r in saved], [names[5:], names[:5]])
    assert all(same_bytes(a, b) for a, b in zip(whole, begun + resumed, strict=True))
    # The control: without the counters the random bits repeat, without the residuals what was lost stays lost.
    assert not same_bytes(whole[2], train(0, 1, [r.copy() for r in saved], [names])[0])
    assert not same_bytes(whole[2], train(2, 3, [np.zeros_like(r) for r in fresh], [names])[0])


def test_seed_name_and_counter_each_change_the_random_bits() -> None:
    segments = of_sizes("uniform:2", sizes=[4096])
    inputs = inputs_of(segments, 2)
    plain = reduce_on_threads(inputs, segments, Settings())[0].values["layer.0.weight"]
    for asked in (Settings(seed=1), Settings(reduction_index=1)):
        assert reduce_on_threads(inputs, segments, asked)[0].values["layer.0.weight"].tobytes() != plain.tobytes()
    renamed = [segment("other", 4096, segments[0].specs)]
    values = [{"other": v["layer.0.weight"]} for v in inputs]
    assert reduce_on_threads(values, renamed, Settings())[0].values["other"].tobytes() != plain.tobytes()


def rows_sent(tap: Tap, segments: Sequence[Segment], world_size: int) -> dict[tuple[int, int], bytes]:
    """Return the phase-one bytes of each row (segment, start) in one piece that left through a tap."""
    (piece,) = cut(segments, world_size, piece_nbytes=1 << 30).pieces
    rows = {}
    for channel, peer, message in tap.messages:
        if channel is not Channel.BODY:
            continue
        at = HEAD_NBYTES
        for group in piece.chunks[peer].groups:
            for row in group.table.rows:
                size = group.scatter.row_nbytes(int(row[NUMEL]), "fp32")
                first = at + int(row[WIRE])
                rows[int(row[PARAMETER]), int(row[START])] = message[first : first + size].tobytes()
            at += group.table.wire_nbytes
        assert at == len(message)
    return rows


def test_phase_one_bytes_of_a_block_do_not_depend_on_the_world_size() -> None:
    segments = mixed()
    everybody = inputs_of(segments, 8)
    sent: dict[tuple[int, int], set[bytes]] = {}
    worlds = (2, 3, 4, 5, 8)
    for world_size in worlds:
        tap = reduce_on_threads(everybody[:world_size], segments, Settings())[1].scatter
        for row, payload in rows_sent(tap, segments, world_size).items():
            sent.setdefault(row, set()).add(payload)
    assert len(sent) == sum(-(-s.numel // s.stripe_numel) for s in segments)
    assert all(len(payloads) == 1 for payloads in sent.values())


@pytest.mark.parametrize("method", ["scatter_reduce-4", "all_gather-4", "ring-4", "hierarchical-2x2"])
@pytest.mark.parametrize("case", ["fixed", "varying", "alternating"])
@pytest.mark.parametrize("pause_seconds", [(0, 0, 0, 0), (0, 0.02, 0, 0), (0.01, 0, 0.03, 0.02)])
def test_lanes_carry_the_pieces_in_one_order_however_ranks_arrive(
    case: str, pause_seconds: Sequence[float], method: str
) -> None:
    specs = {"fixed": ["uniform:4"], "varying": [SUPPRESSED], "alternating": ["uniform:4", SUPPRESSED]}[case]
    # Pieces of one stripe: more of them than may be in flight, so that ranks wait for different things.
    segments = [segment(f"p{i}", 12 * 4096, specs[i % len(specs)]) for i in range(6)]
    buckets = [[s.name for s in segments[i : i + 2]] for i in (4, 2, 0)]
    inputs = inputs_of(segments, len(pause_seconds))
    asked = METHODS[method].settings(buckets=buckets, piece_nbytes=1, pause_seconds=pause_seconds)
    results = reduce_on_threads(inputs, segments, asked)
    expected = reduce_by_oracle(inputs, segments, asked)
    for result in results:
        assert result.error is None, result.error
        assert same_bytes(result.values, expected)
    if asked.algorithm in ("ring", "hierarchical"):
        return  # several steps a lane: ranks send a piece at different ones, and its heads say whether they matched
    for lane in ("scatter", "gather"):
        first, *others = (order_of(getattr(result, lane)) for result in results)
        for order in others:  # a rank sends nothing where it owns nothing
            both = set(first) & set(order)
            assert [tag for tag in first if tag in both] == [tag for tag in order if tag in both], lane


def order_of(tap: Tap) -> list[int]:
    """Return the tags of the payloads that left, each once."""
    heads = [message[8:HEAD_NBYTES] for channel, _, message in tap.messages if channel is Channel.BODY]
    return list(dict.fromkeys(int(tag.view(np.uint64)[0]) for tag in heads))


PAUSES = [(0, 0.03), (0.01, 0.02, 0), (0.02, 0, 0.03, 0)]
MORE_PAUSES = [(0.03, 0), (0.02, 0.03), (0, 0.03, 0)]


@pytest.mark.parametrize("case", ["fixed", "varying", "alternating"])
@pytest.mark.parametrize(
    ("algorithm", "pause_seconds"),
    [*((a, pauses) for a in ALGORITHMS for pauses in PAUSES), *(("scatter_reduce", pauses) for pauses in MORE_PAUSES)],
)
def test_a_rank_that_hears_of_a_bucket_late_is_waited_for(
    case: str, pause_seconds: Sequence[float], algorithm: Algorithm
) -> None:
    # Small buckets: a rank is done with all it knows of while another already waits for the next one.
    specs = {"fixed": ["uniform:4"], "varying": [SUPPRESSED], "alternating": ["uniform:4", SUPPRESSED]}[case]
    segments = [segment(f"p{i}", 4096 + i, specs[i % len(specs)]) for i in range(4)]
    world = len(pause_seconds)
    inputs = inputs_of(segments, world)
    # With two or three ranks a hierarchy has one level only: that changes who waits for whom.
    nodes = hosts(2, 2) if world == 4 else hosts(*((1, 2) if world == 2 else (3, 1)))
    asked = Settings(
        buckets=[[s.name] for s in segments], pause_seconds=pause_seconds, algorithm=algorithm, nodes=nodes
    )
    expected = reduce_by_oracle(inputs, segments, asked)
    for result in reduce_on_threads(inputs, segments, asked):
        assert result.error is None, result.error
        assert same_bytes(result.values, expected)
