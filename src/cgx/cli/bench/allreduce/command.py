"""The options of `cgx bench allreduce`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cgx.cli.bench.console import command_line, guard, open_console
from cgx.cli.bench.environment import describe
from cgx.cli.bench.sizes import parse_size
from cgx.core.spec import parse_specs
from cgx.testbed import open_hosts, parse_rate


def allreduce(
    hosts: Annotated[int, typer.Option(min=2, max=250, help="Hosts, one rank on each.")] = 2,
    link: Annotated[str, typer.Option(help="Rate of each host's link: 1gbit, 100mbit, ... or none.")] = "1gbit",
    size: Annotated[str, typer.Option(help="The fp32 gradient: 1KB, 25MB, 1GB, ...")] = "100MB",
    spec: Annotated[str, typer.Option(help="Spec of both phases, or A+B.")] = "uniform:4",
    runs: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before them; the first compiles the kernels.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; all else to stderr.")] = False,
) -> None:
    """Time a compressed all-reduce over emulated links, beside Gloo's in fp32 and in fp16.

    Every round runs all of them and as many bytes of raw TCP streams. It
    checks that replicas are bit-identical, that errors are within what the
    codec guarantees, and that the interface counted the bytes that cgx
    reports. The exit code is 1 if a check failed; stderr says which.
    """
    console, errors = open_console(json), Console(stderr=True, highlight=False)
    with guard("cgx bench allreduce", console):
        link_bit_s, numel, specs = parse_rate(link), parse_size(size) // 4, parse_specs(spec)
        # Torch loads in the ranks only; what watches them loads here, not for `cgx --help`.
        from cgx.cli.bench.allreduce.supervisor import run
        from cgx.cli.bench.allreduce.table import summary, table

        with open_hosts(hosts, link_bit_s) as testbed:
            if testbed.refusal is not None:
                console.print(f"[yellow]No emulated hosts here:[/] {testbed.refusal}")
            judgement = run(
                testbed, specs=specs, numel=numel, runs=runs, warm_up=warmup, link_bit_s=link_bit_s, console=console
            )
        if json:
            typer.echo(judgement.result.to_json())
        else:
            console.print(table(judgement))
            for sentence in summary(judgement):
                console.print(sentence)
            console.print(f"{describe(command_line())}", style="dim")
        for fault in judgement.faults:
            errors.print(f"[bold red]Not verified:[/] {fault}.", soft_wrap=True)
    if judgement.faults:
        raise typer.Exit(1)
