"""The options of `cgx bench kernels`."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from cgx.cli.bench.console import command_line, guard, open_console, progress
from cgx.cli.bench.environment import describe
from cgx.cli.bench.kernels.table import name_parts, summary, table
from cgx.cli.bench.sizes import format_size, parse_size
from cgx.core.spec import Dtype, Uniform, parse_spec
from cgx.errors import SpecError

_SPECS = ["uniform:4", "uniform:4/rounding=stochastic", "uniform:4/rounding=nearest", "uniform:8"]
_DTYPES = list(get_args(Dtype))


def kernels(
    size: Annotated[str, typer.Option(help="Gradient: 1KB, 25MB, 1GB, ...")] = "100MB",
    spec: Annotated[
        list[str] | None, typer.Option(help="Spec to time; repeatable.", show_default=", ".join(_SPECS))
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype of the gradient; repeatable. All specs run in the first, the first spec in the others.",
            show_default=", ".join(_DTYPES),
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    first_use: Annotated[
        bool, typer.Option(help="Time the first use of the first spec too, without and with cached kernels.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; all else to stderr.")] = False,
) -> None:
    """Time the codec's kernels on one core, beside memcpy of the same gradient.

    Encode and decode are compared with memcpy, the fused reduction of N
    payloads with its steps: decode and add each, scale, encode, decode.
    All take turns in one process, and every result is checked.
    """
    console = open_console(json)
    with guard("cgx bench kernels", console):
        nbytes = parse_size(size)
        specs = [_parse(text) for text in spec or _SPECS]
        dtypes = [_find_dtype(text) for text in dtype or _DTYPES]
        cases = [(each, dtypes[0]) for each in specs] + [(specs[0], each) for each in dtypes[1:]]
        rows = _measure(cases, nbytes, runs, console, first_use=first_use, json=json)
    if not all(row["verified"] for row in rows if "verified" in row):
        console.print("[bold red]A kernel's result was wrong:[/] see the rows that are not verified.")
        raise typer.Exit(1)


def _measure(
    cases: Sequence[tuple[Uniform, Dtype]], nbytes: int, runs: int, console: Console, *, first_use: bool, json: bool
) -> list[dict[str, Any]]:
    # Kernels and their compiler load here, seconds after `cgx --help` would have answered.
    from cgx.cli.bench.kernels.first_use import measure_first_use
    from cgx.cli.bench.kernels.measure import measure, one_core, rounds
    from cgx.cli.bench.kernels.subject import Subject

    found: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        found.append(row)
        if json:
            typer.echo(jsonlib.dumps(row))

    with one_core() as core, progress(console) as bars:
        if first_use:
            bar = bars.add_task("first use", total=1)
            add(measure_first_use(cases[0][0]).as_dict())
            bars.advance(bar)
        for spec, dtype in cases:
            bar = bars.add_task(" ".join(name_parts(str(spec), dtype)), total=rounds(runs))
            subject = Subject(spec, dtype, nbytes)
            for row in measure(subject, runs, partial(bars.advance, bar)):
                add(row.as_dict())
    environment = describe(command_line())
    add({"op": "environment", "core": core, **environment.as_dict()})
    if not json:
        console.print(table(found, f"{format_size(nbytes)} of gradient, on core {core} alone"))
        for sentence in summary(found):
            console.print(sentence, soft_wrap=True)
        console.print(f"{environment}", style="dim")
    return found


def _parse(text: str) -> Uniform:
    spec = parse_spec(text)
    if not isinstance(spec, Uniform):
        raise SpecError(f"{text}: only uniform specs have kernels of their own to time, such as uniform:4.")
    return spec


def _find_dtype(text: str) -> Dtype:
    for dtype in get_args(Dtype):
        if text == dtype:
            return dtype  # type: ignore[no-any-return]
    raise SpecError(f"{text!r} is not a dtype that cgx compresses: have {', '.join(_DTYPES)}.")
