"""The options of `cgx bench allreduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cgx.cli.bench.allreduce.options import parse_candidates, parse_links, parse_sizes
from cgx.cli.bench.console import command_line, guard, open_console
from cgx.cli.bench.environment import describe
from cgx.cli.bench.sizes import format_size
from cgx.testbed import open_hosts

_FIGURE = "allreduce.png"


def allreduce(
    hosts: Annotated[int, typer.Option(min=2, max=250, help="Hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, max=64, help="Ranks on each host.")] = 1,
    link: Annotated[str, typer.Option(help="Rates of each host's link, with commas: 1gbit, 100mbit, none.")] = "1gbit",
    size: Annotated[
        str, typer.Option(help="fp32 gradients, with commas: 25MB, 1KB..256MB (each 4 times the last) or 1KB..8KB/2.")
    ] = "100MB",
    spec: Annotated[str, typer.Option(help="Specs of both phases, or A+B; with commas.")] = "uniform:4",
    algorithm: Annotated[
        str, typer.Option(help="With commas: scatter_reduce, all_gather, ring, hierarchical.")
    ] = "scatter_reduce",
    how: Annotated[str, typer.Option(help="More to compare: auto, which chooses by itself, or specs.")] = "",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Rounds that count.", show_default="by size, 4 s a contender")
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before them; the first compiles the kernels.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; all else to stderr.")] = False,
    plot: Annotated[Path | None, typer.Option(help=f"Folder for {_FIGURE}: speed-up over size.")] = None,
) -> None:
    """Time compressed all-reduces over emulated links, beside Gloo's in fp32 and in fp16.

    Every round runs all of them, in an order of its own, and raw TCP
    streams. It checks that replicas are bit-identical, that errors are
    within what codec and algorithm guarantee, and that the interface
    counted the bytes that cgx reports. The exit code is 1 if a check
    failed; stderr says which.
    """
    console, errors = open_console(json), Console(stderr=True, highlight=False)
    is_verified = True
    with guard("cgx bench allreduce", console):
        links, numels = parse_links(link), tuple(nbytes // 4 for nbytes in parse_sizes(size))
        candidates = parse_candidates(spec, algorithm, how, ranks_per_host=ranks_per_host)
        # Torch loads in the ranks only; what watches them loads here, not for `cgx --help`.
        from cgx.cli.bench.allreduce.supervisor import Sweep, measure
        from cgx.cli.bench.allreduce.table import summary, table

        sweep = Sweep(candidates, tuple(dict.fromkeys(numels)), ranks_per_host, runs, warmup)
        judged = []
        for link_bit_s in links:
            judgements = []
            with open_hosts(hosts, link_bit_s) as testbed:
                if testbed.refusal is not None:
                    console.print(f"[yellow]No emulated hosts here:[/] {testbed.refusal}")
                for judgement in measure(testbed, sweep, link_bit_s=link_bit_s, console=console):
                    judgements.append(judgement)
                    if json:
                        for result in judgement.results:
                            typer.echo(result.to_json())
                    for fault in judgement.faults:
                        is_verified = False
                        where = format_size(judgement.raw_nbytes)
                        errors.print(f"[bold red]Not verified:[/] {where}, {fault.text}.", soft_wrap=True)
            if not json:
                console.print(table(judgements))
                for sentence in summary(judgements):
                    console.print(sentence)
            judged.append(judgements)
        if not json:
            console.print(f"{describe(command_line())}", style="dim")
        if plot is not None:
            from cgx.cli.bench.allreduce.figure import draw

            plot.mkdir(parents=True, exist_ok=True)
            draw(judged, plot / _FIGURE)
            console.print(f"Figure: {plot / _FIGURE}", soft_wrap=True)
    if not is_verified:
        raise typer.Exit(1)
