"""The outcome of `cgx bench allreduce` for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from cgx.cli.bench.allreduce.messages import CGX, FP16, FP32
from cgx.cli.bench.allreduce.results import Judgement
from cgx.cli.bench.sizes import format_size
from cgx.cli.bench.timing import milliseconds

_NAMES = {CGX: "cgx", FP32: "Gloo fp32", FP16: "Gloo fp16"}


def table(judgement: Judgement) -> Table:
    """Draws all contenders so that a terminal of 80 columns holds them."""
    result = judgement.result
    drawn = Table(
        title=f"All-reduce of {format_size(result.raw_nbytes)} on {result.hosts} hosts, links: {result.link}",
        title_style="bold",
        caption="Milliseconds of the slowest rank"
        + ("; MB as the interface counted them, headers and all." if _is_counted(judgement) else "."),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    drawn.add_column("", no_wrap=True)
    for header in ("p20", "p50", "p80", "cgx is\nfaster", "MB sent\nby a rank", "CPU s\nper GB", "error of\nthe mean"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for name, contender in judgement.contenders.items():
        time = contender.time
        drawn.add_row(
            _NAMES[name],
            *(milliseconds(seconds) for seconds in (time.p20, time.p50, time.p80)),
            "" if name == CGX else f"[bold]{time.p50 / result.p50_s:.2f}x[/]",
            "-" if contender.sent_nbytes is None else f"{contender.sent_nbytes / 1e6:.4g}",
            f"{contender.cpu_s_per_gb:.2f}",
            f"{contender.nmse:.2g}",
            style="bold" if name == CGX else None,
        )
    return drawn


def summary(judgement: Judgement) -> Iterator[str]:
    """Sentences below the table, with markup."""
    result = judgement.result
    modelled = "stated" if result.link.endswith("(modelled)") else "of raw TCP streams in the same rounds"
    yield f"{result.spec}: {result.bits_per_element:.3f} bits per element."
    yield (
        f"A rank sends {result.wire_nbytes / 1e6:.4g} MB of payload, which the goodput {modelled}, "
        f"{result.goodput_bit_s / 1e6:.4g} Mbit/s, moves in {milliseconds(result.wire_bound_s)} ms: "
        f"cgx reaches [bold]{result.wire_efficiency:.2f}[/] of this bound."
    )
    if judgement.faults:
        yield "[bold red]Not verified[/]"
    else:
        counted = ", bytes as the interface counted them" if _is_counted(judgement) else ""
        yield f"[green]Verified[/] in every round: replicas bit-identical, errors within bounds{counted}."


def _is_counted(judgement: Judgement) -> bool:
    return judgement.contenders[CGX].sent_nbytes is not None
