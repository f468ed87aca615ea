"""What reducers share: payloads made of chunks, posted, checked, summed and decoded."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgx.collectives.base import Last, Reduction
from cgx.collectives.layout import LOCAL, Chunk, Piece
from cgx.compressors.base import OWN
from cgx.core.random import GATHER, SCATTER, stream
from cgx.core.wire import HEAD_NBYTES, Head
from cgx.errors import WireError
from cgx.transports.base import Bytes, Channel, PeerBuffers, Transport, Work

NOTHING: Bytes = np.empty(0, np.uint8)
_TAG_MASK = (1 << 64) - 1
_CALLED = {SCATTER: "phase 1", GATHER: "phase 2", LOCAL: "phase 1 inside the node"}


def payload_nbytes(chunks: Sequence[Chunk], phase: int) -> int:
    """Room for one payload of all ``chunks``, its head included; none when they are empty."""
    sizes = [chunk.nbytes(phase) - HEAD_NBYTES for chunk in chunks if chunk.groups]
    return HEAD_NBYTES + sum(sizes) if sizes else 0


def _tag(piece: Piece, reduction: Reduction, phase: int) -> int:
    return (reduction.tag + 2 * piece.index + (phase & 1) + (phase >> 1 << 32)) & _TAG_MASK


def _source(sender: int, piece: Piece, phase: int) -> str:
    return f"piece {piece.index}, {_CALLED[phase]}, from rank {sender}"


def _check_read(sender: int, piece: Piece, phase: int, used_nbytes: int, read_nbytes: int) -> None:
    if used_nbytes != read_nbytes:
        raise WireError(
            f"{_source(sender, piece, phase)}: the head announces {used_nbytes} bytes, the rows hold {read_nbytes}; "
            "the payload was damaged, or the ranks run different versions of cgx"
        )


def encode(
    chunks: Sequence[Chunk], piece: Piece, reduction: Reduction, phase: int, wire: Bytes, x: NDArray[Any]
) -> Bytes:
    """Writes this rank's payload of ``chunks``, taken from ``x``, into ``wire`` and returns the part that is used."""
    at = HEAD_NBYTES
    for group in (group for chunk in chunks for group in chunk.groups):
        side = group.side(phase)
        at += side.codec.compress(
            x, wire[at:], side.table, reduction.keys, stream(phase, reduction.scatter_lane.rank),
            residual=reduction.residual if phase == SCATTER and group.has_state else None,
        )  # fmt: skip
    return _headed(wire, at, piece, reduction, phase)


def _headed(wire: Bytes, used_nbytes: int, piece: Piece, reduction: Reduction, phase: int) -> Bytes:
    if used_nbytes == HEAD_NBYTES:
        return NOTHING
    Head(used_nbytes, _tag(piece, reduction, phase)).write(wire)
    return wire[:used_nbytes]


def decode(chunk: Chunk, piece: Piece, reduction: Reduction, wire: Bytes) -> int:
    """Replaces the elements of ``chunk`` by what its owner's phase-two payload, first in ``wire``, holds.

    Returns:
        Bytes read.
    """
    if not chunk.groups:
        return 0
    used = Head.read(wire, tag=_tag(piece, reduction, GATHER), source=_source(chunk.owner, piece, GATHER))
    at = HEAD_NBYTES
    for group in chunk.groups:
        at += group.gather.decompress(
            wire[at:], reduction.x, group.table_out, reduction.keys, stream(GATHER, chunk.owner)
        )
    _check_read(chunk.owner, piece, GATHER, used, at)
    return at


def sum_payloads(
    wires: Bytes, received: Mapping[int, Bytes], members: Sequence[int], chunks: Sequence[Chunk], piece: Piece,
    reduction: Reduction, *, phase: int, own: NDArray[Any], into: int | None = None, wire_out: Bytes = NOTHING,
    scale: float = 1.0,
) -> Bytes:  # fmt: skip
    """Sums the members' payloads of ``chunks`` in their order, in fp32, and leaves the sum in ``own``.

    Args:
        wires: Slots of ``payload_nbytes``, one per member, one after another.
        received: By member, the part of its slot that came from it.
        members: Ranks in the order of the sum; OWN is this rank's exact part in ``own`` and needs no slot.
        chunks: What to sum.
        piece: Theirs.
        reduction: The piece's.
        phase: Of the payloads.
        own: Elements of this rank; ends as the scaled sum, or what its encoding decodes to.
        into: Phase to encode the sum for, or None.
        wire_out: Where to.
        scale: Factor of the sum.

    Returns:
        The payload in ``wire_out`` (none without ``into``).

    Raises:
        WireError: A payload is not what the plan says.
    """
    rank, slot = reduction.scatter_lane.rank, payload_nbytes(chunks, phase)
    if not slot:
        return NOTHING
    used = {
        member: Head.read(payload, tag=_tag(piece, reduction, phase), source=_source(member, piece, phase))
        for member, payload in received.items()
    }
    starts = np.arange(len(members), dtype=np.int64) * slot + HEAD_NBYTES
    senders = [OWN if member == OWN else stream(phase, member) for member in members]
    at = HEAD_NBYTES
    for group in (group for chunk in chunks for group in chunk.groups):
        side, out = group.side(phase), group.side(phase if into is None else into)
        written = side.codec.reduce(
            wires, starts, own, wire_out[at:], side.table, out.table, reduction.keys,
            into=None if into is None else out.codec, senders=senders,
            stream_out=stream(phase if into is None else into, rank), scale=scale,
        )  # fmt: skip
        at += 0 if into is None else written
    for i, member in enumerate(members):
        if member in used:
            _check_read(member, piece, phase, used[member], int(starts[i]) - i * slot)
    return NOTHING if into is None else _headed(wire_out, at, piece, reduction, into)


