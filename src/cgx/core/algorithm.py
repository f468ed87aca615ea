"""What each algorithm of a compressed all-reduce costs: one formula that the choice and the tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from cgx.errors import SpecError

Algorithm = Literal["scatter_reduce", "all_gather", "ring", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What one reduction of one buffer costs; tickets, heads and announced sizes aside.

    Args:
        steps: Messages that must wait for one another.
        nbytes: Bytes a rank sends, as the mean over ranks (owners' parts differ by a stripe).
        host_nbytes: Of all that the ranks of a node send, the bytes that leave it: what its network card carries.
    """

    steps: int
    nbytes: float
    host_nbytes: float


def cost(
    algorithm: Algorithm,
    copy_nbytes: float,
    *,
    world_size: int,
    ranks_per_node: int = 1,
    gather_copy_nbytes: float | None = None,
    intra_copy_nbytes: float = 0.0,
) -> Cost:
    """The cost of an algorithm.

    Args:
        algorithm: Which one.
        copy_nbytes: Payload bytes of one copy of the buffer under the spec of phase one.
        world_size: Ranks, at least 1.
        ranks_per_node: Ranks of each node; a ring is taken to visit them one after another.
        gather_copy_nbytes: Of one copy under the spec of phase two (None: the same).
        intra_copy_nbytes: Of one copy under the spec that ``hierarchical`` uses inside a node.

    Raises:
        SpecError: Nodes of ``ranks_per_node`` do not make up the world.

    Example:
        >>> cost("scatter_reduce", 1000, world_size=4, ranks_per_node=2)
        Cost(steps=2, nbytes=1500.0, host_nbytes=2000.0)
        >>> cost("hierarchical", 1000, world_size=4, ranks_per_node=2, intra_copy_nbytes=8000)
        Cost(steps=4, nbytes=5000.0, host_nbytes=1000.0)
    """
    world, local = world_size, ranks_per_node
    if local < 1 or world < 1 or world % local:
        raise SpecError(f"{world} ranks are no whole number of nodes of {local} ranks each")
    nodes, foreign = world // local, world - local
    # Every element is sent once in either phase: what a rank sends in both for a W-th of the buffer.
    both = (copy_nbytes + (copy_nbytes if gather_copy_nbytes is None else gather_copy_nbytes)) / world
    match algorithm:
        case "scatter_reduce":
            return Cost(2 if world > 1 else 0, (world - 1) * both, local * foreign * both)
        case "all_gather":
            return Cost(1 if world > 1 else 0, (world - 1) * copy_nbytes, float(local * foreign * copy_nbytes))
        case "ring":
            return Cost(2 * (world - 1), (world - 1) * both, (world - 1) * both if nodes > 1 else 0.0)
        case "hierarchical":
            gathered = both * world - copy_nbytes
            inside, outside = (local - 1) / local * (intra_copy_nbytes + gathered), (nodes - 1) * both
            return Cost(2 * (local > 1) + 2 * (nodes > 1), inside + outside, local * outside)
