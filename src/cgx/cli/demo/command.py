"""The options of `cgx demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cgx.cli.demo.events import STOCK, Run
from cgx.cli.demo.results import Setting
from cgx.core.spec import parse_specs
from cgx.errors import CgxError, SpecError
from cgx.testbed import open_hosts, parse_rate

_LOG_WIDTH = 100  # where there is no terminal to ask
_INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


def demo(
    link: Annotated[
        str, typer.Option(help="Rate of each host's link: 1gbit, 100mbit, 50kbit, ... or none.")
    ] = "100mbit",
    hosts: Annotated[int, typer.Option(min=2, max=250, help="Hosts, one rank on each.")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of each run.", show_default="each model's own"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ...")] = 1,
    how: Annotated[
        str,
        typer.Option(help="What to compare with stock DDP (off): specs, separated by commas."),
    ] = f"{STOCK},uniform:4",
    models: Annotated[str, typer.Option(help="What to train, separated by commas.")] = "gpt,convnet",
    out: Annotated[Path, typer.Option(help="Folder for the figure and the results; made if need be.")] = Path(
        "cgx-demo"
    ),
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object for each run; all else to stderr."),
    ] = False,
) -> None:
    """Train two real models over a slow link: stock DDP beside compressed gradients."""
    console = Console(stderr=json, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    try:
        link_bit_s = parse_rate(link)
        hows = _parse_hows(how)
        # Torch loads here, seconds after `cgx --help` would have answered.
        from cgx.cli.demo.models import find_tasks
        from cgx.cli.demo.supervisor import Demonstration

        runs = tuple(
            Run(model=model, how=how, seed=seed, steps=steps or task.steps)
            for model, task in find_tasks(_split(models)).items()
            for seed in range(seeds)
            for how in hows
        )
        with open_hosts(hosts, link_bit_s) as testbed:
            demonstration = Demonstration(runs, Setting(hosts, link_bit_s, testbed.refusal), console)
            for result in demonstration.train(testbed):
                if json:
                    typer.echo(result.to_json())
        demonstration.report(out)
    except CgxError as error:
        console.print(f"[bold red]cgx demo:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None
    except KeyboardInterrupt:
        console.print("Stopped: the hosts, and all that ran on them, are gone.")
        raise typer.Exit(_INTERRUPTED) from None


def _split(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _parse_hows(text: str) -> list[str]:
    """Reads `--how`; stock DDP comes first, for the others are compared with it."""
    compressed = [how for how in dict.fromkeys(_split(text)) if how != STOCK]
    for how in compressed:
        parse_specs(how)
    return [STOCK, *compressed]