def post(
    send: Mapping[int, Bytes], recv: Mapping[int, Bytes], lane: Transport, piece: Piece, phase: int
) -> Generator[Work, None, tuple[Work, Mapping[int, Bytes]]]:
    """Posts payloads by peer; when only their senders know the sizes, yields first while those are told.

    Returns:
        The posted work, and the parts of ``recv`` that it fills: nothing from peers that have nothing to send.
    """
    send, recv = ({peer: buffer for peer, buffer in buffers.items() if buffer.size} for buffers in (send, recv))
    if not piece.has_fixed_size:
        recv = yield from _agree_on_sizes(send, recv, lane, piece, phase)
    return lane.all_to_all(_by_rank(send, lane), _by_rank(recv, lane), Channel.BODY), recv


def _by_rank(buffers: Mapping[int, Bytes], lane: Transport) -> PeerBuffers:
    return [buffers.get(peer) for peer in range(lane.world_size)]


def _agree_on_sizes(
    send: Mapping[int, Bytes], recv: Mapping[int, Bytes], lane: Transport, piece: Piece, phase: int
) -> Generator[Work, None, dict[int, Bytes]]:
    announce = {peer: np.array([buffer.nbytes], np.int64).view(np.uint8) for peer, buffer in send.items()}
    heard = {peer: np.empty(8, np.uint8) for peer in recv}
    yield lane.all_to_all(_by_rank(announce, lane), _by_rank(heard, lane), Channel.SIZES)
    filled = {}
    for sender, buffer in recv.items():
        nbytes = int(heard[sender].view(np.int64)[0])
        if not HEAD_NBYTES <= nbytes <= buffer.nbytes:
            raise WireError(
                f"{_source(sender, piece, phase)}: the sender announces {nbytes} bytes; the plan allows "
                f"{HEAD_NBYTES} to {buffer.nbytes}"
            )
        filled[sender] = buffer[:nbytes]
    return filled


def scatter_sum(
    members: Sequence[int], parts: Sequence[Sequence[Chunk]], piece: Piece, reduction: Reduction, *,
    phase: int, own: NDArray[Any], into: int | None = None, wire_out: Bytes = NOTHING, scale: float = 1.0,
    is_last: bool = False,
) -> Generator[Work, None, Bytes]:  # fmt: skip
    """Sends every other member its part, encoded, and sums what the members send of this rank's.

    Args:
        members: Ranks, this one among them, in the order of the sum.
        parts: What each of them sums.
        piece: Theirs.
        reduction: The piece's.
        phase: Of the payloads.
        own: Elements of this rank, where the sum is left; see ``sum_payloads``.
        into: See ``sum_payloads``.
        wire_out: See ``sum_payloads``.
        scale: See ``sum_payloads``.
        is_last: The piece posts nothing after this.

    Returns:
        The payload in ``wire_out``.

    Cost: one step; a payload of its part to every other member, after the reduction's ticket.
    """
    pool, lane = reduction.pool, reduction.scatter_lane
    ticket, me = reduction.open_ticket(), members.index(lane.rank)
    taken = {
        member: pool.take(payload_nbytes(part, phase))
        for member, part in zip(members, parts, strict=True)
        if member != lane.rank
    }
    send = {
        member: encode(part, piece, reduction, phase, taken[member], own)
        for member, part in zip(members, parts, strict=True)
        if member != lane.rank
    }
    if ticket.is_open:
        yield ticket
    wires = pool.take(len(members) * payload_nbytes(parts[me], phase))
    slots = dict(zip(members, wires.reshape(len(members), -1), strict=True))
    del slots[lane.rank]
    work, received = yield from post(send, slots, lane, piece, phase)
    yield Last(work) if is_last else work
    order = [OWN if member == lane.rank else member for member in members]
    payload = sum_payloads(
        wires, received, order, parts[me], piece, reduction,
        phase=phase, own=own, into=into, wire_out=wire_out, scale=scale,
    )  # fmt: skip
    for buffer in (wires, *taken.values()):
        pool.give(buffer)
    return payload
