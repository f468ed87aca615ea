"""The exact path: the engine's own uncompressed all-reduce, in the same pipeline as everything else."""

from __future__ import annotations

from typing import Any

from cgx.collectives.base import Last, Op, Stages
from cgx.transports.base import Transport


def exact_all_reduce(x: Any, op: Op, lane: Transport) -> Stages:
    """Sums (or averages) ``x`` in place: any dtype, dense or sparse, that the engine can sum.

    The mean scales by the reciprocal first, as stock DDP does, so results equal its bit for bit.

    Args:
        x: A tensor or array of the engine behind ``lane``.
        op: SUM or AVG.
        lane: Where it travels.

    Cost: ``2 (W - 1) / W`` times the raw bytes per rank, for an engine that reduces by rings.
    """
    if op is Op.AVG:
        x *= 1.0 / lane.world_size
    yield Last(lane.all_reduce(x))
