"""``init_process_group("cgx")``: the native engines under a name that tells cgx which models to compress."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from cgx.torch.automatic import watch


@final
class CgxProcessGroup(dist.ProcessGroup):
    """A process group that overrides nothing: every collective is the native engine's, and exact.

    Only the gradients of DDP models that are built on it are compressed, by their hook.

    Args:
        store: Where ranks meet.
        rank: This rank in the group.
        size: Ranks of the group.
        timeout: Of every collective.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know one constructor of two
        cpu = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout=timeout)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, cpu)
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    def getBackendName(self) -> str:  # torch's name
        """The name of the backend."""
        return "cgx"


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> CgxProcessGroup:
    """What torch calls for the backend ``cgx``; DDP models are watched from here on."""
    watch()
    return CgxProcessGroup(store, rank, size, timeout)
