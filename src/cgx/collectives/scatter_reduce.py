"""Scatter-reduce-all-gather: every rank reduces the chunk it owns (CGX, arXiv 2111.08617, section 4).

Phase one sends each foreign chunk to its owner, encoded. The owner adds what it receives to its own exact part, in fp32
and in rank order, encodes the sum once, and phase two sends those bytes to everybody. All ranks, the owner too, keep
what the bytes decode to: that makes replicas bit-identical.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import final

import numpy as np

from cgx.collectives.base import Last, Reduction, Stages, Ticket
from cgx.collectives.layout import Chunk, Group, Piece
from cgx.compressors.base import Compressor
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.segments import SegmentTable
from cgx.core.wire import HEAD_NBYTES, Head
from cgx.errors import WireError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Transport, Work, broadcast_buffers

_TAG_MASK = (1 << 64) - 1


def _tag(piece: Piece, reduction: Reduction, phase: int) -> int:
    return (reduction.tag + 2 * piece.index + phase) & _TAG_MASK


def _side(group: Group, phase: int) -> tuple[Compressor, SegmentTable]:
    return (group.scatter, group.table) if phase == SCATTER else (group.gather, group.table_out)


def _encode(chunk: Chunk, piece: Piece, reduction: Reduction, phase: int, wire: Bytes) -> Bytes:
    """Writes this rank's payload of ``chunk`` into ``wire`` and returns the part that is used."""
    rank, at = reduction.scatter_lane.rank, HEAD_NBYTES
    for group in chunk.groups:
        codec, table = _side(group, phase)
        residual = reduction.residual if phase == SCATTER and group.has_state else None
        at += codec.compress(reduction.x, wire[at:], table, reduction.keys, stream(phase, rank), residual=residual)
    Head(at, _tag(piece, reduction, phase)).write(wire)
    return wire[:at]


def _decode(chunk: Chunk, piece: Piece, reduction: Reduction, wire: Bytes) -> None:
    """Replaces the elements of ``chunk`` by what its owner's phase-two payload holds."""
    used, at = _check_head(chunk.owner, piece, reduction, GATHER, wire), HEAD_NBYTES
    for group in chunk.groups:
        at += group.gather.decompress(
            wire[at:], reduction.x, group.table_out, reduction.keys, stream(GATHER, chunk.owner)
        )
    _check_read(chunk.owner, piece, GATHER, used, at)


def _source(sender: int, piece: Piece, phase: int) -> str:
    return f"piece {piece.index}, phase {phase + 1}, from rank {sender}"


def _check_head(sender: int, piece: Piece, reduction: Reduction, phase: int, wire: Bytes) -> int:
    return Head.read(wire, tag=_tag(piece, reduction, phase), source=_source(sender, piece, phase))


def _check_read(sender: int, piece: Piece, phase: int, used_nbytes: int, read_nbytes: int) -> None:
    if used_nbytes != read_nbytes:
        raise WireError(
            f"{_source(sender, piece, phase)}: the head announces {used_nbytes} bytes, the rows hold {read_nbytes}; "
            "the payload was damaged, or the ranks run different versions of cgx"
        )


