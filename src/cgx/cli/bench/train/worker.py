"""What one rank of the benchmark does: every contender trains a replica of its own, in turns.

`cgx bench train` starts this module under torchrun. Each rank writes down what it saw and prints it at the end; judging
is left to the supervisor, who sees all ranks. A barrier stands before and behind every turn: while one contender is
timed the others, and the threads they may have, have nothing to do.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist

from cgx.cli.bench.train.checks import allowed_gradient_nmse, exact_mean, gradient_nmse
from cgx.cli.bench.train.data_workers import busy_workers
from cgx.cli.bench.train.hows import AUTO, OFF
from cgx.cli.bench.train.messages import COMPUTE, Advanced, Assignment, Event, Measured, Outcome, Track, to_line
from cgx.cli.bench.train.replica import Replica
from cgx.cli.bench.train.stopping import interval, is_enough
from cgx.cli.bench.train.workloads import WORKLOADS
from cgx.testbed import read_counters
from cgx.torch.handle import Handle

_WARM_UP_STEPS: Final = 4  # DDP rebuilds its buckets, kernels compile, PowerSGD starts


@final
class _Rank:
    """One rank of the benchmark."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._rank = dist.get_rank()
        workload = WORKLOADS[assignment.model]
        generator = torch.Generator().manual_seed(self._rank)
        self._batches = [workload.make_batch(generator, assignment.batch) for _ in range(assignment.accumulate)]
        self._replicas = {name: Replica(workload, name) for name in (COMPUTE, *assignment.hows)}
        self._tracks = {name: Track() for name in self._replicas}
        self._slowest: dict[str, list[float]] = {name: [] for name in self._replicas}

    def run(self) -> None:
        """Takes turns until there are enough, and reports."""
        for name in self._replicas:
            self._warm_up(name)
        for index in range(self._assignment.max_pairs):
            # Shuffled, so that nobody always follows the same; seeded, so that all ranks agree.
            for name in random.Random(index).sample(list(self._replicas), len(self._replicas)):
                self._take_turn(name)
            if self._is_enough(index + 1):
                break
        outcomes = self._outcomes()
        _emit(
            Measured(
                rank=self._rank,
                threads=torch.get_num_threads(),
                buffers_nbytes=self._replicas[OFF].buffers_nbytes,
                tracks=self._tracks,
                outcomes=outcomes,
            )
        )

    def close(self) -> None:
        """Lets go of all replicas, while the process group still is there for them."""
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()

    def _warm_up(self, name: str) -> None:
        """Makes the steps that are unlike the rest; of ``auto``, which times its own, all until it is settled."""
        replica = self._replicas[name]
        for index in range(self._assignment.warm_up if name == AUTO else _WARM_UP_STEPS):
            replica.step(self._batches)
            if name == AUTO and index >= _WARM_UP_STEPS and _agree(_is_settled(replica.handle)):
                return

    def _take_turn(self, name: str) -> None:
        replica, track, steps = self._replicas[name], self._tracks[name], self._assignment.steps_per_turn
        payload_before, waited_before = _reported(replica.handle)
        dist.barrier()
        counted_before, cpu_before, start = self._counted(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            loss = replica.step(self._batches)
        track.seconds.append((time.perf_counter() - start) / steps)
        track.cpu_seconds.append((time.process_time() - cpu_before) / steps)
        dist.barrier()  # past it every peer has all that we sent: nothing waits in a queue, uncounted
        if self._assignment.interface is not None:
            track.counted_nbytes.append((self._counted() - counted_before) / steps)
        if replica.handle is not None:
            payload, waited = _reported(replica.handle)
            track.payload_nbytes.append((payload - payload_before) / steps)
            track.wait_seconds.append((waited - waited_before) / steps)
        track.losses.append(loss)

    def _counted(self) -> int:
        interface = self._assignment.interface
        return 0 if interface is None else read_counters(interface).tx_nbytes

    def _is_enough(self, pairs: int) -> bool:
        """Whether the round just made was the last."""
        slowest = torch.tensor([track.seconds[-1] for track in self._tracks.values()], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for seconds, value in zip(self._slowest.values(), slowest.tolist(), strict=True):
            seconds.append(value)
        others = [how for how in self._assignment.hows if how != OFF]
        intervals = [interval(self._slowest[how], self._slowest[OFF]) for how in others]
        if self._rank == 0:
            _emit(Advanced(pairs, max((each.half_width for each in intervals), default=0.0)))
        assignment = self._assignment
        return _agree(
            is_enough(
                intervals,
                assignment.goal,
                pairs=pairs,
                min_pairs=assignment.min_pairs,
                max_pairs=assignment.max_pairs,
            )
        )

    def _outcomes(self) -> dict[str, Outcome]:
        """Hashes all replicas, then has all of them average the same gradient."""
        hows = self._assignment.hows
        digests = {how: self._replicas[how].digest() for how in hows}
        auto = {how: replica.handle.report().auto for how, replica in self._replicas.items() if replica.handle}
        baseline, batch = self._replicas[OFF], self._batches[0]
        local = baseline.local_gradient(batch)
        exact = exact_mean(local)
        outcomes = {}
        for how in hows:
            self._replicas[how].load_weights_of(baseline)
            found = self._replicas[how].averaged_gradient(batch)
            allowed = allowed_gradient_nmse(how, local, exact)
            outcome = Outcome(digests[how], gradient_nmse(found, exact), allowed)
            if (told := auto.get(how)) is not None:
                outcome = replace(
                    outcome,
                    chosen=told.choice + ("" if told.is_settled else ", on trial"),
                    decisions=list(told.history),
                )
            outcomes[how] = outcome
        return outcomes


def _reported(handle: Handle | None) -> tuple[int, float]:
    """Payload bytes that cgx sent and seconds that it was waited for, so far."""
    if handle is None:
        return 0, 0.0
    report = handle.report()
    return report.wire_nbytes, report.wait_seconds


def _is_settled(handle: Handle | None) -> bool:
    auto = None if handle is None else handle.report().auto
    return auto is None or auto.is_settled


def _agree(opinion: bool) -> bool:
    """Rank 0's opinion, on all ranks."""
    decided = torch.tensor(opinion)
    dist.broadcast(decided, 0)
    return bool(decided)


def main(assignment: Assignment) -> None:
    """Runs the benchmark in the world that torchrun made."""
    # Threads are those that the testbed deals out by OMP_NUM_THREADS: each rank plays a host of its own.
    with busy_workers(assignment.data_workers):
        dist.init_process_group("gloo", timeout=timedelta(seconds=assignment.timeout_seconds))
        try:
            rank = _Rank(assignment)
            rank.run()
            dist.barrier()
            rank.close()
        finally:
            dist.destroy_process_group()


def _emit(event: Event) -> None:
    sys.stdout.write(to_line(event))
    sys.stdout.flush()


if __name__ == "__main__":
    main(Assignment.from_json(sys.argv[1]))
