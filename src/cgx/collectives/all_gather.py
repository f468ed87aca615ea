"""One-shot all-gather: everybody sends everything to everybody, and sums alone.

Each rank encodes the whole piece once and keeps, like its peers, what those bytes decode to; so all ranks sum the same
``W`` payloads in the same order and end bit-identical, with no second phase to wait for.
"""

from __future__ import annotations

from typing import final

import numpy as np

from cgx.collectives.base import Last, Reduction, Stages
from cgx.collectives.layout import Piece
from cgx.collectives.payload import NOTHING, encode, payload_nbytes, post, sum_payloads
from cgx.compressors.base import OWN
from cgx.core.random import SCATTER


@final
class AllGather:
    """Reducer for small messages and few ranks; it uses no owners and no spec of phase two.

    Who owns what does not matter to it: layouts cut for one rank need the fewest codec calls.

    Cost: one step; per rank ``W - 1`` compressed copies. Codec work per rank: encodes all elements once, decodes them
    ``W - 1`` times (fp32; ``W`` times for 16-bit buffers and with residuals).
    """

    def all_reduce(self, piece: Piece, reduction: Reduction) -> Stages:
        """See ``Reducer.all_reduce``."""
        pool, lane = reduction.pool, reduction.scatter_lane
        # The ticket stays: a payload longer than a peer's buffer would end that process before its head is read.
        ticket = reduction.open_ticket()
        wires = pool.take(lane.world_size * payload_nbytes(piece.chunks, SCATTER))
        slots = wires.reshape(lane.world_size, -1)
        # Where the buffer can hold what its payload decodes to, one pass encodes and leaves that: one decode less.
        is_in_place = reduction.x.dtype == np.float32 and reduction.residual is None
        payload = (
            sum_payloads(
                NOTHING, {}, [OWN], piece.chunks, piece, reduction,
                phase=SCATTER, own=reduction.x, into=SCATTER, wire_out=slots[lane.rank],
            )
            if is_in_place
            else encode(piece.chunks, piece, reduction, SCATTER, slots[lane.rank], reduction.x)
        )  # fmt: skip
        if ticket.is_open:
            yield ticket
        room = {peer: slot for peer, slot in enumerate(slots) if peer != lane.rank}
        work, received = yield from post(dict.fromkeys(room, payload), room, lane, piece, SCATTER)
        yield Last(work)
        order = [OWN if is_in_place and rank == lane.rank else rank for rank in range(lane.world_size)]
        sum_payloads(
            wires, received, order, piece.chunks, piece, reduction,
            phase=SCATTER, own=reduction.x, scale=reduction.scale,
        )  # fmt: skip
        pool.give(wires)
