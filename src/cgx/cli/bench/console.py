"""What both benchmarks share at the terminal: where words go, progress, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cgx.errors import CgxError, SpecError

_LOG_WIDTH = 110  # where there is no terminal to ask
_INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


def open_console(json: bool) -> Console:
    """Where words for people go: stderr, when stdout is for JSON."""
    console = Console(stderr=json, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def progress(console: Console) -> Progress:
    """Bars that count rounds; nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        expand=True,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )


def command_line() -> list[str]:
    """The command that this process runs, as a user types it."""
    return ["cgx", *sys.argv[1:]]


@contextmanager
def guard(command: str, console: Console) -> Iterator[None]:
    """Ends errors in one sentence and exit code 2 (bad options) or 1, and Ctrl-C quietly."""
    try:
        yield
    except CgxError as error:
        console.print(f"[bold red]{command}:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise typer.Exit(_INTERRUPTED) from None
