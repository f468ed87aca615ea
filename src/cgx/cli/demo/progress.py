"""Progress bars for a person at a terminal, plain lines for a log."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cgx.cli.demo.events import Event, Finished, Run, Started, Stepped, Validated
from cgx.cli.demo.results import Setting


@final
class Bars:
    """One bar for each run, with its latest losses.

    Args:
        runs: The runs that events refer to.
        setting: Gives the runs their names.
        console: Where to draw; lines are printed instead where it is not a terminal.
    """

    def __init__(self, runs: tuple[Run, ...], setting: Setting, console: Console) -> None:
        self._runs = runs
        self._setting = setting
        self._console = console
        self._bars: dict[int, TaskID] = {}
        self._validated: dict[int, Validated] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=False),
            console=console,
            expand=True,
            refresh_per_second=5,
            disable=not console.is_terminal,
        )

    def show(self, event: Event) -> None:
        """Brings the display up to date."""
        run = self._runs[event.run]
        match event:
            case Started():
                self._add(event.run, "preparing")
                self._log(f"{self._name(run)}: {run.steps} steps ...")
            case Stepped():
                self._update(event.run, completed=event.step, losses=self._losses(event))
            case Validated():
                self._validated[event.run] = event
            case Finished():
                outcome = f"loss {event.final_loss:.3f}, {event.final_accuracy:.1%} right"
                self._update(event.run, losses=f"[bold]{outcome}[/]")
                self._log(f"{self._name(run)}: {outcome}, {event.step_p50_s * 1e3:.0f} ms a step")

    def _add(self, run: int, state: str) -> None:
        if run not in self._bars:
            total = self._runs[run].steps
            bar = self._progress.add_task(self._name(self._runs[run]), total=total, losses=state)
            self._bars[run] = bar

    def _name(self, run: Run) -> str:
        return f"{run.model}, {self._setting.name(run.how)}, seed {run.seed}"

    def _losses(self, stepped: Stepped) -> str:
        validated = self._validated.get(stepped.run)
        held_out = f", held out {validated.loss:.2f}" if validated is not None else ""
        return f"loss {stepped.loss:.2f}{held_out}"

    def _update(self, run: int, *, losses: str, completed: int | None = None) -> None:
        self._progress.update(self._bars[run], completed=completed, losses=losses)

    def _log(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line)

    def __enter__(self) -> Self:
        self._progress.start()
        self._add(0, "starting the ranks")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
