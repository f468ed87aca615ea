"""Runs the benchmark: starts the ranks on their hosts, watches them, and judges what they measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from cgx.cli.bench.console import progress
from cgx.cli.bench.train.messages import Advanced, Assignment, Measured, from_line
from cgx.cli.bench.train.results import Judgement, Place, judge
from cgx.cli.bench.train.workloads import Workload
from cgx.errors import CgxError
from cgx.testbed import HostSet, format_rate, open_hosts

_WORKER: Final = "cgx.cli.bench.train.worker"

# What counts as hung, generously: starting, and a round's work on the processor and on the wire.
_START_SECONDS: Final = 90.0
_GOODPUT_BIT_S: Final = 2e9  # where the link has no limit
_OTHER_ROUNDS: Final = 8  # what warming up and judging the gradients take, in rounds
_PATIENCE: Final = 8.0

# Copies of the parameters beside the optimizer's: themselves, DDP's buckets, and what a hook or codec keeps.
_COPIES: Final = 2.5


def run(assignment: Assignment, workload: Workload, place: Place, console: Console) -> Judgement:
    """Measures one model in one place, and judges.

    Args:
        assignment: What the ranks are to do; the interface and the timeout are filled in here.
        workload: The model.
        place: Where; whether its hosts are emulated is found out here.
        console: Where progress goes.

    Raises:
        CgxError: The machine has too little memory, or a link with a limit was asked for where none can be made.
        JobFailedError: A rank died or hung; its last words are in the message.
    """
    _check_memory(assignment, workload, place)
    with open_hosts(place.hosts, place.link_bit_s) as hosts:
        if hosts.refusal is not None and place.link_bit_s is not None:
            raise CgxError(
                f"links of {format_rate(place.link_bit_s)} were asked for, and this machine emulates no hosts: "
                f"{hosts.refusal} A model of the link could slow cgx down, but neither stock DDP nor PyTorch's hooks, "
                "so nothing could be compared; use --link=none."
            )
        round_seconds = _seconds_per_round(assignment, workload, place)
        assignment = replace(
            assignment,
            interface=hosts.interface if hosts.measured else None,
            timeout_seconds=_START_SECONDS + _PATIENCE * round_seconds,
        )
        place = replace(place, is_emulated=hosts.measured)
        rounds = assignment.max_pairs + _OTHER_ROUNDS + assignment.warm_up / assignment.steps_per_turn
        patience_seconds = 2 * _START_SECONDS + _PATIENCE * round_seconds * rounds
        if hosts.refusal is not None:
            console.print(f"[yellow]No emulated hosts here:[/] {hosts.refusal}")
        measured = _run_ranks(hosts, assignment, place, patience_seconds, console)
    return judge(assignment, measured, params=workload.params, place=place)


def _run_ranks(
    hosts: HostSet, assignment: Assignment, place: Place, patience_seconds: float, console: Console
) -> list[Measured]:
    measured: list[Measured] = []
    argv = ["-m", _WORKER, assignment.to_json()]
    with hosts.torchrun(argv, ranks_per_host=place.ranks_per_host) as job, progress(console) as bars:
        title = f"{assignment.model}, {place.link}"
        bar = bars.add_task(f"{title}: starting, warming up", total=assignment.max_pairs)
        for line in job.lines(timeout_seconds=patience_seconds):
            match from_line(line.text):
                case Advanced(rounds=rounds, half_width=half_width):
                    known = f"{title}: ratios known to {100 * half_width:.2g} %"
                    bars.update(bar, completed=rounds, description=known)
                case Measured() as found:
                    measured.append(found)
                case None:
                    console.print(line.text, markup=False)
    if len(measured) != place.world_size:
        raise CgxError(f"{len(measured)} of {place.world_size} ranks reported; their output was cut off.")
    return measured


def _seconds_per_round(assignment: Assignment, workload: Workload, place: Place) -> float:
    """A generous estimate of a turn of everyone."""
    processes = place.world_size * (1 + assignment.data_workers)
    share = max(1.0, processes / (os.cpu_count() or 1))
    compute_seconds = workload.compute_s * share * assignment.accumulate * assignment.batch / workload.batch
    wire_seconds = place.ranks_per_host * 2 * 4 * 8 * workload.params / (place.link_bit_s or _GOODPUT_BIT_S)
    turns = len(assignment.hows) + 1
    return turns * assignment.steps_per_turn * (compute_seconds + wire_seconds)


def _check_memory(assignment: Assignment, workload: Workload, place: Place) -> None:
    """Refuses what would make the kernel kill the ranks, minutes later and without a word."""
    replicas = place.world_size * (len(assignment.hows) + 1)
    needed = replicas * 4 * workload.params * (_COPIES + workload.optimizer_copies)
    available = _available_nbytes()
    if available is not None and needed > available:
        raise CgxError(
            f"{assignment.model}: {replicas} replicas with their optimizers ({len(assignment.hows)} ways and one "
            f"without communication, on {place.world_size} ranks) take some {needed / 1e9:.0f} GB, and "
            f"{available / 1e9:.0f} GB are free; name fewer ways in --how, or a smaller model."
        )


def _available_nbytes() -> int | None:
    """Memory that new processes can have, where Linux tells it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {key: rest.split() for key, _, rest in (line.partition(":") for line in lines)}
    return 1024 * int(sizes["MemAvailable"][0]) if "MemAvailable" in sizes else None
