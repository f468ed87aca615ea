"""What one rank of the benchmark does: at every size, every contender takes its turn in every round.

`cgx bench allreduce` starts this module under torchrun. Each rank writes down what it saw and prints it at the end of a
size; judging is left to the supervisor, who sees all ranks. Whatever is not the reduction (refilling the gradient,
hashing and checking the result) happens while the clock and the counters stand still.
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from typing import final

import numpy as np
import torch
import torch.distributed as dist

from cgx.cli.bench.allreduce.bounds import Input, allowed
from cgx.cli.bench.allreduce.gradients import exact_mean, make_gradient, make_run
from cgx.cli.bench.allreduce.messages import (
    AUTO,
    FP16,
    FP32,
    Advanced,
    Assignment,
    Candidate,
    Event,
    Measured,
    Track,
    to_line,
)
from cgx.cli.bench.allreduce.ways import GRADIENT, Auto, Way, open_ways
from cgx.cli.bench.fidelity import nmse
from cgx.core.spec import parse_specs
from cgx.testbed import read_counters
from cgx.testbed.stream import exchange
from cgx.torch.advisor import SPECS

# Casting rounds to 2**-11, before and after; adding in fp32 to 2**-24 per rank.
_ALLOWED_FP16, _ALLOWED_FP32 = 1e-5, 1e-11
_AUTO_COARSEST = parse_specs(SPECS[-1])  # whatever `auto` takes is held to what this one loses

# How many rounds: as many as fit in this time, of every contender, refilling and checking included.
_SECONDS_PER_CONTENDER = 4.0
_MIN_ROUNDS, _MAX_ROUNDS = 5, 1500
_MAX_EXCHANGES = 10  # of raw streams, spread over the rounds
_SETTLE_CALLS, _SETTLE_SECONDS = 400, 20.0  # that `auto` may take to choose
_PROGRESS_SECONDS = 0.2


@final
class _Bout:
    """All rounds of one size on one rank."""

    def __init__(self, assignment: Assignment, numel: int) -> None:
        self._assignment, self._numel = assignment, numel
        self._rank = dist.get_rank()
        self._gradient = torch.from_numpy(make_gradient(numel, self._rank))
        self._x = torch.empty_like(self._gradient)
        self._ways = open_ways(assignment, numel)
        self._tracks = {name: Track() for name in self._ways}
        self._goodput_seconds: list[float] = []
        # Only rank 0 checks the error: the others' results have the same bits, or the digests tell.
        self._mean = exact_mean(numel, assignment.world_size) if self._rank == 0 else None
        self._told_at = 0.0

    def run(self) -> Measured:
        """Runs all rounds."""
        auto = self._ways.get(AUTO)
        settle_calls = self._settle(auto) if isinstance(auto, Auto) else 0
        round_seconds = 0.0
        for index in range(self._assignment.warm_up):
            start = time.perf_counter()
            self._run_round(index)
            round_seconds = _largest(time.perf_counter() - start)
        sent = [track.payload_nbytes[-1] for track in self._tracks.values() if track.payload_nbytes]
        exchanged_nbytes = max(int(_largest(max(sent, default=0))), self._assignment.goodput_nbytes)
        self._tracks = {name: Track() for name in self._ways}
        total = self._assignment.runs or self._fitting_rounds(round_seconds)
        stride = -(-total // _MAX_EXCHANGES)
        for index in range(total):
            self._run_round(index)
            if index % stride == 0 and self._assignment.goodput_port is not None:
                self._exchange(exchanged_nbytes)
            self._tell(index + 1, total)
        for way in self._ways.values():
            way.close()
        return Measured(
            rank=self._rank,
            numel=self._numel,
            tracks=self._tracks,
            goodput_seconds=self._goodput_seconds,
            exchanged_nbytes=exchanged_nbytes,
            allowed_nmses=self._allowed(),
            settle_calls=settle_calls,
            chosen=auto.choice(self._x.nbytes) if isinstance(auto, Auto) else None,
        )

    def _settle(self, auto: Auto) -> int:
        """Lets `auto` choose before the rounds begin; returns the calls it had."""
        start = time.perf_counter()
        for calls in range(1, _SETTLE_CALLS + 1):
            self._x.copy_(self._gradient)
            auto.reduce(self._x)
            if auto.has_settled(self._x.nbytes) or _largest(time.perf_counter() - start) > _SETTLE_SECONDS:
                return calls
        return _SETTLE_CALLS

    def _fitting_rounds(self, round_seconds: float) -> int:
        fitting = int(_SECONDS_PER_CONTENDER * len(self._ways) / round_seconds)
        return min(max(fitting, _MIN_ROUNDS), _MAX_ROUNDS)

    def _run_round(self, index: int) -> None:
        # An order drawn anew each round, the same on all ranks: nobody always follows whoever drains the link most.
        order = np.random.default_rng(index).permutation(list(self._ways))
        for name in order.tolist():
            self._time(self._ways[name], self._tracks[name])

    def _time(self, way: Way, track: Track) -> None:
        self._x.copy_(self._gradient)
        payload_before = way.payload_nbytes()
        counted_before = self._counted()  # ahead of the barrier: past it other ranks of this host may be sending
        dist.barrier()
        cpu_before, start = time.process_time(), time.perf_counter()
        way.reduce(self._x)
        track.seconds.append(time.perf_counter() - start)
        track.cpu_seconds.append(time.process_time() - cpu_before)
        dist.barrier()  # past it every peer has all that we sent: nothing waits in a queue, uncounted
        if self._assignment.interface is not None:
            track.counted_nbytes.append(self._counted() - counted_before)
        payload_after = way.payload_nbytes()
        if payload_before is not None and payload_after is not None:
            track.payload_nbytes.append(payload_after - payload_before)
        if not way.is_mean:
            self._x.div_(self._assignment.world_size)
        result = self._x.numpy()
        track.digests.append(hashlib.blake2b(result.data, digest_size=16).hexdigest())
        if self._mean is not None:
            track.nmses.append(nmse(result, self._mean))

    def _counted(self) -> int:
        interface = self._assignment.interface
        return 0 if interface is None else read_counters(interface).tx_nbytes

    def _exchange(self, nbytes: int) -> None:
        """Times raw streams from host to host; the first rank of each host speaks for it."""
        assignment = self._assignment
        assert assignment.goodput_port is not None
        dist.barrier()
        host, local = divmod(self._rank, assignment.ranks_per_host)
        if local == 0:
            seconds = exchange(
                assignment.addresses,
                host,
                nbytes=nbytes,
                port=assignment.goodput_port,
                timeout_seconds=assignment.timeout_seconds,
            )
            self._goodput_seconds.append(seconds)
        dist.barrier()  # what still waits in a queue is not counted as the next contender's

    def _tell(self, rounds: int, total: int) -> None:
        now = time.monotonic()
        if self._rank == 0 and (rounds == total or now > self._told_at + _PROGRESS_SECONDS):
            self._told_at = now
            _emit(Advanced(self._numel, rounds, total))

    def _allowed(self) -> dict[str, float]:
        if self._mean is None:
            return {}
        bounds = {candidate.name: self._allowed_of(candidate) for candidate in self._assignment.candidates}
        return {FP32: _ALLOWED_FP32, FP16: _ALLOWED_FP16, **bounds}

    def _allowed_of(self, candidate: Candidate) -> float:
        assert self._mean is not None
        world_size, ranks_per_host = self._assignment.world_size, self._assignment.ranks_per_host
        given = Input(GRADIENT, self._numel, world_size, ranks_per_host, lambda r, run: make_run(self._numel, r, run))
        if candidate.how != AUTO:
            return allowed(candidate.algorithm, parse_specs(candidate.how), given, self._mean)
        algorithms = ["scatter_reduce", *(["hierarchical"] if ranks_per_host > 1 else [])]
        return max(allowed(algorithm, _AUTO_COARSEST, given, self._mean) for algorithm in algorithms)


def main(assignment: Assignment) -> None:
    """Runs the benchmark in the world that torchrun made."""
    # Each rank plays a host of its own: it gets one core, as the others have theirs to do.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=assignment.timeout_seconds))
    try:
        for numel in assignment.numels:
            measured = _Bout(assignment, numel).run()
            for rank in range(assignment.world_size):
                if rank == measured.rank:
                    _emit(measured)
                dist.barrier()  # ranks of a host share a pipe, which mixes long lines that come at once
    except Exception as error:
        # For people, ahead of the many lines that torchrun has to say.
        sys.stdout.write(f"Rank {dist.get_rank()} failed: {type(error).__name__}: {error}\n")
        raise
    finally:
        dist.destroy_process_group()


def _largest(value: float) -> float:
    """The largest of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _emit(event: Event) -> None:
    sys.stdout.write(to_line(event))
    sys.stdout.flush()


if __name__ == "__main__":
    main(Assignment.from_json(sys.argv[1]))
