"""Compressed ring: partial sums travel from neighbour to neighbour, then the sums do.

The chunk of rank ``r`` starts at rank ``r + 1``. Each rank on its way adds its own exact part to what it decodes, in
fp32, and encodes the partial sum again; the owner adds the last part and encodes the sum for phase two. Those bytes go
round unchanged, and everybody, the owner too, keeps what they decode to.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import Last, Reduction, Stages
from cgx.collectives.layout import Piece
from cgx.collectives.payload import NOTHING, decode, encode, post, sum_payloads
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.compressors.base import OWN
from cgx.core.random import GATHER, SCATTER
from cgx.transports.base import Bytes, Transport, Work


@final
class Ring:
    """Reducer that talks to two neighbours only.

    A partial sum is encoded at every hop, so errors add up along the ring and what is lost belongs to no single rank:
    it keeps no residuals. ``identity`` rounds partial sums to the buffer's dtype. A mean scales fp32 sums at the end;
    16-bit parts are scaled first, in an fp32 copy, as stock DDP does: sums in fp16 may overflow where the mean fits.

    Cost: ``2 (W - 1)`` steps; per rank ``(W - 1) / W`` of a copy in each phase. Codec work per rank: encodes all
    elements once, decodes them ``2 (W - 1) / W`` times.
    """

    def all_reduce(self, piece: Piece, reduction: Reduction) -> Stages:
        """See ``Reducer.all_reduce``."""
        if reduction.scatter_lane.world_size == 1:  # no neighbours
            yield from ScatterReduce().all_reduce(piece, reduction)
            return
        own, scale = reduction.in_fp32(piece.extent), reduction.scale
        if own is not reduction.x:
            with np.errstate(invalid="ignore"):  # NaN is data here
                own[piece.extent] *= np.float32(scale)
            scale = 1.0
        payload = yield from self._collect(piece, reduction, own, scale)
        yield from self._spread(piece, reduction, own, payload)

    def _collect(
        self, piece: Piece, reduction: Reduction, own: NDArray[Any], scale: float
    ) -> Generator[Work, None, Bytes]:
        """Phase one; returns the payload of the own chunk's sum, times ``scale``."""
        pool, lane = reduction.pool, reduction.scatter_lane
        before = (lane.rank - 1) % lane.world_size
        ticket = reduction.open_ticket()
        chunk = piece.chunks[before]
        taken = pool.take(chunk.scatter_nbytes)
        payload = encode([chunk], piece, reduction, SCATTER, taken, own)
        if ticket.is_open:
            yield ticket
        for hop in range(1, lane.world_size):
            chunk = piece.chunks[(before - hop) % lane.world_size]
            is_mine = chunk.owner == lane.rank
            room = pool.take(chunk.scatter_nbytes)
            work, received = yield from _pass_on(payload, room, lane, piece, SCATTER)
            yield work
            pool.give(taken)
            taken = pool.take(chunk.gather_nbytes if is_mine else chunk.scatter_nbytes)
            payload = sum_payloads(
                room, {before: received}, [before, OWN], [chunk], piece, reduction, phase=SCATTER, own=own,
                into=GATHER if is_mine else SCATTER, wire_out=taken, scale=scale if is_mine else 1.0,
            )  # fmt: skip
            pool.give(room)
        return payload

    def _spread(self, piece: Piece, reduction: Reduction, own: NDArray[Any], payload: Bytes) -> Stages:
        """Phase two: passes on what arrives and decodes it while it travels."""
        pool, lane = reduction.pool, reduction.gather_lane
        taken, chunk = [payload], piece.chunks[lane.rank]
        for hop in range(1, lane.world_size):
            coming = piece.chunks[(lane.rank - hop) % lane.world_size]
            room = pool.take(coming.gather_nbytes)
            work, received = yield from _pass_on(payload, room, lane, piece, GATHER)
            if chunk.owner != lane.rank or own is not reduction.x:
                decode(chunk, piece, reduction, payload)
            yield work if hop < lane.world_size - 1 else Last(work)
            payload, chunk = received, coming
            taken.append(room)
        decode(chunk, piece, reduction, payload)
        for buffer in taken:
            pool.give(buffer)


def _pass_on(
    payload: Bytes, room: Bytes, lane: Transport, piece: Piece, phase: int
) -> Generator[Work, None, tuple[Work, Bytes]]:
    """Posts a payload to the next rank and room for one from the rank before; returns the part to be filled."""
    before, after = (lane.rank - 1) % lane.world_size, (lane.rank + 1) % lane.world_size
    work, received = yield from post({after: payload}, {before: room}, lane, piece, phase)
    return work, received.get(before, NOTHING)
