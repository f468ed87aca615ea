"""Ranks that reduce: each with a tap on its lanes, over the real reducers, layouts and pipeline."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import BufferPool, Op, Reduction, stages_of
from cgx.collectives.nodes import Nodes
from cgx.collectives.pipeline import Job, Pipeline
from cgx.collectives.registry import cut_for, reducer_for
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.core.algorithm import Algorithm
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import Segment
from cgx.core.spec import Identity, Spec
from cgx.errors import TransportError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Transport, Work, broadcast_buffers
from cgx.transports.threads import ThreadHub
from tests.harness import run_threads

Array = NDArray[Any]
Values = Mapping[str, Array]
# What a tap does to a message on its way out: (channel, number of the post on it, peer, bytes) to bytes.
Change = Callable[[Channel, int, int, Bytes], Bytes]

SECONDS_FOR_THREADS = 4.0
IDENTITY = Identity()
_TAGS_APART = 1 << 20  # more than pieces in a reduction


@final
class Tap:
    """A transport that counts and keeps what leaves through it, and may change it on the way."""

    def __init__(self, transport: Transport, change: Change | None = None) -> None:
        self._transport, self._change = transport, change
        self.nbytes: Counter[Channel] = Counter()
        self.posts: Counter[Channel] = Counter()
        self.messages: list[tuple[Channel, int, Bytes]] = []

    @property
    def rank(self) -> int:
        """See `Transport.rank`."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """See `Transport.world_size`."""
        return self._transport.world_size

    @property
    def sent_nbytes(self) -> int:
        """See `Transport.sent_nbytes`."""
        return self._transport.sent_nbytes

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See `Transport.all_to_all`."""
        changed: list[Bytes | None] = []
        for peer, buffer in enumerate(send):
            if buffer is not None and peer != self.rank:
                self.nbytes[channel] += buffer.nbytes
                self.messages.append((channel, peer, buffer.copy()))
                if self._change is not None:
                    buffer = self._change(channel, self.posts[channel], peer, buffer.copy())
            changed.append(buffer)
        self.posts[channel] += 1
        return self._transport.all_to_all(changed, recv, channel)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See `Transport.all_gather`."""
        return self.all_to_all(broadcast_buffers(send, recv, self.rank), recv, channel)

    def all_reduce(self, x: Any) -> Work:
        """See `Transport.all_reduce`."""
        return self._transport.all_reduce(x)

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()


@final
@dataclass(frozen=True)
class Settings:
    """How thread ranks reduce.

    Args:
        buckets: Names of the segments of each flat buffer, in order; by default all in one.
        reduction_index: How many times every parameter was reduced before.
        tags: Tag of each rank's reductions; by default the same on all.
        pause_seconds: How long a rank waits before each bucket, so that ranks arrive apart.
        changes: What leaves the ranks' (scatter lane, gather lane).
        algorithm: By which.
        nodes: Where the ranks are, for the hierarchical algorithm.
        intra: Its spec inside a node.
    """

    op: Op = Op.SUM
    buckets: Sequence[Sequence[str]] | None = None
    piece_nbytes: int | None = None
    seed: int = 0
    reduction_index: int = 0
    scatter_only: bool = False
    tags: Sequence[int] | None = None
    pause_seconds: Sequence[float] = ()
    changes: Mapping[int, tuple[Change | None, Change | None]] = field(default_factory=dict)
    algorithm: Algorithm = "scatter_reduce"
    nodes: Nodes | None = None
    intra: Spec = IDENTITY


@final
@dataclass(frozen=True)
class RankResult:
    """What a reduction left on one rank."""

    values: dict[str, Array]
    scatter: Tap
    gather: Tap
    error: BaseException | None


def reduce_on_threads(
    inputs: Sequence[Values], segments: Sequence[Segment], settings: Settings, *,
    residuals: Sequence[NDArray[np.float32]] | None = None,
) -> list[RankResult]:  # fmt: skip
    """Reduce every rank's `inputs[rank]` through the real reducer, layout and pipeline; raise nothing.

    Args:
        inputs: Flat arrays by segment name, one mapping per rank.
        segments: All segments, in the order of the residual arena.
        settings: How.
        residuals: Each rank's arena, changed in place.
    """
    world = len(inputs)
    hubs = [ThreadHub(world, timeout_seconds=SECONDS_FOR_THREADS) for _ in range(2)]
    return run_threads(
        world,
        lambda rank: reduce_on_rank(
            [hub.transport(rank) for hub in hubs], inputs[rank], segments, settings,
            None if residuals is None else residuals[rank],
        ),
    )  # fmt: skip


def reduce_on_rank(
    lanes: Sequence[Transport], inputs: Values, segments: Sequence[Segment], settings: Settings,
    residual: NDArray[np.float32] | None = None,
) -> RankResult:  # fmt: skip
    """What every rank of `reduce_on_threads` does, over a scatter and a gather lane."""
    rank = lanes[0].rank
    changes = settings.changes.get(rank, (None, None))
    scatter, gather = (Tap(lane, change) for lane, change in zip(lanes, changes, strict=True))

    def close_lanes() -> None:
        scatter.close()
        gather.close()

    named = {segment.name: segment for segment in segments}
    first_state = _starts(segments)
    pipeline, pool = Pipeline(f"rank-{rank}-pipeline", on_failure=close_lanes), BufferPool()
    answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    refusals: list[BaseException | None] = []
    values: dict[str, Array] = {}
    submitted = 0
    for index, names in enumerate(settings.buckets or [list(named)]):
        if settings.pause_seconds:
            time.sleep(settings.pause_seconds[rank])
        bucket = [named[name] for name in names]
        flat = np.concatenate([inputs[name].reshape(-1) for name in names])
        values |= {s.name: flat[at : at + s.numel] for s, at in zip(bucket, _starts(bucket).values(), strict=True)}
        reduction = Reduction(
            label=f"bucket {index}",
            x=flat,
            layout=cut_for(
                settings.algorithm,
                bucket,
                scatter.world_size,
                piece_nbytes=settings.piece_nbytes,
                states=[None if residual is None else first_state[name] for name in names],
                intra=settings.intra,
            ),
            keys=parameter_keys(
                settings.seed,
                np.array([name_hash(name) for name in names], np.uint64),
                np.full(len(names), settings.reduction_index, np.uint64),
            ),
            op=settings.op,
            scatter_lane=scatter,
            gather_lane=gather,
            pool=pool,
            tag=_TAGS_APART * (1 + index) if settings.tags is None else settings.tags[rank],
            residual=residual,
        )
        reducer = reducer_for(settings.algorithm, nodes=settings.nodes)
        reduce = ScatterReduce().reduce_scatter if settings.scatter_only else reducer.all_reduce
        make = partial(stages_of, reduce, reduction.layout, reduction)
        try:
            pipeline.submit(Job(reduction.label, make, answers.put))
            submitted += 1
        except TransportError as error:
            refusals.append(error)
    errors = [answers.get() for _ in range(submitted)] + refusals
    pipeline.close(SECONDS_FOR_THREADS)
    return RankResult(values, scatter, gather, next((e for e in errors if e is not None), None))


def _starts(segments: Sequence[Segment]) -> dict[str, int]:
    """First element of each segment in their concatenation."""
    ends = np.cumsum([segment.numel for segment in segments]).tolist()
    return {s.name: end - s.numel for s, end in zip(segments, ends, strict=True)}
