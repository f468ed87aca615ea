"""Ranks as a launcher starts them for a framework, and what the tests of adapters compare."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from tests.harness import outcomes_of, run_processes
from tests.integration.training import digest

SECONDS = 110.0  # importing a framework on two busy cores takes a while
SAVED_AT, KILLED_AT, STEPS = 4, 6, 8


@final
@dataclass(frozen=True)
class Job:
    """What to train.

    Args:
        folder: For checkpoints.
        how: For cgx; None is the framework as it comes.
        options: Further ones of `cgx.compress`.
        first: Step to go on from; 0 starts afresh.
        killed_at: Before this step every rank kills itself.
        accumulate: Backward passes a step.
    """

    folder: Path
    how: str | None
    options: dict[str, Any] | None = None
    first: int = 0
    killed_at: int = 99
    accumulate: int = 1


@final
@dataclass(frozen=True)
class Trained:
    """What a rank ended with."""

    losses: list[float]
    digest: str
    ratio: float | None


def prepare(rank: int) -> None:
    """Set the environment as torchrun does; frameworks warn of much that is none of our business."""
    warnings.simplefilter("default")
    world = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def die_at(job: Job, step: int) -> None:
    """Kill this process where the job says so."""
    if step == job.killed_at:
        os.kill(os.getpid(), signal.SIGKILL)


def trained(losses: Sequence[float], model: torch.nn.Module, handle: Any) -> Trained:
    """Return the outcome of a rank."""
    report = None if handle is None else handle.report()
    ratio = None if report is None or not report.wire_nbytes else report.ratio
    return Trained(list(losses), digest(model.state_dict().values()), ratio)


Train = Callable[[int, Job], Trained]


def check_beside_stock(train: Train, folder: Path, **options: Any) -> None:
    """Exact equals stock to rounding; compressed keeps replicas alike and learns what stock learns."""
    (stock, _), (exact, _), compressed = (
        run_processes(train, 2, Job(folder / str(how), how, **options), timeout_seconds=SECONDS)
        for how in (None, "identity", "uniform:4")
    )
    assert stock.ratio is None
    torch.testing.assert_close(exact.losses, stock.losses, rtol=1e-5, atol=1e-6)
    assert compressed[0].digest == compressed[1].digest
    assert compressed[0].digest != stock.digest
    assert compressed[0].ratio > 6
    assert stock.losses[-1] < 0.9 * stock.losses[0], "or there is nothing to compare"
    assert abs(compressed[0].losses[-1] - stock.losses[-1]) < 0.1 * (stock.losses[0] - stock.losses[-1])


def check_resume(train: Train, folder: Path) -> None:
    """A run that is killed and goes on from its checkpoint equals one that was never stopped, bit for bit."""
    options = {"error_feedback": True}
    whole = run_processes(train, 2, Job(folder / "whole", "uniform:2", options), timeout_seconds=SECONDS)
    cut = outcomes_of(train, 2, Job(folder / "cut", "uniform:2", options, killed_at=KILLED_AT), timeout_seconds=SECONDS)
    assert [outcome.exit_code for outcome in cut] == [-signal.SIGKILL] * 2
    resumed = run_processes(
        train, 2, Job(folder / "cut", "uniform:2", options, first=SAVED_AT), timeout_seconds=SECONDS
    )
    for one, other in zip(whole, resumed, strict=True):
        assert len(other.losses) == STEPS - SAVED_AT
        assert one.losses[SAVED_AT:] == other.losses
        assert one.digest == other.digest
    assert whole[0].digest == whole[1].digest
