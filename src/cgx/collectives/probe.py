"""Measures what the cost model needs: the link, the engine's own all-reduce, and the codecs.

All ranks measure together and agree on the slowest of what they saw, so that they decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cgx.collectives.nodes import Nodes
from cgx.compressors.registry import compressor_for
from cgx.core.algorithm import Algorithm
from cgx.core.random import GATHER, parameter_keys, stream
from cgx.core.segments import single_row
from cgx.core.spec import Spec
from cgx.policies.cost import CodecSpeed, Line, Measured
from cgx.transports.base import Bytes, Channel, Transport

_TURNS = 15  # of next to nothing: some milliseconds in all
_CODEC_TURNS = 5
_FIRST_NBYTES = 1 << 14
_LAST_NBYTES = 1 << 24
_LONG_SECONDS = 0.02  # a message that takes this long shows the bandwidth; longer ones only cost time
_CODEC_NUMEL = 1 << 18  # 1 MiB of fp32: a stripe of a busy bucket, beyond the second-level cache


def agree_on_slowest(values: Sequence[float], lane: Transport) -> list[float]:
    """The largest of each value over all ranks; blocks.

    Cost: one step of ``8 len(values)`` bytes to every peer.
    """
    return np.max(_gathered(values, lane), axis=0).tolist()  # type: ignore[no-any-return]


def agree_on_fastest(values: Sequence[float], lane: Transport) -> list[float]:
    """The smallest of each value over all ranks: who came last to an operation timed nothing but the operation."""
    return np.min(_gathered(values, lane), axis=0).tolist()  # type: ignore[no-any-return]


def _gathered(values: Sequence[float], lane: Transport) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    mine = np.array(values, np.float64)
    heard = [np.empty(mine.nbytes, np.uint8) for _ in range(lane.world_size)]
    heard[lane.rank][:] = mine.view(np.uint8)
    lane.all_gather(mine.view(np.uint8), _without(lane.rank, heard), Channel.CONTROL).wait()
    return [buffer.view(np.float64) for buffer in heard]


def _without(rank: int, buffers: Sequence[Bytes]) -> list[Bytes | None]:
    return [None if peer == rank else buffer for peer, buffer in enumerate(buffers)]


def measure_line(prepare: Callable[[int], Callable[[], None]], lane: Transport) -> Line:
    """Times an operation from nothing to where the bandwidth shows, and draws a line through both.

    What a link lets through in one burst makes it look up to a twentieth too fast; the slope between two long messages
    would be free of that, and too noisy to decide by.

    Args:
        prepare: Given a number of bytes, returns what moves them, on all ranks together.
        lane: On which the ranks agree about the times, and so about when to stop.
    """

    def seconds(nbytes: int, turns: int) -> float:
        run, times = prepare(nbytes), []
        run()  # pages in the buffers, opens the congestion window
        for _ in range(turns):
            agree_on_slowest([0.0], lane)  # start together
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(agree_on_slowest(times, lane))  # a hiccup of one rank at one turn is not the link

    fixed, nbytes = seconds(8, _TURNS), _FIRST_NBYTES
    while (now := seconds(nbytes, 1)) < _LONG_SECONDS and nbytes < _LAST_NBYTES:
        nbytes *= 4
    if now < 4 * _LONG_SECONDS:
        now = min(now, seconds(nbytes, 2))
    return Line(fixed, max((now - fixed) / nbytes, 1e-12))


def measure_link(lane: Transport, peers: Sequence[int]) -> Line:
    """A step in which this rank sends ``nbytes`` evenly to ``peers`` and receives as much; over bytes sent.

    Args:
        lane: Idle.
        peers: Ranks; this one among them does not count.
    """
    return measure_line(lambda nbytes: _exchange(lane, peers, nbytes), lane)


def glance(lane: Transport, nbytes: int) -> float:
    """Seconds of one exchange of ``nbytes`` with all others; on the slowest rank."""
    run = _exchange(lane, range(lane.world_size), nbytes)
    _exchange(lane, range(lane.world_size), nbytes // 8)()  # opens the congestion window again; starts together
    start = time.perf_counter()
    run()
    return agree_on_slowest([time.perf_counter() - start], lane)[0]


def _exchange(lane: Transport, peers: Sequence[int], nbytes: int) -> Callable[[], None]:
    others = [peer for peer in peers if peer != lane.rank]
    share = max(1, nbytes // len(others))
    send = np.ones(share, np.uint8)  # ones, not zeros: memory that nobody wrote to would be paged in on the clock
    sends = [send if peer in others else None for peer in range(lane.world_size)]
    heard = [np.ones(share, np.uint8) if peer in others else None for peer in range(lane.world_size)]
    return lambda: lane.all_to_all(sends, heard, Channel.CONTROL).wait()


def measure_exact(lane: Transport) -> tuple[Line, float]:
    """The engine's own all-reduce of fp32, over raw bytes, and what part of a long one keeps a processor busy."""

    def prepare(nbytes: int) -> Callable[[], None]:
        x = np.zeros(max(1, nbytes // 4), np.float32)
        return lambda: lane.all_reduce(x).wait()

    line = measure_line(prepare, lane)
    run = prepare(round(min(_LONG_SECONDS / line.byte_s, _LAST_NBYTES)))
    agree_on_slowest([0.0], lane)  # start together
    start, cpu = time.perf_counter(), time.process_time()
    run()
    busy = (time.process_time() - cpu) / (time.perf_counter() - start)
    return line, min(agree_on_slowest([busy], lane)[0], 1.0)


def measure_codec(spec: Spec) -> CodecSpeed:
    """Encodes and decodes a megabyte a few times; the first call compiles."""
    codec = compressor_for(spec)
    table = single_row(_CODEC_NUMEL, wire_nbytes=codec.row_nbytes(_CODEC_NUMEL, "fp32"))
    x = np.random.default_rng(0).standard_normal(_CODEC_NUMEL, np.float32)
    wire = np.empty(table.wire_nbytes, np.uint8)
    keys = parameter_keys(0, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    part = stream(GATHER, 0)

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(_CODEC_TURNS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return sorted(times)[1] / _CODEC_NUMEL

    encode_s = seconds(lambda: codec.compress(x, wire, table, keys, part))
    return CodecSpeed(encode_s, seconds(lambda: codec.decompress(wire, x, table, keys, part)))


def probe(
    lane: Transport,
    specs: Mapping[str, Spec],
    *,
    nodes: Nodes | None,
    reduce_little: Callable[[Algorithm], None],
    algorithms: Sequence[Algorithm],
) -> Measured:
    """Measures everything; collective, while ``lane`` is idle.

    Args:
        lane: Whose link it is.
        specs: Specs to consider, by text.
        nodes: Where there is a hierarchy.
        reduce_little: Runs a compressed reduction of next to nothing.
        algorithms: To run it with.

    Cost: under a second, of which the kernels' first call takes most.
    """
    speeds: dict[str, CodecSpeed] = {}
    for text, spec in specs.items():
        speed = measure_codec(spec)
        speeds[text] = CodecSpeed(*agree_on_slowest([speed.encode_s, speed.decode_s], lane))
    everyone = range(lane.world_size)
    flat, (exact, exact_busy) = measure_link(lane, everyone), measure_exact(lane)
    intra = inter = None
    if nodes is not None:
        intra = measure_link(lane, nodes.local_peers(lane.rank))
        inter = measure_link(lane, nodes.column_peers(lane.rank))
    fixed = {algorithm: _fixed_seconds(lambda a=algorithm: reduce_little(a), lane) for algorithm in algorithms}  # type: ignore[misc]
    return Measured(
        world_size=lane.world_size,
        ranks_per_node=1 if nodes is None else nodes.ranks_per_node,
        exact=exact,
        exact_busy=exact_busy,
        flat=flat,
        intra=intra,
        inter=inter,
        fixed_s=fixed,
        codecs=speeds,
    )


def _fixed_seconds(run: Callable[[], None], lane: Transport) -> float:
    times = []
    for _ in range(_TURNS + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(agree_on_slowest(times[1:], lane))
