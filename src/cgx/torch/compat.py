"""Differences between PyTorch versions and backends, kept in one place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cgx.core.spec import Dtype

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout the user gave the group (a new group would otherwise get the 30-minute default)."""
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


def new_lane(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A private group of the same ranks, backend and timeout; collective over ``group`` only."""
    lane: dist.ProcessGroup = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend="gloo",
        use_local_synchronization=True,
    )
    return lane


def queue_backward_callback(callback: Any) -> None:
    """Runs ``callback`` at the end of the backward pass under way; what it raises reaches ``backward()``'s caller."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def to_array(tensor: torch.Tensor) -> Any:
    """A flat dense CPU tensor as the NumPy array kernels read (bfloat16 as uint16), sharing memory."""
    flat = tensor.detach()
    return (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
