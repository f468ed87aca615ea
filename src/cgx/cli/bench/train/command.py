"""The options of `cgx bench train`."""

from __future__ import annotations

import json as jsonlib
from itertools import product
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from cgx.cli.bench.console import command_line, guard, open_console
from cgx.cli.bench.environment import describe
from cgx.cli.bench.train.hows import parse_hows
from cgx.cli.bench.train.messages import Assignment
from cgx.cli.bench.train.results import Place
from cgx.cli.bench.train.stopping import Goal
from cgx.cli.bench.train.workloads import WORKLOADS, find_workloads
from cgx.errors import SpecError
from cgx.testbed import parse_rate

_MODELS: Final = ", ".join(f"{name} ({each.params / 1e6:.3g} M)" for name, each in WORKLOADS.items())
_FIGURE: Final = "step-time.png"


def train(
    model: Annotated[str, typer.Option(help=f"What to train, separated by commas: {_MODELS}.")] = "gpt-27m",
    hosts: Annotated[int, typer.Option(min=2, max=250, help="Hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each.")] = 1,
    link: Annotated[
        str, typer.Option(help="Rate of each host's link: 1gbit, 100mbit, ... or none; several with commas.")
    ] = "1gbit",
    how: Annotated[
        str,
        typer.Option(
            help="Ways to average gradients: specs, auto, ddp-fp16 and powersgd:RANK (PyTorch's hooks). "
            "Stock DDP (off) always runs."
        ),
    ] = "off,auto,uniform:4,ddp-fp16,powersgd:4",
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples of a micro-batch.", show_default="each model's own")
    ] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Most rounds that count; each runs all ways.")] = 40,
    min_pairs: Annotated[int, typer.Option(min=2, help="Fewest.")] = 10,
    until: Annotated[
        Goal,
        typer.Option(
            help="Stop between, once every ratio to stock DDP is known to 2 % (precise), "
            "or known to be above or below 1.03 (never-slower)."
        ),
    ] = Goal.PRECISE,
    warm_up: Annotated[int, typer.Option(min=1, help="Most steps that auto gets to find its choice beforehand.")] = 300,
    steps_per_turn: Annotated[
        int, typer.Option(min=1, help="Steps that each way makes in a round; more for steps of a millisecond.")
    ] = 3,
    data_workers: Annotated[int, typer.Option(min=0, help="Busy DataLoader workers of each rank.")] = 0,
    plot: Annotated[Path | None, typer.Option(help=f"Folder for {_FIGURE}; made if need be.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; all else to stderr.")] = False,
) -> None:
    """Time training steps over emulated links: stock DDP, cgx and PyTorch's hooks, in turns.

    Every round runs all of them and the same step without communication. It
    checks that replicas are bit-identical, losses finite, gradients within
    what is promised, and bytes as the interface counted them. The exit code
    is 1 if a check failed; stderr says which.
    """
    console, errors = open_console(json), Console(stderr=True, highlight=False)
    faults: list[str] = []
    with guard("cgx bench train", console):
        links, hows = [parse_rate(each) for each in _split(link)], parse_hows(how)
        if not links:
            raise SpecError(f"--link={link!r} names no link: write a rate, such as 1gbit, or none.")
        if min_pairs > pairs:
            raise SpecError(f"--min-pairs={min_pairs} is more than --pairs={pairs}, the most that run.")
        workloads = find_workloads(_split(model))
        # What watches the ranks loads here, not for `cgx --help`; torch loads in the ranks only.
        from cgx.cli.bench.train.supervisor import run
        from cgx.cli.bench.train.table import summary, table

        judgements = []
        for (name, workload), link_bit_s in product(workloads.items(), links):
            assignment = Assignment(
                model=name,
                hows=tuple(hows),
                batch=batch or workload.batch,
                accumulate=accumulate,
                steps_per_turn=steps_per_turn,
                warm_up=warm_up,
                min_pairs=min_pairs,
                max_pairs=pairs,
                goal=until,
                data_workers=data_workers,
                interface=None,
                timeout_seconds=0.0,
            )
            judgement = run(assignment, workload, Place(hosts, ranks_per_host, link_bit_s), console)
            judgements.append(judgement)
            faults += judgement.faults
            if json:
                for result in judgement.results:
                    typer.echo(result.to_json())
            else:
                console.print(table(judgement))
                for sentence in summary(judgement):
                    console.print(sentence, soft_wrap=True)
        environment = describe(command_line())
        if json:
            typer.echo(jsonlib.dumps({"op": "environment", **environment.as_dict()}))
        else:
            console.print(f"{environment}", style="dim")
        if plot is not None:
            from cgx.cli.bench.train.figure import draw

            plot.mkdir(parents=True, exist_ok=True)
            draw(judgements, plot / _FIGURE)
            console.print(f"Where a step's time goes: [bold]{escape(str(plot / _FIGURE))}[/]", soft_wrap=True)
        for fault in faults:
            errors.print(f"[bold red]Not verified:[/] {fault}.", soft_wrap=True)
    if faults:
        raise typer.Exit(1)


def _split(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]
