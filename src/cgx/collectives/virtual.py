"""Virtual ranks: all ranks of a group on one thread, through the real reducers, layouts and codecs.

For studies of accuracy at many ranks on one machine. A reducer is a generator that never blocks, and all ranks yield
the same number of works for a piece. So ranks may take turns: everybody computes and posts up to the next yield, then
everybody receives. A message is a reference to the sender's buffer, which is free only after that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import BufferPool, Last, Op, Reduction, Stages
from cgx.collectives.registry import cut_for, reducer_for
from cgx.core.algorithm import Algorithm
from cgx.core.random import name_hash, parameter_keys
from cgx.core.segments import CARRIERS, Segment
from cgx.core.spec import EXACT
from cgx.errors import TransportError, WireError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Work, broadcast_buffers

_Mail = defaultdict[tuple[int, int, Channel], deque[Bytes]]


@final
class _Arrival:
    """What a rank receives once all ranks have posted."""

    def __init__(self, mail: _Mail, rank: int, recv: PeerBuffers, channel: Channel) -> None:
        self._mail, self._rank, self._recv, self._channel = mail, rank, recv, channel

    def wait(self) -> None:
        """See ``Work.wait``; what has not been posted by now never will be."""
        for peer, buffer in enumerate(self._recv):
            if buffer is None or not buffer.size or peer == self._rank:
                continue
            letters = self._mail[peer, self._rank, self._channel]
            if not letters:
                raise TransportError(f"virtual rank {peer} posted nothing for rank {self._rank}: they are out of step")
            message = letters.popleft()
            if message.nbytes != buffer.nbytes:
                raise WireError(f"rank {peer} sent {message.nbytes} bytes where {buffer.nbytes} were expected")
            buffer[:] = message
        self._recv = ()


@final
class _Lane:
    """A virtual rank's end of both lanes: their posts have one order on every rank, so one is enough."""

    def __init__(self, mail: _Mail, rank: int, world_size: int) -> None:
        self._mail, self.rank, self.world_size, self.sent_nbytes = mail, rank, world_size, 0

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_to_all``."""
        for peer, buffer in enumerate(send):
            if buffer is not None and buffer.size and peer != self.rank:
                self.sent_nbytes += buffer.nbytes
                self._mail[self.rank, peer, channel].append(buffer)
        return _Arrival(self._mail, self.rank, recv, channel)

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """See ``Transport.all_gather``."""
        return self.all_to_all(broadcast_buffers(send, recv, self.rank), recv, channel)

    def all_reduce(self, x: Any) -> Work:
        """No reducer asks for it: the exact path belongs to the engine."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


@final
class VirtualRanks:
    """Reduces the flat buffers of ``world_size`` ranks as those ranks would, to the bit.

    Args:
        segments: The parameters in buffer order, all of one dtype.
        world_size: Ranks.
        algorithm: Any but ``hierarchical``, which needs machines.
        seed: Seed of random bits.
        has_error_feedback: Keep every rank's residuals (``world_size`` fp32 copies of the buffer).

    Raises:
        SpecError: The algorithm needs machines.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        world_size: int,
        *,
        algorithm: Algorithm = "scatter_reduce",
        seed: int = 0,
        has_error_feedback: bool = False,
    ) -> None:
        self.world_size = world_size
        numel = sum(segment.numel for segment in segments)
        ends = np.cumsum([segment.numel for segment in segments]).tolist()
        states = [None if s.specs == EXACT else end - s.numel for s, end in zip(segments, ends, strict=True)]
        self._reducer = reducer_for(algorithm)
        # One piece: results do not depend on pieces, and calls per message are what many ranks cost.
        self._layout = cut_for(
            algorithm,
            segments,
            world_size,
            piece_nbytes=max(1, 4 * numel),
            states=states if has_error_feedback else None,
        )
        self.residuals = np.zeros((world_size, numel), np.float32) if has_error_feedback else None
        self.reductions = self.wire_nbytes = 0
        self._seed, self._pool = seed, BufferPool()
        self._hashes = np.array([name_hash(segment.name) for segment in segments], np.uint64)

    def all_reduce(self, parts: NDArray[Any], op: Op) -> NDArray[Any]:
        """What every rank ends with when rank ``r`` puts in ``parts[r]``.

        Args:
            parts: Shape (ranks, elements), in the segments' dtype (bfloat16 as uint16), rows contiguous; overwritten.
            op: SUM or AVG.

        Returns:
            Row 0 of ``parts``: only rank 0 decodes the result, which by the reducers' laws is the same on all ranks.

        Cost: ``world_size`` encodes and about twice as many decodes of the buffer, and some 50 microseconds a message;
        payload bytes per rank are added to ``wire_nbytes`` (the mean over ranks).
        """
        assert parts.shape[0] == self.world_size
        assert parts.dtype == CARRIERS[self._layout.dtype]
        indices = np.full(len(self._hashes), self.reductions, np.uint64)
        mail: _Mail = defaultdict(deque)
        lanes = [_Lane(mail, rank, self.world_size) for rank in range(self.world_size)]
        reductions = [
            Reduction(
                label=f"virtual rank {lane.rank}", x=part, layout=self._layout,
                keys=parameter_keys(self._seed, self._hashes, indices), op=op, scatter_lane=lane, gather_lane=lane,
                pool=self._pool, tag=self.reductions,
                residual=None if self.residuals is None else self.residuals[lane.rank],
            )
            for lane, part in zip(lanes, parts, strict=True)
        ]  # fmt: skip
        for piece in self._layout.pieces:
            _take_turns([self._reducer.all_reduce(piece, reduction) for reduction in reductions])
            mail.clear()
        self.reductions += 1
        self.wire_nbytes += sum(lane.sent_nbytes for lane in lanes) // self.world_size
        result: NDArray[Any] = parts[0]
        return result


def _take_turns(ranks: Sequence[Stages]) -> None:
    """Runs one piece of all ranks, but to its end on rank 0 only: after its last work a rank but decodes the result."""
    works = [next(stages, None) for stages in ranks]
    while works[0] is not None and not isinstance(works[0], Last):
        for work in works:
            assert work is not None, "ranks yield the same number of works"
            work.wait()
        works = [next(stages, None) for stages in ranks]
    if works[0] is not None:
        works[0].wait()
        next(ranks[0], None)
    for stages in ranks:
        stages.close()
