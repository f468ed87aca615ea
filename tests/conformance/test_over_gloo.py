"""Every algorithm between processes, over the lanes that sessions open: what the oracle computes, on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from cgx.collectives.base import Op
from cgx.torch.compat import new_lane
from cgx.transports.process_group import ProcessGroupTransport
from tests.conformance.models import METHODS, inputs_of, mixed, same_bytes
from tests.conformance.oracle import reduce_by_oracle
from tests.conformance.ranks import reduce_on_rank
from tests.harness import run_processes

WORLD = 4
SECONDS = 20.0


def reduce_over_gloo(rank: int, names: list[str]) -> None:
    """Reduce a mixed model of each dtype by each method, in buckets of several pieces."""
    for name in names:
        assert dist.group.WORLD is not None
        lanes = [ProcessGroupTransport(new_lane(dist.group.WORLD), timeout_seconds=SECONDS) for _ in range(2)]
        for with_varying, dtype in [(False, "bf16"), (True, "fp32")]:
            segments = mixed(dtype, with_varying=with_varying)
            everybody = [s.name for s in segments]
            buckets = [everybody[4:], everybody[:4]]
            inputs = inputs_of(segments, WORLD)
            asked = METHODS[name].settings(Op.AVG, buckets, 50_000)
            result = reduce_on_rank(lanes, inputs[rank], segments, asked)
            assert result.error is None, (name, result.error)
            assert same_bytes(result.values, reduce_by_oracle(inputs, segments, asked)), (name, dtype)


def test_all_ranks_end_with_what_the_oracle_computes() -> None:
    names = ["scatter_reduce-4", "all_gather-4", "ring-4", "hierarchical-2x2", "hierarchical-2x2-interleaved"]
    run_processes(reduce_over_gloo, WORLD, names)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_algorithm_needs_more_than_one_rank(world_size: int) -> None:
    run_processes(reduce_on_few, world_size)


def reduce_on_few(rank: int) -> None:
    """Reduce by every flat algorithm on one or two ranks."""
    world_size, segments = dist.get_world_size(), mixed()
    for algorithm in ("scatter_reduce", "all_gather", "ring"):
        assert dist.group.WORLD is not None
        lanes = [ProcessGroupTransport(new_lane(dist.group.WORLD), timeout_seconds=SECONDS) for _ in range(2)]
        inputs, asked = inputs_of(segments, world_size), METHODS[f"{algorithm}-{world_size}"].settings()
        result = reduce_on_rank(lanes, inputs[rank], segments, asked)
        assert result.error is None, result.error
        assert same_bytes(result.values, reduce_by_oracle(inputs, segments, asked)), algorithm
