"""Cuts a flat buffer in pieces, and each piece in the chunks that ranks own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from cgx.compressors.base import Compressor
from cgx.compressors.registry import compressor_for
from cgx.core.random import GATHER, SCATTER
from cgx.core.segments import (
    BUFFER,
    NUMEL,
    PARAMETER,
    START,
    STATE,
    WIRE,
    Segment,
    SegmentTable,
)
from cgx.core.spec import EXACT, ITEMSIZE, Dtype, Identity, PhaseSpecs, Spec
from cgx.core.wire import HEAD_NBYTES

_NO_STATE = -1
LOCAL = 2  # beside SCATTER and GATHER: what travels inside a node on its way to phase one


@final
@dataclass(frozen=True, slots=True)
class Side:
    """How a group's rows travel in one phase."""

    codec: Compressor
    table: SegmentTable


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one chunk that share their specs.

    Args:
        scatter: Compressor of phase one, and ``table`` its rows.
        gather: Compressor of phase two, and ``table_out`` the same rows with their phase-two offsets.
        has_state: The rows have room in the residual arena.
        local: How they travel inside a node, where the layout is cut for that.
    """

    scatter: Compressor
    gather: Compressor
    table: SegmentTable
    table_out: SegmentTable
    has_state: bool
    local: Side | None = None

    def side(self, phase: int) -> Side:
        """How the rows travel in SCATTER, GATHER or LOCAL."""
        if phase == LOCAL:
            assert self.local is not None, "the layout was cut without a spec for inside a node"
            return self.local
        return Side(self.scatter, self.table) if phase == SCATTER else Side(self.gather, self.table_out)


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """What one rank owns of a piece; payload sizes include the head (zero when the chunk is empty)."""

    owner: int
    groups: tuple[Group, ...]
    scatter_nbytes: int
    gather_nbytes: int
    local_nbytes: int = 0

    def nbytes(self, phase: int) -> int:
        """Size of its payload in SCATTER, GATHER or LOCAL."""
        return {SCATTER: self.scatter_nbytes, GATHER: self.gather_nbytes, LOCAL: self.local_nbytes}[phase]


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reduction that moves through the pipeline as one; ``chunks[r]`` belongs to rank ``r``.

    Args:
        index: Its number in the layout.
        chunks: By owner.
        has_fixed_size: All ranks know the sizes of all payloads.
        extent: Its elements in the flat buffer.
    """

    index: int
    chunks: tuple[Chunk, ...]
    has_fixed_size: bool
    extent: slice


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """A flat buffer of whole parameters, cut in pieces.

    Args:
        segments: The parameters in buffer order.
        offsets: First element of each segment in the buffer.
        pieces: In the order they are sent.
        dtype: Dtype of all elements.
    """

    segments: tuple[Segment, ...]
    offsets: NDArray[np.int64]
    pieces: tuple[Piece, ...]
    dtype: Dtype


