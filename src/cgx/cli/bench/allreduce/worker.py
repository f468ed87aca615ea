"""What one rank of the benchmark does: every contender takes its turn in every round.

`cgx bench allreduce` starts this module under torchrun. Each rank writes down what it saw and prints it at the end;
judging is left to the supervisor, who sees all ranks. Whatever is not the reduction (refilling the gradient, hashing
and checking the result) happens while the clock and the counters stand still.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from cgx.cli.bench.allreduce.messages import CGX, FP16, FP32, Advanced, Assignment, Event, Measured, Track, to_line
from cgx.cli.bench.fidelity import allowed_nmse, nmse
from cgx.collectives.base import Op
from cgx.core.plan import Parameter
from cgx.core.spec import EXACT, PhaseSpecs, parse_specs
from cgx.testbed import read_counters
from cgx.testbed.stream import exchange
from cgx.torch.session import Session

_LAYERS = 24
_SMALLEST, _LARGEST = 1e-4, 1e-2  # standard deviations of layers, as deep nets have them
_NAME = "gradient"
# Casting rounds to 2**-11, before and after; adding in fp32 to 2**-24 per rank.
_ALLOWED_FP16, _ALLOWED_FP32 = 1e-5, 1e-11


def make_gradient(numel: int, rank: int) -> NDArray[np.float32]:
    """A gradient like a deep net's: normal, layer by layer of its own scale; different on every rank."""
    gradient = np.random.default_rng((1, rank)).standard_normal(numel, np.float32)
    ratio = np.random.default_rng(0).random(_LAYERS)
    for layer, scale in zip(np.array_split(gradient, _LAYERS), ratio, strict=True):
        layer *= np.float32(_SMALLEST * (_LARGEST / _SMALLEST) ** scale)
    return gradient


@final
class _Rank:
    """One rank of the benchmark."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._rank = dist.get_rank()
        self._gradient = torch.from_numpy(make_gradient(assignment.numel, self._rank))
        self._x = torch.empty_like(self._gradient)
        self._specs = parse_specs(assignment.spec)
        self._session = self._open_session({_NAME: "fp32"}, self._specs)
        self._contenders: dict[str, Callable[[], None]] = {
            CGX: self._reduce_compressed,
            FP32: self._reduce_fp32,
            FP16: self._reduce_fp16,
        }
        self._exact = None if assignment.throttle_bit_s is None else self._open_session({FP32: FP32, FP16: FP16}, EXACT)
        self._tracks = {name: Track() for name in self._contenders}
        self._payload_nbytes: list[int] = []
        self._goodput_seconds: list[float] = []
        # Only rank 0 checks the error: the others' results have the same bits, or the digests tell.
        self._mean = self._exact_mean() if self._rank == 0 else None

    def run(self) -> None:
        """Runs all rounds and reports."""
        assignment = self._assignment
        exchanged_nbytes = 0
        for index in range(-assignment.warm_up, assignment.runs):
            if index == 0:
                exchanged_nbytes = self._largest(self._payload_nbytes[-1])
                self._forget()
            for name, reduce in self._contenders.items():
                self._time(name, reduce)
            if index >= 0 and assignment.goodput_port is not None:
                self._goodput_seconds.append(self._exchange(exchanged_nbytes))
            if self._rank == 0:
                _emit(Advanced(index + assignment.warm_up + 1))
        _emit(
            Measured(
                rank=self._rank,
                tracks=self._tracks,
                payload_nbytes=self._payload_nbytes,
                goodput_seconds=self._goodput_seconds,
                exchanged_nbytes=exchanged_nbytes,
                allowed_nmses=self._allowed(),
            )
        )

    def _open_session(self, dtypes: dict[str, str], specs: PhaseSpecs) -> Session:
        shape = (self._assignment.numel,)
        parameters = [Parameter(name, shape, dtype) for name, dtype in dtypes.items()]
        assert dist.group.WORLD is not None
        return Session(
            dist.group.WORLD, parameters, dict.fromkeys(dtypes, specs), throttle_bit_s=self._assignment.throttle_bit_s
        )

    def _reduce_compressed(self) -> None:
        self._session.reduce({_NAME: self._x}, Op.AVG, label="cgx bench allreduce")

    def _reduce_fp32(self) -> None:
        self._all_reduce(FP32, self._x)

    def _reduce_fp16(self) -> None:
        half = self._x.to(torch.float16)
        self._all_reduce(FP16, half)
        self._x.copy_(half)

    def _all_reduce(self, name: str, x: torch.Tensor) -> None:
        """Stock Gloo's sum, or where the link is modelled the same behind the model."""
        if self._exact is None:
            dist.all_reduce(x)
        else:
            self._exact.reduce({name: x}, Op.SUM, label=f"{name} all-reduce")

    def _time(self, name: str, reduce: Callable[[], None]) -> None:
        track = self._tracks[name]
        self._x.copy_(self._gradient)
        sent_before = self._session.report().wire_nbytes
        dist.barrier()
        counted_before, cpu_before, start = self._counted(), time.process_time(), time.perf_counter()
        reduce()
        track.seconds.append(time.perf_counter() - start)
        track.cpu_seconds.append(time.process_time() - cpu_before)
        dist.barrier()  # past it every peer has all that we sent: nothing waits in a queue, uncounted
        if self._assignment.interface is not None:
            track.counted_nbytes.append(self._counted() - counted_before)
        if name == CGX:
            self._payload_nbytes.append(self._session.report().wire_nbytes - sent_before)
        else:  # a sum, for dividing is no part of Gloo's all-reduce
            self._x.div_(self._assignment.world_size)
        result = self._x.numpy()
        track.digests.append(hashlib.blake2b(result.data, digest_size=16).hexdigest())
        if self._mean is not None:
            track.nmses.append(nmse(result, self._mean))

    def _counted(self) -> int:
        interface = self._assignment.interface
        return 0 if interface is None else read_counters(interface).tx_nbytes

    def _forget(self) -> None:
        """Leaves the rounds before the clock out of the report."""
        self._payload_nbytes.clear()
        for track in self._tracks.values():
            for entries in (track.seconds, track.cpu_seconds, track.counted_nbytes, track.digests, track.nmses):
                entries.clear()

    def _exchange(self, nbytes: int) -> float:
        assignment = self._assignment
        assert assignment.goodput_port is not None
        dist.barrier()
        return exchange(
            assignment.addresses,
            self._rank,
            nbytes=nbytes,
            port=assignment.goodput_port,
            timeout_seconds=assignment.timeout_seconds,
        )

    def _largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        tensor = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def _exact_mean(self) -> NDArray[np.float64]:
        world_size = self._assignment.world_size
        total = np.zeros(self._assignment.numel)
        for rank in range(world_size):
            total += make_gradient(self._assignment.numel, rank)
        return total / world_size

    def _allowed(self) -> dict[str, float]:
        if self._mean is None:
            return {}
        assignment = self._assignment
        parts = (make_gradient(assignment.numel, rank) for rank in range(assignment.world_size))
        return {
            CGX: allowed_nmse(self._specs, parts, self._mean),
            FP32: _ALLOWED_FP32,
            FP16: _ALLOWED_FP16,
        }


def main(assignment: Assignment) -> None:
    """Runs the benchmark in the world that torchrun made."""
    # Each rank plays a host of its own: it gets one core, as the others have theirs to do.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=assignment.timeout_seconds))
    try:
        _Rank(assignment).run()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _emit(event: Event) -> None:
    sys.stdout.write(to_line(event))
    sys.stdout.flush()


if __name__ == "__main__":
    main(Assignment.from_json(sys.argv[1]))
