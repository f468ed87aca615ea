"""The exact path: the engine's own uncompressed all-reduce, in the same pipeline as everything else."""

from __future__ import annotations

from typing import Any

from cgx.collectives.base import Last, Op, Stages, Ticket
from cgx.transports.base import Transport


def exact_all_reduce(x: Any, op: Op, lane: Transport, tag: int) -> Stages:
    """Sums (or averages) ``x`` in place: any dtype, dense or sparse, that the engine can sum.

    The mean divides first, as stock DDP does, so results equal its bit for bit.

    Args:
        x: A tensor or array of the engine behind ``lane``.
        op: SUM or AVG.
        lane: Where it travels.
        tag: 64 bits that say which reduction it is: engines end the process when ranks sum different sizes.

    Cost: a ticket, and ``2 (W - 1) / W`` times the raw bytes per rank, for an engine that reduces by rings.
    """
    ticket = Ticket(lane, tag)
    if op is Op.AVG:
        divide(x, lane.world_size)
    yield ticket
    yield Last(lane.all_reduce(x))


def divide(x: Any, world_size: int) -> None:
    """Divides in place as stock DDP does, to the bit: sparse gradients by the number, dense ones by its reciprocal."""
    if getattr(x, "is_sparse", False):
        x /= world_size
    else:
        x *= 1.0 / world_size
