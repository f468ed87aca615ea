"""``init_process_group("cgx")``: the native engines under a name that tells cgx which models to compress."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from cgx.torch.automatic import watch


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """What torch calls for the backend ``cgx``: every collective is the native engine's, and exact.

    Only the gradients of DDP models that are built on the group are compressed, by their hook.

    The group is torch's own class. A subclass in Python holds the interpreter's lock while it hands work to Gloo, whose
    threads take that lock with their queue locked: both then wait for ever (docs/adr/0010).

    Args:
        store: Where ranks meet.
        rank: This rank in the group.
        size: Ranks of the group.
        timeout: Of every collective.
    """
    watch()
    kinds = dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kinds.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group  # type: ignore[no-any-return]
