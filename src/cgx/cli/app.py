"""The `cgx` command: one subcommand a module, each of which loads torch only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import cgx
from cgx.cli.bench.app import bench
from cgx.cli.demo.command import demo
from cgx.cli.doctor.command import doctor
from cgx.cli.run.command import SETTINGS, run

app = typer.Typer(
    name="cgx",
    help="Data-parallel training with compressed gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
app.command(context_settings=SETTINGS)(run)
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(cgx.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Data-parallel training with compressed gradients."""
