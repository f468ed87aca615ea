"""Runs the benchmark: starts the ranks on their hosts, watches them, and judges what they measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from rich.console import Console

from cgx.cli.bench.allreduce.messages import AUTO, Advanced, Assignment, Candidate, Measured, from_line
from cgx.cli.bench.allreduce.results import Judgement, judge
from cgx.cli.bench.console import progress
from cgx.cli.bench.sizes import format_size
from cgx.errors import CgxError
from cgx.testbed import HostSet, format_rate

_WORKER = "cgx.cli.bench.allreduce.worker"

# What counts as hung, generously: starting, the rounds that time decides, and a round's work in memory and on the wire.
_START_SECONDS = 60.0
_CONTENDER_SECONDS = 10.0
_MEMORY_BYTE_S = 5e7  # gradient bytes per second through filling, reducing, hashing and checking, on a core
_GOODPUT_BIT_S = 2e9  # where the link has no limit
_COPIES = 6  # of the gradient on the wire in a round: in fp32, in fp16, and as raw streams
_FEWEST_ROUNDS = 5  # where time decides
_PATIENCE = 5.0
# Raw streams find their pace within this time.
_PACE_SECONDS, _MAX_PACE_NBYTES = 0.02, 1_000_000


@final
@dataclass(frozen=True)
class Sweep:
    """What to measure on one set of hosts.

    Attributes:
        candidates: What is compared with the baselines.
        numels: Elements of the fp32 gradient, size by size.
        ranks_per_host: Ranks on each host.
        runs: Rounds that count; None lets the time of a round decide.
        warm_up: Rounds before them at each size, at least one: it compiles the kernels.
    """

    candidates: tuple[Candidate, ...]
    numels: tuple[int, ...]
    ranks_per_host: int
    runs: int | None
    warm_up: int


def measure(hosts: HostSet, sweep: Sweep, *, link_bit_s: float | None, console: Console) -> Iterator[Judgement]:
    """Measures on ``hosts`` in one world of ranks, and judges size after size.

    Args:
        hosts: At least two, with links of ``link_bit_s``.
        sweep: What to measure.
        link_bit_s: Bits per second; None is no limit. Modelled where ``hosts`` are not emulated.
        console: Where progress goes.

    Raises:
        CgxError: It cannot be measured on these hosts.
        JobFailedError: A rank died or hung; its last words are in the message.
    """
    is_emulated = hosts.refusal is None
    is_modelled = not is_emulated and link_bit_s is not None
    if not is_emulated:
        _check_without_hosts(sweep, is_modelled=is_modelled)
    rounds = _Patience(sweep, hosts.count * sweep.ranks_per_host, link_bit_s)
    assignment = Assignment(
        candidates=sweep.candidates,
        numels=sweep.numels,
        runs=sweep.runs,
        warm_up=sweep.warm_up,
        ranks_per_host=sweep.ranks_per_host,
        interface=hosts.interface if is_emulated else None,
        addresses=hosts.addresses,
        goodput_port=None if is_modelled else hosts.free_port(),
        goodput_nbytes=round(min((link_bit_s or _GOODPUT_BIT_S) / 8 * _PACE_SECONDS, _MAX_PACE_NBYTES)),
        throttle_bit_s=link_bit_s if is_modelled else None,
        timeout_seconds=_START_SECONDS + _PATIENCE * rounds.seconds(max(sweep.numels)),
    )
    where = "" if is_emulated else " (modelled)" if is_modelled else " (loopback)"
    link = format_rate(link_bit_s) + where
    for measured in _run_ranks(hosts, assignment, rounds.total_seconds(), console):
        yield judge(assignment, measured, link=link)


def _check_without_hosts(sweep: Sweep, *, is_modelled: bool) -> None:
    if sweep.ranks_per_host > 1:
        raise CgxError(
            f"{sweep.ranks_per_host} ranks a host were asked for, but this machine makes no emulated hosts: without "
            "them all ranks are neighbours, and nothing tells a host's traffic from that inside it. Ask for one."
        )
    if is_modelled and any(candidate.how == AUTO for candidate in sweep.candidates):
        raise CgxError(
            "auto chooses by the real link, but this machine makes no emulated hosts, so the link would be modelled. "
            "Ask for specs by hand, or for --link none."
        )


def _run_ranks(
    hosts: HostSet, assignment: Assignment, patience_seconds: float, console: Console
) -> Iterator[list[Measured]]:
    """Yields what all ranks measured, size after size."""
    measured: dict[int, list[Measured]] = {}
    argv = ["-m", _WORKER, assignment.to_json()]
    with hosts.torchrun(argv, ranks_per_host=assignment.ranks_per_host) as job, progress(console) as bars:
        bar = bars.add_task("starting the ranks", total=None)
        for line in job.lines(timeout_seconds=patience_seconds):
            match from_line(line.text):
                case Advanced(numel=numel, rounds=rounds, total=total):
                    bars.update(bar, completed=rounds, total=total, description=format_size(4 * numel))
                case Measured() as found:
                    arrived = measured.setdefault(found.numel, [])
                    arrived.append(found)
                    if len(arrived) == assignment.world_size:
                        yield measured.pop(found.numel)
                case None:
                    console.print(line.text, markup=False)
    if measured:
        count = min(len(arrived) for arrived in measured.values())
        raise CgxError(f"{count} of {assignment.world_size} ranks reported; their output was cut off.")


@final
class _Patience:
    """How long the ranks may take, from generous estimates."""

    def __init__(self, sweep: Sweep, world_size: int, link_bit_s: float | None) -> None:
        self._sweep, self._world_size = sweep, world_size
        self._bit_s = link_bit_s or _GOODPUT_BIT_S

    def seconds(self, numel: int) -> float:
        """Of a round, checking included."""
        sweep, raw_nbytes = self._sweep, 4 * numel
        # An all-gather without compression sends W - 1 copies.
        copies = _COPIES + len(sweep.candidates) * max(2, self._world_size - 1)
        wire_seconds = sweep.ranks_per_host * copies * 8 * raw_nbytes / self._bit_s
        ranks_per_core = max(1.0, self._world_size / (os.cpu_count() or 1))
        return wire_seconds + (len(sweep.candidates) + 2) * ranks_per_core * raw_nbytes / _MEMORY_BYTE_S

    def total_seconds(self) -> float:
        """Of all sizes."""
        sweep = self._sweep
        rounds = (sweep.runs or _FEWEST_ROUNDS) + sweep.warm_up + self._world_size
        decided_by_time = len(sweep.numels) * (len(sweep.candidates) + 2) * _CONTENDER_SECONDS
        return _START_SECONDS + _PATIENCE * (decided_by_time + rounds * sum(map(self.seconds, sweep.numels)))
