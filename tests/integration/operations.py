"""Every public operation of torch.distributed as a call that returns what it gave this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_NUMEL = 300  # large enough that a hook would compress it

Operation = Callable[[dist.ProcessGroup], Any]


def tensor(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32, numel: int = _NUMEL) -> Tensor:
    """Return what this rank brings; small whole numbers, so that every order of sums gives the same."""
    made = torch.arange(numel) % 7 + group.rank() + 1
    return made.to(dtype)


def parts(group: dist.ProcessGroup) -> list[Tensor]:
    """Return a tensor for each rank."""
    return [tensor(group) + 10 * to for to in range(group.size())]


def blanks(group: dist.ProcessGroup) -> list[Tensor]:
    """Return room for a tensor of each rank."""
    return [torch.zeros(_NUMEL) for _ in range(group.size())]


def waited(work: Any) -> None:
    """Wait for a call that may have been asynchronous."""
    if work is not None:
        work.wait()


def both_ways(name: str, call: Callable[[dist.ProcessGroup, bool], tuple[Any, Any]]) -> dict[str, Operation]:
    """Return the synchronous and the asynchronous form; `call` returns the work and the result."""

    def form(is_async: bool) -> Operation:
        def operation(group: dist.ProcessGroup) -> Any:
            work, result = call(group, is_async)
            waited(work)
            return result

        return operation

    return {name: form(False), f"{name}, async": form(True)}


def reduce_forms() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for dtype in _DTYPES:
        for op in _OPS:

            def call(group: Any, is_async: bool, dtype: Any = dtype, op: str = op) -> tuple[Any, Any]:
                x = tensor(group, dtype)
                return dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group, async_op=is_async), x

            found |= both_ways(f"all_reduce {op} {str(dtype).removeprefix('torch.')}", call)
    return found


def collectives() -> dict[str, Operation]:
    def all_reduce_coalesced(group: Any, is_async: bool) -> Any:
        x = [tensor(group), tensor(group) * 2]
        return dist.all_reduce_coalesced(x, group=group, async_op=is_async), x

    def broadcast(group: Any, is_async: bool) -> Any:
        x = tensor(group)
        return dist.broadcast(x, group=group, group_src=1, async_op=is_async), x

    def reduce(group: Any, is_async: bool) -> Any:
        x = tensor(group)
        work = dist.reduce(x, group=group, group_dst=1, async_op=is_async)
        return work, x if group.rank() == 1 else None

    def all_gather(group: Any, is_async: bool) -> Any:
        out = blanks(group)
        return dist.all_gather(out, tensor(group), group=group, async_op=is_async), out

    def all_gather_coalesced(group: Any, is_async: bool) -> Any:
        out = [blanks(group), blanks(group)]
        return dist.all_gather_coalesced(out, [tensor(group), -tensor(group)], group=group, async_op=is_async), out

    def gather(group: Any, is_async: bool) -> Any:
        out = blanks(group) if group.rank() == 1 else None
        return dist.gather(tensor(group), out, group=group, group_dst=1, async_op=is_async), out

    def scatter(group: Any, is_async: bool) -> Any:
        out = torch.zeros(_NUMEL)
        given = parts(group) if group.rank() == 1 else None
        return dist.scatter(out, given, group=group, group_src=1, async_op=is_async), out

    def reduce_scatter(group: Any, is_async: bool) -> Any:
        out = torch.zeros(_NUMEL)
        return dist.reduce_scatter(out, parts(group), group=group, async_op=is_async), out

    def all_to_all(group: Any, is_async: bool) -> Any:
        out = blanks(group)
        return dist.all_to_all(out, parts(group), group=group, async_op=is_async), out

    def all_to_all_single(group: Any, is_async: bool) -> Any:
        out = torch.zeros(group.size() * _NUMEL)
        return dist.all_to_all_single(out, torch.cat(parts(group)), group=group, async_op=is_async), out

    def barrier(group: Any, is_async: bool) -> Any:
        return dist.barrier(group, async_op=is_async), "passed"

    calls = (
        all_reduce_coalesced, broadcast, reduce, all_gather, all_gather_coalesced, gather, scatter, reduce_scatter,
        all_to_all, all_to_all_single, barrier,
    )  # fmt: skip
    found: dict[str, Operation] = {}
    for call in calls:
        found |= both_ways(call.__name__, call)
    for name in ("all_gather_into_tensor", "all_gather_single"):  # the first is the older name

        def into(group: Any, is_async: bool, name: str = name) -> Any:
            out = torch.zeros(group.size() * _NUMEL)
            return getattr(dist, name)(out, tensor(group), group=group, async_op=is_async), out

        found |= both_ways(name, into)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):

        def from_one(group: Any, is_async: bool, name: str = name) -> Any:
            out = torch.zeros(_NUMEL)
            return getattr(dist, name)(out, torch.cat(parts(group)), group=group, async_op=is_async), out

        found |= both_ways(name, from_one)
    return found


def coalescing(group: dist.ProcessGroup) -> Any:
    x = [tensor(group), tensor(group) * 3]
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as works:
        for one in x:
            dist.all_reduce(one, group=group)
    works.wait()
    return x


def all_gather_object(group: dist.ProcessGroup) -> Any:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, {"rank": group.rank()}, group=group)
    return out


def gather_object(group: dist.ProcessGroup) -> Any:
    out: list[Any] | None = [None] * group.size() if group.rank() == 1 else None
    dist.gather_object(("rank", group.rank()), out, group=group, group_dst=1)
    return out


def broadcast_object_list(group: dist.ProcessGroup) -> Any:
    said = [{"from": group.rank()}, "words"]
    dist.broadcast_object_list(said, group=group, group_src=1)
    return said


def scatter_object_list(group: dist.ProcessGroup) -> Any:
    out: list[Any] = [None]
    given = [f"for {to}" for to in range(group.size())] if group.rank() == 1 else None
    dist.scatter_object_list(out, given, group=group, group_src=1)
    return out


def send_and_recv(group: dist.ProcessGroup) -> Any:
    """Rank 0 sends to the others, and hears from them."""
    x = torch.zeros(_NUMEL)
    if group.rank() == 0:
        for to in range(1, group.size()):
            dist.send(tensor(group) * to, group=group, group_dst=to)
        return None
    dist.recv(x, group=group, group_src=0)
    return x


def isend_and_irecv(group: dist.ProcessGroup) -> Any:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    x = torch.zeros(_NUMEL)
    for work in (
        dist.isend(tensor(group), group=group, group_dst=after), dist.irecv(x, group=group, group_src=before)
    ):  # fmt: skip
        waited(work)
    return x


def batch_isend_irecv(group: dist.ProcessGroup) -> Any:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    x, given = torch.zeros(_NUMEL), tensor(group)
    send = dist.P2POp(dist.isend, given, group=group, group_peer=after)
    receive = dist.P2POp(dist.irecv, x, group=group, group_peer=before)
    for work in dist.batch_isend_irecv([send, receive]):
        waited(work)
    return x


def send_object_list_and_recv_object_list(group: dist.ProcessGroup) -> Any:
    said: list[Any] = [None]
    if group.rank() == 0:
        dist.send_object_list([{"to": 1}], group=group, group_dst=1)
    elif group.rank() == 1:
        dist.recv_object_list(said, group=group, group_src=0)
    return said


def functionals() -> dict[str, Operation]:
    def permute(group: Any) -> Any:
        world = group.size()
        return functional.permute_tensor(tensor(group), [(at + 1) % world for at in range(world)], group)

    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: functional.all_reduce(tensor(group), "sum", group),
        "all_reduce avg": lambda group: functional.all_reduce(tensor(group), "avg", group),
        "all_reduce_coalesced": lambda group: functional.all_reduce_coalesced([tensor(group)] * 2, "sum", group),
        "all_gather_tensor": lambda group: functional.all_gather_tensor(tensor(group), 0, group),
        "all_gather_into_tensor_coalesced": lambda group: functional.all_gather_into_tensor_coalesced(
            [tensor(group), -tensor(group)], group
        ),
        "reduce_scatter_tensor": lambda group: functional.reduce_scatter_tensor(
            torch.cat(parts(group)), "sum", 0, group
        ),
        "reduce_scatter_tensor_coalesced": lambda group: functional.reduce_scatter_tensor_coalesced(
            [torch.cat(parts(group))] * 2, "sum", [0, 0], group
        ),
        "all_to_all_single": lambda group: functional.all_to_all_single(torch.cat(parts(group)), None, None, group),
        "broadcast": lambda group: functional.broadcast(tensor(group), 1, group),
        "permute_tensor": permute,
    }

    def settled(call: Callable[[Any], Any]) -> Operation:
        def operation(group: dist.ProcessGroup) -> Any:
            result = call(group)
            many = result if isinstance(result, list) else [result]
            return [functional.wait_tensor(one).clone() for one in many]

        return operation

    return {f"functional.{name}": settled(call) for name, call in calls.items()}


OPERATIONS: Mapping[str, Operation] = {
    **reduce_forms(),
    **collectives(),
    "coalescing manager": coalescing,
    **{
        call.__name__: call
        for call in (
            all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_and_recv,
            isend_and_irecv, batch_isend_irecv, send_object_list_and_recv_object_list,
        )
    },
    **functionals(),
    "monitored_barrier": lambda group: dist.monitored_barrier(group, timeout=timedelta(seconds=10)),
}  # fmt: skip

# Public names of torch.distributed that move nothing between ranks of a group, or that other tests use.
NOT_OPERATIONS = frozenset(
    [
        "AllToAllOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "Backend",
        "BackendConfig",
        "BarrierOptions",
        "BroadcastOptions",
        "DebugLevel",
        "GatherOptions",
        "GroupMember",
        "GroupName",
        "P2POp",
        "PrefixStore",
        "ProcessGroup",
        "ProcessGroupGloo",
        "ReduceOp",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
        "Store",
        "Work",
        "default_pg_timeout",
        "destroy_process_group",
        "get_backend",
        "get_backend_config",
        "get_debug_level",
        "get_default_backend_for_device",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group",
        "init_process_group",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "record_comm",
        "reduce_op",
        "shrink_group",
        "split_group",
        "supports_complex",
    ]
)
