"""The `cgx bench` group of commands."""

from __future__ import annotations

import typer

from cgx.cli.bench.allreduce.command import allreduce
from cgx.cli.bench.kernels.command import kernels
from cgx.cli.bench.train.command import train

bench = typer.Typer(
    name="bench",
    help="Measure kernels, all-reduce and training steps on this machine; every result is verified.",
    no_args_is_help=True,
)
bench.command()(kernels)
bench.command()(allreduce)
bench.command()(train)
