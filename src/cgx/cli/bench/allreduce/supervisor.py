"""Runs the benchmark: starts the ranks on their hosts, watches them, and judges what they measured."""

from __future__ import annotations

import os

from rich.console import Console

from cgx.cli.bench.allreduce.messages import Advanced, Assignment, Measured, from_line
from cgx.cli.bench.allreduce.results import Judgement, judge
from cgx.cli.bench.console import progress
from cgx.core.spec import PhaseSpecs
from cgx.errors import CgxError
from cgx.testbed import HostSet, format_rate

_WORKER = "cgx.cli.bench.allreduce.worker"

# What counts as hung, generously: starting, and a round's work in memory and on the wire.
_START_SECONDS = 60.0
_MEMORY_BYTE_S = 5e7  # gradient bytes per second through filling, reducing, hashing and checking, on a core
_GOODPUT_BIT_S = 2e9  # where the link has no limit
_COPIES = 4  # of the gradient on the wire in a round: in fp32, in fp16, compressed, and as raw streams
_PATIENCE = 5.0


def run(
    hosts: HostSet,
    *,
    specs: PhaseSpecs,
    numel: int,
    runs: int,
    warm_up: int,
    link_bit_s: float | None,
    console: Console,
) -> Judgement:
    """Measures on ``hosts`` and judges.

    Args:
        hosts: At least two, with links of ``link_bit_s``.
        specs: Specs of both phases.
        numel: Elements of the fp32 gradient.
        runs: Rounds that count.
        warm_up: Rounds before them, at least one: it compiles the kernels.
        link_bit_s: Bits per second; None is no limit. Modelled where ``hosts`` are not emulated.
        console: Where progress goes.

    Raises:
        JobFailedError: A rank died or hung; its last words are in the message.
    """
    is_emulated = hosts.refusal is None
    is_modelled = not is_emulated and link_bit_s is not None
    seconds = _seconds_per_round(hosts.count, 4 * numel, link_bit_s)
    assignment = Assignment(
        spec=str(specs),
        numel=numel,
        runs=runs,
        warm_up=warm_up,
        interface=hosts.interface if is_emulated else None,
        addresses=hosts.addresses,
        goodput_port=None if is_modelled else hosts.free_port(),
        throttle_bit_s=link_bit_s if is_modelled else None,
        timeout_seconds=_START_SECONDS + _PATIENCE * seconds,
    )
    where = "" if is_emulated else " (modelled)" if is_modelled else " (loopback)"
    patience_seconds = _START_SECONDS + _PATIENCE * seconds * (hosts.count + runs + warm_up)
    measured = _run_ranks(hosts, assignment, patience_seconds, console)
    return judge(assignment, measured, link=format_rate(link_bit_s) + where)


def _run_ranks(hosts: HostSet, assignment: Assignment, patience_seconds: float, console: Console) -> list[Measured]:
    measured: list[Measured] = []
    with hosts.torchrun(["-m", _WORKER, assignment.to_json()]) as job, progress(console) as bars:
        bar = bars.add_task("starting the ranks", total=assignment.warm_up + assignment.runs)
        for line in job.lines(timeout_seconds=patience_seconds):
            match from_line(line.text):
                case Advanced(rounds=rounds):
                    phase = "measuring" if rounds >= assignment.warm_up else "warming up"
                    bars.update(bar, completed=rounds, description=phase)
                case Measured() as found:
                    measured.append(found)
                case None:
                    console.print(line.text, markup=False)
    if len(measured) != assignment.world_size:
        raise CgxError(f"{len(measured)} of {assignment.world_size} ranks reported; their output was cut off.")
    return measured


def _seconds_per_round(hosts: int, raw_nbytes: int, link_bit_s: float | None) -> float:
    """A generous estimate, checking included."""
    ranks_per_core = max(1.0, hosts / (os.cpu_count() or 1))
    wire_seconds = _COPIES * 8 * raw_nbytes / (link_bit_s or _GOODPUT_BIT_S)
    return wire_seconds + ranks_per_core * raw_nbytes / _MEMORY_BYTE_S
