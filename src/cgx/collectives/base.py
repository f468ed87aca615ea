"""What a reducer is: a compressed collective as a generator that yields what it waits for.

Between two yields a reducer computes and posts; it never blocks. The pipeline waits for the yielded works and resumes
the generators of all pieces in one agreed order, so that every lane carries the pieces in the same order on all ranks.
All ranks yield the same number of works for a piece, and its last one is ``Last``.

How far a reduction runs ahead of the one before it differs from rank to rank, so until that one has posted everything
the pipeline grants it two ticks, in which it may post its ticket and nothing else. Pieces started in these ticks yield
the ticket first. From tick 2 on the ticket is through, and a piece posts its first payload in its first stage.

Laws (``tests/conformance``): all ranks end bit-identical; sums run in an order that the algorithm fixes; inputs whose
blocks and sums are fixed points of the codecs give the exact sum; every element is reduced exactly once; bytes sent
equal ``core.algorithm.cost``; the result is invariant under buckets and pieces. (The first bytes of a block that a rank
sends do not depend on the world size, either.)
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.layout import Layout, Piece
from cgx.errors import PlanMismatchError
from cgx.kernels.reference import to_f32
from cgx.transports.base import Bytes, Channel, Transport, Work

Stages = Generator[Work, None, None]
TICKET_NBYTES = 8


@final
class Last:
    """The last work that a piece yields: after it the piece has nothing more to post."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """See ``Work.wait``."""
        self._work.wait()


class Op(enum.Enum):
    """What to do with the ranks' values."""

    SUM = "sum"
    AVG = "avg"


@final
class BufferPool:
    """Payload buffers by size, reused from piece to piece: fresh memory would be paged in again each time."""

    _GRAIN_NBYTES = 1 << 16

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)

    def take(self, nbytes: int) -> Bytes:
        """A buffer of ``nbytes`` with unspecified content."""
        room = -(-nbytes // self._GRAIN_NBYTES) * self._GRAIN_NBYTES
        free = self._free[room]
        buffer = free.pop() if free else np.empty(room, np.uint8)
        return buffer[:nbytes]

    def give(self, buffer: Bytes) -> None:
        """Returns a buffer that ``take`` handed out."""
        whole = buffer.base if isinstance(buffer.base, np.ndarray) else buffer
        self._free[whole.nbytes].append(whole)


@final
@dataclass(slots=True)
class Reduction:
    """One reduction of one flat buffer, as its reducer sees it.

    Args:
        label: What error messages call it.
        x: Flat buffer in the layout's dtype; receives the result.
        layout: How the buffer is cut.
        keys: One key per segment, shape (segments,).
        op: SUM or AVG.
        scatter_lane: Carries phase one.
        gather_lane: Carries phase two.
        pool: Payload buffers.
        tag: 64 bits of plan and reduction that payload heads must carry.
        residual: Residual arena (fp32) when phase one keeps residuals.
    """

    label: str
    x: NDArray[Any]
    layout: Layout
    keys: NDArray[np.uint64]
    op: Op
    scatter_lane: Transport
    gather_lane: Transport
    pool: BufferPool
    tag: int
    residual: NDArray[np.float32] | None = None
    ticket: Ticket | None = field(default=None)
    _wide: NDArray[np.float32] | None = field(default=None)

    @property
    def scale(self) -> float:
        """Factor of the sum over all ranks."""
        return self.scale_of(self.scatter_lane.world_size)

    def scale_of(self, ranks: int) -> float:
        """Factor of a sum over ``ranks`` ranks, or over as many means: with AVG it becomes their mean."""
        return 1.0 / ranks if self.op is Op.AVG else 1.0

    def open_ticket(self) -> Ticket:
        """The reduction's ticket, posted by whoever asks first; to be waited for before anything else is posted."""
        if self.ticket is None:
            self.ticket = Ticket(self.scatter_lane, self.tag)
        return self.ticket

    def in_fp32(self, extent: slice) -> NDArray[np.float32]:
        """Room for partial sums, shape of ``x``, that holds the input in ``extent``: ``x`` itself when it is fp32."""
        if self.x.dtype == np.float32:
            return self.x
        if self._wide is None:
            self._wide = np.empty(self.x.size, np.float32)
        self._wide[extent] = to_f32(self.x[extent])
        return self._wide


class Reducer(Protocol):
    """Makes the stages of a piece."""

    def all_reduce(self, piece: Piece, reduction: Reduction) -> Stages:
        """Leaves the reduced elements of the piece in ``reduction.x`` on every rank."""
        ...


@final
class Ticket:
    """A 64-bit message in front of a reduction: a peer that is in another reduction is found before its payload.

    A payload larger than the posted buffer would end the process inside the engine; tickets are of one size.

    Cost: one step of ``8 (W - 1)`` bytes per rank, overlapped with the encoding of the first pieces.
    """

    def __init__(self, lane: Transport, tag: int) -> None:
        world = lane.world_size
        self._tag = tag
        mine = np.array([tag], np.uint64).view(np.uint8)
        self._received: list[Bytes | None] = [
            None if peer == lane.rank else np.empty(TICKET_NBYTES, np.uint8) for peer in range(world)
        ]
        self._work: Work | None = lane.all_gather(mine, self._received, Channel.TICKET)
        self._mine = mine

    @property
    def is_open(self) -> bool:
        """True until the first successful wait."""
        return self._work is not None

    def wait(self) -> None:
        """Waits for all peers' tickets.

        Raises:
            PlanMismatchError: A peer is in another reduction.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for peer, ticket in enumerate(self._received):
            if ticket is not None and int(ticket.view(np.uint64)[0]) != self._tag:
                raise PlanMismatchError(
                    f"rank {peer} is in another reduction: ranks must reduce the same tensors, in the same order, the "
                    "same number of times; look for a branch that only some ranks take"
                )


def stages_of(make: Callable[[Piece, Reduction], Stages], layout: Layout, reduction: Reduction) -> Sequence[Stages]:
    """The generators of all pieces, in the order they are started.

    Args:
        make: ``all_reduce`` of a reducer, or ``ScatterReduce.reduce_scatter`` where a layout has owners of its own.
        layout: The reduction's.
        reduction: What to reduce.
    """
    return [make(piece, reduction) for piece in layout.pieces]