def _agree_on_sizes(
    send: PeerBuffers, recv: PeerBuffers, lane: Transport, piece: Piece, phase: int
) -> Generator[Work, None, PeerBuffers]:
    """Tells the peers the sizes of payloads that only their senders know; returns the parts of ``recv`` to fill."""
    announce = [None if b is None else np.array([b.nbytes], np.int64).view(np.uint8) for b in send]
    heard = [None if b is None else np.empty(8, np.uint8) for b in recv]
    yield lane.all_to_all(announce, heard, Channel.SIZES)
    filled: list[Bytes | None] = []
    for sender, (buffer, size) in enumerate(zip(recv, heard, strict=True)):
        if buffer is None or size is None:
            filled.append(None)
            continue
        nbytes = int(size.view(np.int64)[0])
        if not HEAD_NBYTES <= nbytes <= buffer.nbytes:
            raise WireError(
                f"{_source(sender, piece, phase)}: the sender announces {nbytes} bytes; the plan allows "
                f"{HEAD_NBYTES} to {buffer.nbytes}"
            )
        filled.append(buffer[:nbytes])
    return filled


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
        mine = piece.chunks[lane.rank]
        wire_out = pool.take(mine.gather_nbytes)
        yield from self._phase_one(piece, reduction, wire_out, encode=True)
        received = [
            None if chunk.owner == lane.rank or not chunk.groups else pool.take(chunk.gather_nbytes)
            for chunk in piece.chunks
        ]
        used = Head.used_nbytes_of(wire_out) if mine.groups else 0
        send = broadcast_buffers(wire_out[:used] if used else None, received, lane.rank)
        payloads: PeerBuffers = received
        if not piece.has_fixed_size:
            payloads = yield from _agree_on_sizes(send, received, lane, piece, GATHER)
        yield Last(lane.all_to_all(send, payloads, Channel.BODY))
        for chunk, payload in zip(piece.chunks, payloads, strict=True):
            if payload is not None:
                _decode(chunk, piece, reduction, payload)
        for buffer in [wire_out, *received]:
            if buffer is not None:
                pool.give(buffer)

    def reduce_scatter(self, piece: Piece, reduction: Reduction) -> Stages:
        """See ``Reducer.reduce_scatter``; half the bytes, and the owner's sum is not encoded again."""
        yield from self._phase_one(piece, reduction, np.empty(0, np.uint8), encode=False)

    def _phase_one(self, piece: Piece, reduction: Reduction, wire_out: Bytes, *, encode: bool) -> Stages:
        """Encodes and sends every foreign chunk, then reduces the own one (into ``wire_out`` with ``encode``)."""
        pool, lane = reduction.pool, reduction.scatter_lane
        rank, world = lane.rank, lane.world_size
        mine = piece.chunks[rank]
        if reduction.ticket is None:
            reduction.ticket = Ticket(lane, reduction.tag)
        taken = [
            None if chunk.owner == rank or not chunk.groups else pool.take(chunk.scatter_nbytes)
            for chunk in piece.chunks
        ]
        send = [
            None if wire is None else _encode(chunk, piece, reduction, SCATTER, wire)
            for chunk, wire in zip(piece.chunks, taken, strict=True)
        ]
        if reduction.ticket.is_open:
            yield reduction.ticket
        wires = pool.take(world * mine.scatter_nbytes)
        grid = wires.reshape(world, mine.scatter_nbytes)
        recv: PeerBuffers = [None if peer == rank or not mine.groups else grid[peer] for peer in range(world)]
        if not piece.has_fixed_size:
            recv = yield from _agree_on_sizes(send, recv, lane, piece, SCATTER)
        work = lane.all_to_all(send, recv, Channel.BODY)
        yield work if encode else Last(work)
        used = {
            sender: _check_head(sender, piece, reduction, SCATTER, payload)
            for sender, payload in enumerate(recv)
            if payload is not None
        }
        starts = np.arange(world, dtype=np.int64) * mine.scatter_nbytes + HEAD_NBYTES
        at = HEAD_NBYTES
        for group in mine.groups:
            at += group.scatter.reduce(
                wires, starts, reduction.x, wire_out[at:], group.table, group.table_out,
                reduction.keys, into=group.gather if encode else None, own_rank=rank,
                scale=reduction.scale,
            )  # fmt: skip
        for sender, nbytes in used.items():
            _check_read(sender, piece, SCATTER, nbytes, int(starts[sender]) - sender * mine.scatter_nbytes)
        if encode and mine.groups:
            Head(at, _tag(piece, reduction, GATHER)).write(wire_out)
        for buffer in [wires, *taken]:
            if buffer is not None:
                pool.give(buffer)
