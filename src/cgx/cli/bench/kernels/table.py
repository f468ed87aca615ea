"""The outcome of `cgx bench kernels` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich import box
from rich.table import Table

from cgx.cli.bench.timing import milliseconds
from cgx.core.spec import Uniform


def name_parts(spec: str, dtype: str) -> list[str]:
    """What tells a case from others: its bits, whatever is not default, and its dtype.

    Example:
        >>> name_parts("uniform:4/block=128/rounding=nearest/scale=bf16", "fp32")
        ['uniform:4', 'nearest', 'fp32']
    """
    head, *options = spec.split("/")
    default = str(Uniform()).split("/")[1:]
    return [head, *(option.removeprefix("rounding=") for option in options if option not in default), dtype]


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Draws the rows so that a terminal of 80 columns holds them; the parts of a case run down its first column."""
    drawn = Table(
        title=title,
        title_style="bold",
        caption="reduce N: fused, of N payloads and the own part. Its steps: decode and add each, scale, encode, "
        "decode. Medians of interleaved rounds; ratio: time of what is beside / own time.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for header in ("spec", "operation"):
        drawn.add_column(header, no_wrap=True)
    for header in ("GB/s", "ms", "p20..p80", "beside", "ratio", "ok"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for parts, group in groupby((row for row in rows if "ratio" in row), key=_name):
        if drawn.row_count:
            drawn.add_section()
        for part, row in zip_longest(parts, group, fillvalue=""):
            drawn.add_row(part, *(_cells(row) if isinstance(row, dict) else ()))
    return drawn


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Sentences below the table, with markup."""
    for row in rows:
        if row["op"] == "first_use":
            yield (
                f"First use of {row['spec']}, after import numba: [bold]{row['cold_s']:.2f} s[/] cold, "
                f"[bold]{row['warm_s']:.2f} s[/] from the cache."
            )


def _name(row: dict[str, Any]) -> list[str]:
    return name_parts(row["spec"], row["dtype"])


def _cells(row: dict[str, Any]) -> list[str]:
    ms = {key: milliseconds(row[key]) for key in ("p20_s", "p50_s", "p80_s", "baseline_p50_s")}
    return [
        str(row["op"]).replace("_", " "),
        f"{row['raw_byte_s'] / 1e9:.2f}",
        ms["p50_s"],
        f"{ms['p20_s']}..{ms['p80_s']}",
        f"{row['baseline'].partition('_')[0]} {ms['baseline_p50_s']}",
        f"[bold]{row['ratio']:.2f}x[/]",
        "[green]yes[/]" if row["verified"] else "[bold red]NO[/]",
    ]
