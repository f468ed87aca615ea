"""One small training job, as a function of everything that may or may not change its bits."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx
from tests.integration.zoo import generator, mlp

STOCK = None
SMALL = {"bucket_cap_mb": 0.02}  # several buckets


@final
@dataclass(frozen=True)
class Job:
    """What to train and how.

    Args:
        steps: Optimizer steps in all.
        how: For `cgx.compress`, or STOCK to leave the model alone.
        options: More of `cgx.compress`.
        ddp: Options of DistributedDataParallel.
        compress_at: The step before which `cgx.compress` is called.
        accumulate: Backward passes per step; all but the last under `no_sync`.
        dtype: Of the model.
    """

    steps: int = 8
    how: Any = "uniform:4"
    options: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    compress_at: int = 0
    accumulate: int = 1
    dtype: torch.dtype = torch.float32


@final
@dataclass(frozen=True)
class Trained:
    """What a rank ended with; `saved` is a checkpoint as bytes."""

    losses: list[float]
    digest: str
    saved: bytes


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors' bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs of this rank and step, and targets of a fixed teacher."""
    x = torch.randn(32, 64, generator=generator(rank, step, 7))
    teacher = torch.randn(64, 10, generator=generator(1, 2, 3))
    return x, (x @ teacher).argmax(1)


def train(rank: int, job: Job, *, first: int = 0, saved: bytes | None = None) -> Trained:
    """Train steps `first` up to `job.steps`; go on from `saved` if it is given."""
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp(job.dtype), **job.ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    handle, losses = None, []
    for step in range(first, job.steps):
        if step == max(first, job.compress_at) and job.how is not STOCK:
            handle = cgx.compress(model, job.how, **job.options)
            if state is not None and state["cgx"] is not None:
                handle.load_state_dict(state["cgx"])
        optimizer.zero_grad()
        for part in range(job.accumulate):
            x, y = batch(rank, step * job.accumulate + part)
            model.require_backward_grad_sync = part == job.accumulate - 1  # what no_sync() sets
            loss = nn.functional.cross_entropy(model(x.to(job.dtype)).float(), y)
            (loss / job.accumulate).backward()
        optimizer.step()
        losses.append(loss.item())
    buffer = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "cgx": None if handle is None else handle.state_dict(),
        },
        buffer,
    )
    return Trained(losses, digest(model.state_dict().values()), buffer.getvalue())


def resume(rank: int, job: Job, first: int, saved: list[bytes]) -> Trained:
    """Go on from this rank's checkpoint in a new process."""
    return train(rank, job, first=first, saved=saved[rank])


def wrapped(seed: int = 3, **ddp: Any) -> DistributedDataParallel:
    """Return a DDP model."""
    torch.manual_seed(seed)
    return DistributedDataParallel(mlp(), **ddp)


def step(model: nn.Module, rank: int, number: int) -> None:
    """Train one step by hand."""
    model.zero_grad()
    x, y = batch(rank, number)
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad


def all_equal(values: Sequence[Any]) -> bool:
    """Compare what ranks returned."""
    return all(value == values[0] for value in values)
