"""What one rank of the demo does: it trains every run of its assignment, one after another.

`cgx demo` starts this module under torchrun and reads what rank 0 prints, one event a line. All
runs share the processes and the group, so that starting up is paid once. Whatever is not a training
step (compiling kernels, DDP's rebuilding of its buckets, validation, hashing) happens while the
clock and the byte counters stand still, for stock DDP as for cgx.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import cgx
from cgx.cli.demo.events import (
    STOCK,
    Assignment,
    Event,
    Finished,
    Started,
    Stepped,
    Validated,
    to_line,
)
from cgx.cli.demo.models import TASKS, Evaluation
from cgx.testbed import read_counters
from cgx.torch.handle import Handle

_WARM_UP_STEPS = 2  # DDP rebuilds its buckets at the start of the second
_VALIDATIONS = 8
_GROUP_TIMEOUT = timedelta(minutes=2)


def main(assignment: Assignment) -> None:
    """Trains all runs in the world that torchrun made."""
    # Each rank plays a host of its own: it gets one core, as the others have theirs to do.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    try:
        for index in range(len(assignment.runs)):
            _Training(assignment, index).run()
    finally:
        dist.destroy_process_group()


@final
class _Training:
    """One run, on one rank."""

    def __init__(self, assignment: Assignment, index: int) -> None:
        self.assignment = assignment
        self.index = index
        self.spec = assignment.runs[index]
        self.task = TASKS[self.spec.model]
        torch.manual_seed(self.spec.seed)
        self.model = DistributedDataParallel(self.task.build())
        self.optimizer: Optimizer = self.task.optimizer(self.model)
        self.handle = self._attach()

    def run(self) -> None:
        _emit(Started(self.index))
        for step in range(self.spec.steps, self.spec.steps + _WARM_UP_STEPS):
            self._backward(step)
        sent_before = self._sent_nbytes()
        durations, evaluation = self._train()
        sent_nbytes = self._sent_nbytes() - sent_before
        _emit(
            Finished(
                run=self.index,
                final_loss=evaluation.loss,
                final_accuracy=evaluation.accuracy,
                step_p50_s=statistics.median(durations),
                wire_nbytes_per_step=_mean_over_ranks(sent_nbytes) / self.spec.steps,
                replicas_identical=_replicas_are_identical(self.model.module),
            )
        )
        if self.handle is not None:
            self.handle.remove()

    def _attach(self) -> Handle | None:
        rate = self.assignment.throttle_bit_s
        if self.spec.how == STOCK and rate is None:
            return None
        return cgx.compress(self.model, self.spec.how, seed=self.spec.seed, throttle_bit_s=rate)

    def _train(self) -> tuple[list[float], Evaluation]:
        """Trains all steps; returns how long each took, in seconds, and how good the model is."""
        steps = self.spec.steps
        peaks = [group["lr"] for group in self.optimizer.param_groups]
        validate_after = {round(steps * part / _VALIDATIONS) for part in range(1, _VALIDATIONS + 1)}
        durations: list[float] = []
        evaluation = self._validate(step=0, seconds=0.0)
        for step in range(steps):
            factor = self.task.learning_rate_factor(step, steps)
            for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            start = time.perf_counter()
            loss = self._backward(step)
            self.optimizer.step()
            durations.append(time.perf_counter() - start)
            _emit(Stepped(self.index, step + 1, sum(durations), loss))
            if step + 1 in validate_after:
                evaluation = self._validate(step=step + 1, seconds=sum(durations))
        return durations, evaluation

    def _backward(self, step: int) -> float:
        self.optimizer.zero_grad()
        batch = self.task.batch(self.spec.seed, dist.get_rank(), step)
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _validate(self, *, step: int, seconds: float) -> Evaluation:
        # Every rank does the same and sends nothing: the ranks stay in step, the counters still.
        evaluation = self.task.evaluate(self.model.module)
        _emit(Validated(self.index, step, seconds, evaluation.loss, evaluation.accuracy))
        return evaluation

    def _sent_nbytes(self) -> float:
        """Returns what this rank has sent so far; all ranks call it together."""
        # Past the barrier every peer has all that we sent: nothing waits in a queue, uncounted.
        dist.barrier()
        if self.assignment.throttle_bit_s is not None and self.handle is not None:
            return self.handle.report().wire_nbytes
        sent_nbytes = read_counters(self.assignment.interface).tx_nbytes
        return sent_nbytes / self.assignment.ranks_on_interface


def _emit(event: Event) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(to_line(event))
        sys.stdout.flush()


def _mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def _replicas_are_identical(model: nn.Module) -> bool:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own)
    return all(torch.equal(own, theirs) for theirs in everyones)


if __name__ == "__main__":
    main(Assignment.from_json(sys.argv[1]))
