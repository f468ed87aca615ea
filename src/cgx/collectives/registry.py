"""From the name of an algorithm to its reducer and to the layout it works on."""

from __future__ import annotations

from collections.abc import Sequence

from cgx.collectives.all_gather import AllGather
from cgx.collectives.base import Reducer
from cgx.collectives.hierarchical import Hierarchical
from cgx.collectives.layout import Layout, cut
from cgx.collectives.nodes import Nodes
from cgx.collectives.ring import Ring
from cgx.collectives.scatter_reduce import ScatterReduce
from cgx.core.algorithm import Algorithm
from cgx.core.segments import Segment
from cgx.core.spec import Identity, Spec
from cgx.errors import SpecError


def reducer_for(algorithm: Algorithm, *, nodes: Nodes | str | None = None) -> Reducer:
    """The reducer of an algorithm.

    Args:
        algorithm: Which one.
        nodes: What ``find_nodes`` found; only ``hierarchical`` asks.

    Raises:
        SpecError: ``hierarchical`` is asked for where there is no hierarchy.
    """
    match algorithm:
        case "scatter_reduce":
            return ScatterReduce()
        case "all_gather":
            return AllGather()
        case "ring":
            return Ring()
        case "hierarchical":
            if not isinstance(nodes, Nodes):
                reason = nodes or "nobody asked where the ranks are"
                raise SpecError(
                    "the hierarchical algorithm needs several machines with equally many ranks on each, at least two; "
                    f"here {reason}. Use scatter_reduce"
                )
            return Hierarchical(nodes)


def cut_for(
    algorithm: Algorithm,
    segments: Sequence[Segment],
    world_size: int,
    *,
    piece_nbytes: int | None = None,
    states: Sequence[int | None] | None = None,
    intra: Spec | None = None,
) -> Layout:
    """The layout on which an algorithm works best; for the arguments see ``cut``.

    Args:
        algorithm: Which one.
        segments: Without owners of their own: those are for ``ScatterReduce.reduce_scatter``.
        world_size: Ranks.
        piece_nbytes: See ``cut``.
        states: See ``cut``.
        intra: Spec of ``hierarchical`` inside a node (None: identity).
    """
    return cut(
        segments,
        1 if algorithm == "all_gather" else world_size,  # there everybody owns everything
        piece_nbytes=piece_nbytes,
        states=states,
        intra=(intra or Identity()) if algorithm == "hierarchical" else None,
    )
