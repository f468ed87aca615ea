"""Scatter-reduce in two levels: what leaves a node was summed inside it first, so a network card carries it once.

Ranks that have the same place on their nodes form a column. Inside a node, each rank sums what its column owns; between
nodes, the ranks of a column reduce their partial sums as ``ScatterReduce`` does; then each rank forwards its column's
phase-two payloads, unchanged, to the ranks of its node. All ranks keep what those bytes decode to.
"""

from __future__ import annotations

from typing import final

import numpy as np

from cgx.collectives.base import Last, Reduction, Stages
from cgx.collectives.layout import LOCAL, Piece
from cgx.collectives.nodes import Nodes
from cgx.collectives.payload import NOTHING, decode, post, scatter_sum
from cgx.core.random import GATHER, SCATTER


@final
class Hierarchical:
    """Reducer for several ranks a node; its layouts are cut with a spec for inside the node.

    Partial sums stay in fp32 (in the buffer itself when it is fp32, else in a copy); between nodes ``identity`` rounds
    them to the buffer's dtype. A mean is taken level by level, so that a node's part fits that dtype if the ranks' do.
    What encoding partial sums loses belongs to no single rank: it keeps no residuals.

    Cost, for ``N`` nodes of ``R`` ranks: four steps; per rank ``(R - 1) / R`` of a copy under the spec inside the node,
    ``(N - 1) / W`` of a copy in each phase between nodes, and ``(R - 1) / R`` of a phase-two copy inside. A node sends
    ``(N - 1) / N`` of a copy in each phase: ``R`` times less than without the hierarchy. Codec work per rank: encodes
    ``(R - 1) / R`` of the elements for its node and ``1 / R`` for others, decodes everything once.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def all_reduce(self, piece: Piece, reduction: Reduction) -> Stages:
        """See ``Reducer.all_reduce``."""
        pool, rank, chunks = reduction.pool, reduction.gather_lane.rank, piece.chunks
        mates, column = self._nodes.local_peers(rank), self._nodes.column_peers(rank)
        columns = {mate: [chunks[peer] for peer in self._nodes.column_peers(mate)] for mate in mates}
        partial = reduction.in_fp32(piece.extent)
        yield from scatter_sum(
            mates, list(columns.values()), piece, reduction,
            phase=LOCAL, own=partial, scale=reduction.scale_of(len(mates)),
        )  # fmt: skip
        # The column's payloads of phase two come to lie one after another, ready to be forwarded.
        whole = pool.take(sum(chunks[peer].gather_nbytes for peer in column))
        ends = np.cumsum([chunks[peer].gather_nbytes for peer in column]).tolist()
        slots = {peer: whole[end - chunks[peer].gather_nbytes : end] for peer, end in zip(column, ends, strict=True)}
        payload = yield from scatter_sum(
            column, [[chunks[peer]] for peer in column], piece, reduction, phase=SCATTER, own=partial,
            into=GATHER, wire_out=slots.pop(rank), scale=reduction.scale_of(len(column)),
        )  # fmt: skip
        work, received = yield from post(dict.fromkeys(slots, payload), slots, reduction.gather_lane, piece, GATHER)
        yield work
        held = {peer: payload if peer == rank else received.get(peer, NOTHING) for peer in column}
        # Where sizes vary, the payloads leave gaps.
        forward = whole if piece.has_fixed_size else np.concatenate(list(held.values()))
        room = {mate: pool.take(sum(chunk.gather_nbytes for chunk in columns[mate])) for mate in mates if mate != rank}
        work, heard = yield from post(dict.fromkeys(room, forward), room, reduction.gather_lane, piece, GATHER)
        for peer, part in held.items():
            if peer != rank or partial is not reduction.x:
                decode(chunks[peer], piece, reduction, part)
        yield Last(work)
        for mate, part in heard.items():
            for chunk in columns[mate]:
                part = part[decode(chunk, piece, reduction, part) :]
        for buffer in (whole, *room.values()):
            pool.give(buffer)
