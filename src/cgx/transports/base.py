"""What a transport is: contiguous byte buffers, sizes known to both sides, errors that name the peer.

Laws (``tests/conformance``): posting never blocks; operations of one channel are matched in the order each rank posted
them; a buffer belongs to the transport from posting until ``wait`` returns; every wait is bounded by ``timeout``; a
closed or silent peer ends in PeerLostError or CollectiveTimeoutError on every rank that waits for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PeerBuffers = Sequence[Bytes | None]  # one entry per rank; None: nothing to or from that rank


class Channel(enum.IntEnum):
    """Streams of messages that are matched separately: a rank may run ahead on one of them."""

    TICKET = 1
    SIZES = 2
    BODY = 3
    CONTROL = 4


class Work(Protocol):
    """A posted operation."""

    def wait(self) -> None:
        """Blocks until the buffers are free and filled.

        Raises:
            TransportError: PeerLostError or CollectiveTimeoutError, with the peer's rank.
        """
        ...


class Transport(Protocol):
    """Moves bytes between the ranks of one group, over connections of its own (a lane)."""

    @property
    def rank(self) -> int:
        """This rank in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes this rank has sent so far."""
        ...

    def all_to_all(self, send: PeerBuffers, recv: PeerBuffers, channel: Channel) -> Work:
        """Sends ``send[r]`` to each rank ``r`` and fills ``recv[r]`` from it.

        Cost: one step; ``sum(send)`` bytes per rank.
        """
        ...

    def all_gather(self, send: Bytes | None, recv: PeerBuffers, channel: Channel) -> Work:
        """Sends one buffer to every other rank and fills ``recv[r]`` with rank ``r``'s.

        Cost: one step; ``(W - 1) * send`` bytes per rank.
        """
        ...

    def all_reduce(self, x: Any) -> Work:
        """Sums ``x`` in place over all ranks, uncompressed: the engine's own best path (a tensor of its kind)."""
        ...

    def close(self) -> None:
        """Closes the connections; peers that wait for this rank get PeerLostError."""
        ...


def broadcast_buffers(send: Bytes | None, recv: PeerBuffers, rank: int) -> list[Bytes | None]:
    """``all_gather`` as an ``all_to_all``: the same buffer for every other rank."""
    return [None if peer == rank else send for peer in range(len(recv))]
