"""The `cgx bench` group of commands."""

from __future__ import annotations

import typer

from cgx.cli.bench.allreduce.command import allreduce
from cgx.cli.bench.kernels.command import kernels

bench = typer.Typer(
    name="bench",
    help="Measure the kernels and the all-reduce on this machine; every result is verified.",
    no_args_is_help=True,
)
bench.command()(kernels)
bench.command()(allreduce)
