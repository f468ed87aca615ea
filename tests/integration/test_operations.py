"""The backend ``cgx`` beside Gloo: every public operation gives what stock gives, or refuses what stock refuses."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import run_processes
from tests.integration.operations import NOT_OPERATIONS, OPERATIONS

_REFUSED_BY_NAME = {"monitored_barrier"}  # by torch, for every backend that is not called gloo
_BACKENDS = ("cgx", "cpu:cgx", "cpu:gloo,cuda:cgx")


def plain(value: Any) -> Any:
    """Return a value that pickles and compares."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    return [plain(one) for one in value] if isinstance(value, list) else value


def outcome(operation: Callable[[Any], Any], group: dist.ProcessGroup) -> Any:
    """Return the result, or the kind of error: words differ from call to call."""
    try:
        return plain(operation(group))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}"


def all_outcomes(group: dist.ProcessGroup) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # some of these names are deprecated
    return {name: outcome(operation, group) for name, operation in OPERATIONS.items()}


def anew(rank: int, backend: str) -> None:
    """Start torch.distributed again with another backend."""
    port = torch.tensor(0)
    world = dist.get_world_size()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    if rank:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def as_default_group(rank: int, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    stock = all_outcomes(dist.group.WORLD)
    anew(rank, backend)
    ours = all_outcomes(dist.group.WORLD)
    dist.barrier()  # the store goes with rank 0
    return stock, ours


def as_subgroup(rank: int, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranks 2 and 0 of three, in groups of two backends."""
    ranks = [0, 2]
    gloo, ours = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks, backend=backend)
    if rank not in ranks:
        return {}, {}
    return all_outcomes(gloo), all_outcomes(ours)


def compare(stock: dict[str, Any], ours: dict[str, Any]) -> int:
    """Check each operation; return how many gave a result."""
    different = {name for name in stock if stock[name] != ours[name]}
    assert different <= _REFUSED_BY_NAME, {name: (stock[name], ours[name]) for name in different - _REFUSED_BY_NAME}
    return sum(not str(result).startswith("refused") for result in ours.values())


@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_operation_gives_what_gloo_gives(backend: str) -> None:
    for stock, ours in run_processes(as_default_group, 3, backend, timeout_seconds=110.0):
        assert compare(stock, ours) > 80
        assert "refused" in ours["monitored_barrier"]


def test_every_operation_gives_what_gloo_gives_in_a_subgroup() -> None:
    (stock, ours), other, _ = run_processes(as_subgroup, 3, "cgx", timeout_seconds=110.0)
    assert compare(stock, ours) > 80
    assert other == ({}, {})


def test_the_table_knows_every_public_operation() -> None:
    words = set(re.findall(r"\w+", " ".join(OPERATIONS))) | {"send", "recv", "isend", "irecv", "send_object_list"}
    words |= {"recv_object_list"}
    assert set(dist.distributed_c10d.__all__) - words - NOT_OPERATIONS == set()


def groups(rank: int) -> list[Any]:
    """Meshes, subgroups and functional collectives over them, on the backend `cgx`."""
    anew(rank, "cgx")
    assert dist.get_backend() == "cgx"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x = torch.full((300,), float(rank))
    dist.all_reduce(x, group=mesh["shard"].get_group())
    seen = [x[0].item()]
    mine, _ = dist.new_subgroups(2, backend="cgx")
    y = torch.full((300,), float(rank))
    dist.all_reduce(y, group=mine, op=dist.ReduceOp.MAX)
    z = torch.tensor([rank])
    dist.all_reduce(z, group=dist.new_group([0, 1, 2, 3]))
    dist.barrier()
    return [*seen, y[0].item(), z.item()]


def test_meshes_and_subgroups_work() -> None:
    assert run_processes(groups, 4) == [[1.0, 1.0, 6], [1.0, 1.0, 6], [5.0, 3.0, 6], [5.0, 3.0, 6]]
