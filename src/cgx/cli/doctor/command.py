"""The options of `cgx doctor`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cgx.cli.doctor.checks import CHECKS, Finding, diagnose


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each check, and nothing else.")
    ] = False,
) -> None:
    """Check this machine: versions, kernels, network, and a conformance run of some seconds.

    The exit code is 1 if cgx cannot work here, else 0; what it can do without is in yellow.
    """
    console = Console(stderr=json, highlight=False)
    findings: list[Finding] = []
    with console.status("Checking ...") as status:
        for check in CHECKS:
            status.update(f"Checking: {(check.__doc__ or '').rstrip('.')} ...")
            findings.append(diagnose(check))
            if json:
                typer.echo(findings[-1].to_json())
    if not json:
        console.print(_table(findings))
        console.print(_summary(findings))
    if _failed(findings):
        raise typer.Exit(1)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    table.add_column("found, and what to do")
    for finding in findings:
        style = "green" if finding.ok else "bold red" if finding.needed else "yellow"
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style=style)
        table.add_row(finding.check, Text("yes" if finding.ok else "no", style=style), text)
    return table


def _summary(findings: list[Finding]) -> str:
    if failed := _failed(findings):
        return f"[bold red]cgx cannot work here yet:[/] {', '.join(failed)}."
    return "[green]cgx works on this machine.[/]"


def _failed(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings if finding.needed and not finding.ok]
