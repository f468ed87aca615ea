"""Runs the demo: starts the ranks on their hosts, watches them, and shows what came of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import final

from rich.console import Console

from cgx.cli.demo.events import (
    STOCK,
    Assignment,
    Event,
    Finished,
    Run,
    Stepped,
    Validated,
    from_line,
)
from cgx.cli.demo.figure import Curve, draw
from cgx.cli.demo.models import TASKS
from cgx.cli.demo.progress import Bars
from cgx.cli.demo.results import Result, Setting, compare, table
from cgx.testbed import HostSet

_WORKER = "cgx.cli.demo.worker"
_FIGURE = "loss-over-time.png"
_RESULTS = "results.jsonl"

# For the estimate that the user is told; the patience makes it the limit of a job that hangs.
_START_SECONDS = 15.0
_RUN_SECONDS = 12.0  # compiling, warming up, validating
_GOODPUT = 0.92  # of a link's rate, under Gloo
_COMPRESSED = 0.2  # of the stock run's time on the wire, or less
_PATIENCE = 10.0


@final
class Demonstration:
    """One call of `cgx demo`.

    Args:
        runs: What to train, in this order; the stock run of a model and seed before the others.
        setting: Where.
        console: Where everything for people goes.
    """

    def __init__(self, runs: tuple[Run, ...], setting: Setting, console: Console) -> None:
        self._runs = runs
        self._setting = setting
        self._console = console
        self._models = list(dict.fromkeys(run.model for run in runs))
        self._curves = [Curve(run) for run in runs]
        self._finished: dict[Run, Finished] = {}
        self._results: list[Result] = []

    def train(self, hosts: HostSet) -> Iterator[Result]:
        """Trains all runs and yields the result of each as it ends.

        Raises:
            JobFailedError: A rank died or hung; its last words are in the message.
        """
        estimate_seconds = _estimate_seconds(self._runs, self._setting)
        self._announce(estimate_seconds)
        assignment = Assignment(
            runs=self._runs,
            interface=hosts.interface,
            ranks_on_interface=1 if self._setting.refusal is None else self._setting.hosts,
            throttle_bit_s=self._setting.throttle_bit_s,
        )
        with (
            hosts.torchrun(["-m", _WORKER, assignment.to_json()]) as job,
            Bars(self._runs, self._setting, self._console) as bars,
        ):
            for line in job.lines(timeout_seconds=_PATIENCE * estimate_seconds):
                event = from_line(line.text)
                if event is None:
                    self._console.print(line.text, markup=False)
                    continue
                bars.show(event)
                if (result := self._record(event)) is not None:
                    yield result

    def report(self, folder: Path) -> None:
        """Prints the table, writes the figure and the results, and says where they are."""
        folder.mkdir(parents=True, exist_ok=True)
        figure_path, results_path = folder / _FIGURE, folder / _RESULTS
        lines = [f"{result.to_json()}\n" for result in self._results]
        results_path.write_text("".join(lines), encoding="utf-8")
        titles = {model: TASKS[model].title for model in self._models}
        draw(self._curves, titles, self._setting, figure_path)
        example = next((run.how for run in self._runs if run.how != STOCK), "uniform:4")
        self._console.print(table(self._results, self._setting))
        self._console.print(f"Loss over time: [bold]{figure_path}[/], the table: {results_path}")
        self._console.print(
            "In your own script, one line after `model = DistributedDataParallel(model)` does it: "
            f'[bold]cgx.compress(model, "{example}")[/]'
        )

    def _announce(self, estimate_seconds: float) -> None:
        hows = ", then ".join(self._setting.name(how) for how in dict.fromkeys(run.how for run in self._runs))
        models = " and a ".join(TASKS[model].title for model in self._models)
        minutes = math.ceil(estimate_seconds / 60)
        self._console.print(
            f"Training a {models}, data-parallel on {self._setting}: {hows}. "
            f"This takes about {minutes} minute{'s' if minutes > 1 else ''}; Ctrl-C stops it."
        )
        if self._setting.refusal is not None:
            self._console.print(f"[yellow]No emulated hosts here:[/] {self._setting.refusal}")

    def _record(self, event: Event) -> Result | None:
        """Keeps what a rank reported; a finished run gives a result."""
        run = self._runs[event.run]
        match event:
            case Stepped():
                self._curves[event.run].stepped.append(event)
            case Validated():
                self._curves[event.run].validated.append(event)
            case Finished():
                self._finished[run] = event
                stock = self._finished[Run(run.model, STOCK, run.seed, run.steps)]
                result = compare(run, event, stock, measured=self._setting.measured)
                self._results.append(result)
                return result
        return None


def _estimate_seconds(runs: tuple[Run, ...], setting: Setting) -> float:
    """Says roughly how long the runs will take: what is on the wire, and what is not."""
    ranks_per_core = max(1.0, setting.hosts / (os.cpu_count() or 1))
    seconds = _START_SECONDS * ranks_per_core
    for run in runs:
        task = TASKS[run.model]
        step_seconds = task.compute_seconds * ranks_per_core
        if setting.link_bit_s is not None:
            wire_nbytes = 2 * (setting.hosts - 1) / setting.hosts * 4 * task.parameter_count
            share = 1.0 if run.how == STOCK else _COMPRESSED
            step_seconds += share * wire_nbytes * 8 / (_GOODPUT * setting.link_bit_s)
        seconds += _RUN_SECONDS * ranks_per_core + run.steps * step_seconds
    return seconds
