"""Differences between PyTorch versions and backends, kept in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from cgx.core.env import restart_count
from cgx.core.spec import Dtype

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout the user gave the group (a new group would otherwise get the 30-minute default)."""
    backend: Any = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    timeout: timedelta = backend.options._timeout
    return timeout


_lanes_opened: Counter[tuple[int, ...]] = Counter()


def new_lane(group: dist.ProcessGroup) -> Any:
    """A private Gloo backend for the ranks of ``group``; collective over that group only.

    It is not registered with torch.distributed: the user's groups, their names and their order stay as they were, and
    letting go of the object closes the connections at once.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    number = _lanes_opened[ranks]
    _lanes_opened[ranks] += 1
    # torchrun's store outlives the ranks it starts again: their addresses of before are still in it.
    store = PrefixStore(f"cgx/{restart_count()}/{ranks}/{number}", dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout_of(group))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the backward pass under way ends; what it raises reaches ``backward()``'s caller.

    Callbacks run in the order they are queued, also those that a callback queues. Outside a backward pass
    (``DDP.join`` calls hooks for ranks that are out of data) it runs at once.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError as error:
        if "during backward pass" not in str(error):
            raise
        callback()


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """A compiler calls ``function`` rather than reads it."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined,return-value]


def to_array(tensor: torch.Tensor) -> Any:
    """A flat dense CPU tensor as the NumPy array kernels read (bfloat16 as uint16), sharing memory."""
    flat = tensor.detach()
    return (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
