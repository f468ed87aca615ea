"""The options of `cgx bench kernels`."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from typing import Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cgx.cli.bench.console import command_line, guard, open_console, progress
from cgx.cli.bench.environment import describe
from cgx.cli.bench.sizes import format_size, parse_size
from cgx.core.spec import Dtype, Uniform, parse_spec
from cgx.errors import SpecError

_SPECS = ["uniform:4", "uniform:4/rounding=stochastic", "uniform:4/rounding=nearest", "uniform:8"]
_DTYPES = list(get_args(Dtype))
_UNIT = "GB/s"


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

    Encode and decode are compared with memcpy, the fused reduction of N payloads (the work of one of N + 1 ranks) with
    its steps: decode-add each payload, scale, encode, decode. All take turns in one process, and every result is checked.

    Every JSON row has op, spec, dtype, raw_nbytes, bits_per_element, p20_s, p50_s, p80_s, raw_byte_s, baseline,
    baseline_p50_s, ratio (baseline / own time) and verified. A row with op=first_use has cold_s and warm_s: seconds
    after `import numba`, for one small tensor. The last row has op=environment.
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
) -> list[dict[str, object]]:
    # Kernels and their compiler load here, seconds after `cgx --help` would have answered.
    from cgx.cli.bench.kernels.first_use import measure_first_use
    from cgx.cli.bench.kernels.measure import measure, one_core, rounds
    from cgx.cli.bench.kernels.subject import Subject

    found: list[dict[str, object]] = []

    def add(row: dict[str, object]) -> None:
        found.append(row)
        if json:
            typer.echo(jsonlib.dumps(row))

    with one_core() as core, progress(console) as bars:
        if first_use:
            bar = bars.add_task("first use", total=1)
            add(measure_first_use(cases[0][0]).as_dict())
            bars.advance(bar)
        for spec, dtype in cases:
            bar = bars.add_task(f"{_short(str(spec))} {dtype}", total=rounds(runs))
            subject = Subject(spec, dtype, nbytes)
            for row in measure(subject, runs, lambda bar=bar: bars.advance(bar)):
                add(row.as_dict())
    environment = describe(command_line())
    add({"op": "environment", "core": core, **environment.as_dict()})
    if not json:
        console.print(_table(found, nbytes, core))
        for row in found:
            if row["op"] == "first_use":
                console.print(
                    f"First use of {_short(str(row['spec']))}, after import numba: "
                    f"[bold]{row['cold_s']:.2f} s[/] cold, [bold]{row['warm_s']:.2f} s[/] from the cache."
                )
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


def _short(spec: str) -> str:
    """A spec without what is default."""
    default = str(Uniform()).split("/")[1:]
    head, *options = spec.split("/")
    return "/".join([head, *(option for option in options if option not in default)])


def _table(rows: Sequence[dict[str, object]], nbytes: int, core: int) -> Table:
    table = Table(
        title=f"{format_size(nbytes)} of gradient, on core {core} alone",
        title_style="bold",
        caption="reduce N is the fused reduction of N payloads and the own part; its steps are decode-add each, scale, "
        "encode, decode. Ratio: time of what it is compared with / own time, medians of interleaved rounds.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for header in ("spec", "dtype", "operation"):
        table.add_column(header, no_wrap=True)
    for header in (_UNIT, "ms", "p20 .. p80", "beside", "ratio", "right"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if "ratio" not in row:
            continue
        case = (_short(str(row["spec"])), str(row["dtype"]))
        if previous not in (None, case):
            table.add_section()
        table.add_row(
            *(case if case != previous else ("", "")),
            str(row["op"]).replace("_", " "),
            f"{row['raw_byte_s'] / 1e9:.2f}",
            f"{row['p50_s'] * 1e3:.1f}",
            f"{row['p20_s'] * 1e3:.1f} .. {row['p80_s'] * 1e3:.1f}",
            f"{row['baseline']} {row['baseline_p50_s'] * 1e3:.1f}".replace("_", " "),
            f"[bold]{row['ratio']:.2f}x[/]",
            "[green]yes[/]" if row["verified"] else "[bold red]NO[/]",
        )
        previous = case
    return table