def _rows(
    segments: Sequence[Segment], states: Sequence[int | None], world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All stripes in buffer order: table rows (without wire offsets), owners, and segment offsets."""
    rows, owners, offsets, buffer = [], [], [], 0
    for index, segment in enumerate(segments):
        stripe = segment.stripe_numel
        start = np.arange(0, segment.numel, stripe, dtype=np.int64)
        part = np.zeros((len(start), 6), np.int64)
        part[:, PARAMETER] = index
        part[:, START] = start
        part[:, NUMEL] = np.minimum(stripe, segment.numel - start)
        part[:, BUFFER] = buffer + start
        state = states[index]
        part[:, STATE] = _NO_STATE if state is None else state + start
        rows.append(part)
        owners.append(segment.owners(world_size))
        offsets.append(buffer)
        buffer += segment.numel
    return np.concatenate(rows), np.concatenate(owners), np.array(offsets, np.int64)


def _table(rows: NDArray[np.int64], compressor: Compressor, dtype: Dtype) -> SegmentTable:
    """Rows with the wire offsets of ``compressor``, from zero."""
    placed, at = rows.copy(), 0
    sizes: dict[int, int] = {}
    for row in placed:
        numel = int(row[NUMEL])
        if numel not in sizes:
            sizes[numel] = compressor.row_nbytes(numel, dtype)
        row[WIRE] = at
        at += sizes[numel]
    return SegmentTable(placed, at, dtype)


def _chunk(owner: int, rows: NDArray[np.int64], segments: Sequence[Segment], dtype: Dtype, intra: Spec | None) -> Chunk:
    alike: dict[tuple[PhaseSpecs, bool], list[int]] = {}
    for i, (parameter, state) in enumerate(rows[:, [PARAMETER, STATE]].tolist()):
        alike.setdefault((segments[parameter].specs, state != _NO_STATE), []).append(i)
    groups = []
    for (specs, has_state), chosen in alike.items():
        scatter, gather = compressor_for(specs.scatter), compressor_for(specs.gather)
        part = np.ascontiguousarray(rows[chosen])
        table, table_out = _table(part, scatter, dtype), _table(part, gather, dtype)
        local = None
        if intra is not None:
            inside = compressor_for(Identity() if specs == EXACT else intra)
            local = Side(inside, _table(part, inside, dtype))
        groups.append(Group(scatter, gather, table, table_out, has_state, local))
    if not groups:
        return Chunk(owner, (), 0, 0)
    return Chunk(
        owner,
        tuple(groups),
        HEAD_NBYTES + sum(group.table.wire_nbytes for group in groups),
        HEAD_NBYTES + sum(group.table_out.wire_nbytes for group in groups),
        HEAD_NBYTES + sum(group.local.table.wire_nbytes for group in groups if group.local is not None),
    )


def default_piece_nbytes(raw_nbytes: int) -> int:
    """Raw bytes of a piece when nobody asked for a size (measured: docs/adr/0004).

    A dozen pieces keep the wire busy all but the first encode and the last decode; below 1 MiB the fixed cost of a
    piece shows, above 8 MiB overlap has nothing left to gain.
    """
    return min(max(raw_nbytes // 12, 1 << 20), 8 << 20)


def cut(
    segments: Sequence[Segment],
    world_size: int,
    *,
    piece_nbytes: int | None = None,
    states: Sequence[int | None] | None = None,
    intra: Spec | None = None,
) -> Layout:
    """Cuts the concatenation of ``segments`` in pieces of about ``piece_nbytes`` raw bytes (None: by its size).

    Args:
        segments: All of one dtype, at least one.
        world_size: Ranks that share the work.
        piece_nbytes: Raw bytes of a piece: smaller ones overlap better and cost more calls; the result is the same.
        states: First element of each segment in the residual arena (None: it keeps no residual).
        intra: Spec inside a node, for the hierarchical algorithm; exact parameters stay exact there too.
    """
    dtype = segments[0].dtype
    rows, owners, offsets = _rows(segments, states or [None] * len(segments), world_size)
    raw_ends = np.cumsum(rows[:, NUMEL]) * ITEMSIZE[dtype]
    raw_nbytes = int(raw_ends[-1]) if len(rows) else 0
    count = min(len(rows), -(-raw_nbytes // (piece_nbytes or default_piece_nbytes(raw_nbytes))))
    piece_of = (raw_ends - 1) * count // max(1, raw_nbytes)
    pieces = []
    for index, part in enumerate(np.unique(piece_of)):
        inside = piece_of == part
        chunks = tuple(
            _chunk(owner, rows[inside & (owners == owner)], segments, dtype, intra) for owner in range(world_size)
        )
        fixed = all(
            codec.guarantees.fixed_size
            for chunk in chunks
            for group in chunk.groups
            for codec in (group.scatter, group.gather, *([group.local.codec] if group.local else []))
        )
        first, last = rows[inside][0], rows[inside][-1]
        extent = slice(int(first[BUFFER]), int(last[BUFFER] + last[NUMEL]))
        pieces.append(Piece(index, chunks, fixed, extent))
    return Layout(tuple(segments), offsets, tuple(pieces), dtype)
