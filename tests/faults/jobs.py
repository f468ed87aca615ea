"""What ranks do when something goes wrong on one of them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from cgx.compressors.uniform import UniformCompressor
from cgx.torch.ddp import Handle
from tests.integration.training import batch
from tests.integration.zoo import mlp

VICTIM = 1
FAULTY_STEP = 3
LONG_SECONDS = 600.0


def wrapped(**ddp: Any) -> DistributedDataParallel:
    """Return a DDP model of several buckets."""
    torch.manual_seed(3)
    return DistributedDataParallel(mlp(), **{"bucket_cap_mb": 0.02, **ddp})


def backward(model: nn.Module, rank: int, number: int) -> None:
    """Compute the gradients of one step."""
    model.zero_grad()
    x, y = batch(rank, number)
    nn.functional.cross_entropy(model(x), y).backward()


def die(gradient: torch.Tensor) -> torch.Tensor:
    """End the process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return gradient


def leave(gradient: torch.Tensor) -> torch.Tensor:
    """End the process without a word."""
    os._exit(7)


def freeze(gradient: torch.Tensor) -> torch.Tensor:
    """Stop, and never go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return gradient


def fail(gradient: torch.Tensor) -> torch.Tensor:
    """Raise what user code raises."""
    raise ZeroDivisionError("on purpose")


FAULTS = {"die": die, "leave": leave, "freeze": freeze, "fail": fail}


def train_until(rank: int, fault: str, layer: int, stays: bool = False) -> None:
    """Train; in one step a fault strikes the victim when the gradient of a layer is ready."""
    model = wrapped()
    handle = cgx.compress(model, "uniform:4", piece_nbytes=5000)
    for number in range(FAULTY_STEP):
        backward(model, rank, number)
    if rank == VICTIM:
        model.module[layer].weight.register_hook(FAULTS[fault])
    try:
        for number in range(FAULTY_STEP, 2 * FAULTY_STEP):
            backward(model, rank, number)
    except ZeroDivisionError:
        if stays:
            time.sleep(LONG_SECONDS)
        raise
    except cgx.CgxError:
        check_broken(model, handle, rank)
        raise
    raise AssertionError("nothing happened")


def check_broken(model: nn.Module, handle: Handle, rank: int) -> None:
    """A broken session says so, and what is left of it can be looked at, saved and taken off."""
    for _ in range(2):
        with pytest.raises(cgx.TransportError, match="broken by an earlier failure"):
            backward(model, rank, 0)
    assert handle.report().reductions > 0
    assert handle.state_dict()["reduction_index"]
    handle.remove()


def train_with_a_broken_codec(rank: int, method: str, call: int) -> None:
    """Train; on the victim, the codec raises at its `call`-th call, and the process lives on."""
    model = wrapped()
    handle = cgx.compress(model, "uniform:4", piece_nbytes=5000)
    backward(model, rank, 0)
    if rank == VICTIM:
        original, calls = getattr(UniformCompressor, method), 0

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise ZeroDivisionError("a kernel failed")
            return original(*args, **kwargs)

        setattr(UniformCompressor, method, broken)
    try:
        for number in range(1, 20):
            backward(model, rank, number)
    except cgx.CgxError:
        check_broken(model, handle, rank)
        dist.barrier()  # nobody ends before all have heard: it is the lanes that told them, not a process's end
        raise


def reduce_until(rank: int, fault: str) -> None:
    """Reduce a large tensor by hand again and again; the victim strikes in the middle of one."""
    x = torch.ones(2000, 500)
    cgx.all_reduce(x)
    if rank == VICTIM:
        original = UniformCompressor.decompress
        calls = 0

        def faulty(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                FAULTS[fault](x)
            return original(*args, **kwargs)

        UniformCompressor.decompress = faulty  # type: ignore[method-assign]
    for _ in range(20):
        cgx.all_reduce(x)
