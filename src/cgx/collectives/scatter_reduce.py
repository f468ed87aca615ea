"""Scatter-reduce-all-gather: every rank reduces the chunk it owns (CGX, arXiv 2111.08617, section 4).

Phase one sends each foreign chunk to its owner, encoded. The owner adds what it receives to its own exact part, in fp32
and in rank order, encodes the sum once, and phase two sends those bytes to everybody. All ranks, the owner too, keep
what the bytes decode to: that makes replicas bit-identical.
"""

from __future__ import annotations

from typing import final

from cgx.collectives.base import Last, Reduction, Stages
from cgx.collectives.layout import Piece
from cgx.collectives.payload import decode, post, scatter_sum
from cgx.core.random import GATHER, SCATTER


@final
class ScatterReduce:
    """Reducer of the two-phase algorithm.

    Cost: two steps; per rank ``(W - 1) / W`` of the phase-one payload plus ``W - 1`` times the phase-two payload of its
    own chunk, i.e. ``2 (W - 1) / W`` of one compressed copy. Codec work per rank: encodes ``(W - 1) / W`` of the
    elements, reduces ``1 / W`` of them from ``W - 1`` payloads, decodes ``(W - 1) / W``.
    """

    def all_reduce(self, piece: Piece, reduction: Reduction) -> Stages:
        """See ``Reducer.all_reduce``."""
        pool, lane = reduction.pool, reduction.gather_lane
        wire_out = pool.take(piece.chunks[lane.rank].gather_nbytes)
        payload = yield from scatter_sum(
            range(lane.world_size), [[chunk] for chunk in piece.chunks], piece, reduction,
            phase=SCATTER, own=reduction.x, into=GATHER, wire_out=wire_out, scale=reduction.scale,
        )  # fmt: skip
        room = {chunk.owner: pool.take(chunk.gather_nbytes) for chunk in piece.chunks if chunk.owner != lane.rank}
        work, received = yield from post(dict.fromkeys(room, payload), room, lane, piece, GATHER)
        yield Last(work)
        for owner, theirs in received.items():
            decode(piece.chunks[owner], piece, reduction, theirs)
        for buffer in (wire_out, *room.values()):
            pool.give(buffer)

    def reduce_scatter(self, piece: Piece, reduction: Reduction) -> Stages:
        """Leaves the reduced elements of this rank's chunk in ``reduction.x``; the others keep their input.

        Cost: half the bytes of ``all_reduce``, in one step; the owner's sum is not encoded again.
        """
        yield from scatter_sum(
            range(reduction.scatter_lane.world_size), [[chunk] for chunk in piece.chunks], piece, reduction,
            phase=SCATTER, own=reduction.x, scale=reduction.scale, is_last=True,
        )  # fmt: skip
