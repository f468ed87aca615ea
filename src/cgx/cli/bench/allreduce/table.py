"""The outcome of `cgx bench allreduce` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from cgx.cli.bench.allreduce.messages import AUTO, BASELINES, FP16, FP32
from cgx.cli.bench.allreduce.results import AutoVerdict, Judgement, Result
from cgx.cli.bench.sizes import format_size
from cgx.cli.bench.timing import milliseconds

_BASELINES = {FP32: "Gloo fp32", FP16: "Gloo fp16"}
_DEFAULT_ALGORITHM = "scatter_reduce "


def title_of(name: str) -> str:
    """A contender's name for people: the usual algorithm goes without saying."""
    return _BASELINES.get(name, name.removeprefix(_DEFAULT_ALGORITHM))


def table(judgements: Sequence[Judgement]) -> Table:
    """Draws the sizes of one link: one in detail, several as rows with a column for each candidate."""
    return _details(judgements[0]) if len(judgements) == 1 else _sweep(judgements)


def _where(result: Result) -> str:
    ranks = f" x {result.ranks_per_host} ranks" if result.ranks_per_host > 1 else ""
    return f"{result.hosts} hosts{ranks}, links: {result.link}"


def _draw(title: str, caption: str) -> Table:
    return Table(title=title, title_style="bold", caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _details(judgement: Judgement) -> Table:
    counted = any(contender.counted_nbytes is not None for contender in judgement.contenders.values())
    drawn = _draw(
        f"All-reduce of {format_size(judgement.raw_nbytes)} on {_where(judgement.results[0])}",
        "Milliseconds of the slowest rank"
        + ("; MB as the interface counted them, headers and all." if counted else "."),
    )
    drawn.add_column("", overflow="fold")
    for header in (
        "p20",
        "p50",
        "p80",
        "over\nfp32",
        "over\nfp16",
        "MB sent\nby a host",
        "CPU s\nper GB",
        "error of\nmean",
    ):
        drawn.add_column(header, justify="right", no_wrap=True)
    fp32, fp16 = (judgement.contenders[name].time.p50 for name in BASELINES)
    for name, contender in judgement.contenders.items():
        time = contender.time
        drawn.add_row(
            title_of(name),
            *(milliseconds(seconds) for seconds in (time.p20, time.p50, time.p80)),
            *(f"{baseline / time.p50:.2f}x" for baseline in (fp32, fp16)),
            "-" if contender.counted_nbytes is None else f"{contender.counted_nbytes / 1e6:.4g}",
            f"{contender.cpu_s_per_gb:.2f}",
            f"{contender.nmse:.2g}",
            style=None if name in BASELINES else "bold",
        )
    return drawn


def _sweep(judgements: Sequence[Judgement]) -> Table:
    results = judgements[0].results
    drawn = _draw(
        f"All-reduce on {_where(results[0])}",
        "Milliseconds of Gloo; then how much faster than Gloo in fp32 and in fp16, and the share of the wire bound.",
    )
    drawn.add_column("size", justify="right", no_wrap=True)
    for name in BASELINES:
        drawn.add_column(_BASELINES[name].replace(" ", "\n"), justify="right", no_wrap=True)
    for result in results:
        drawn.add_column(result.name.replace(" ", "\n"), justify="right")
    for judgement in judgements:
        drawn.add_row(
            format_size(judgement.raw_nbytes),
            *(milliseconds(judgement.contenders[name].time.p50) for name in BASELINES),
            *map(_cell, judgement.results),
        )
    return drawn


def _cell(result: Result) -> str:
    colour = "green" if result.speedup >= 1 else "yellow"
    efficiency = "" if result.wire_efficiency is None else f" {result.wire_efficiency:.2f}"
    doubt = "" if result.verified else " [bold red]![/]"
    return f"[{colour}]{result.speedup:.2f}x[/] {result.speedup16:.2f}x{efficiency}{doubt}"


def summary(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Sentences below the table, with markup."""
    if len(judgements) == 1:
        yield from (_wire(result) for result in judgements[0].results if result.wire_bound_s is not None)
    for judgement in judgements:
        if judgement.verdict is not None:
            yield _verdict(judgement, judgement.verdict)
    if any(judgement.faults for judgement in judgements):
        yield "[bold red]Not verified[/]"
    else:
        counted = any(result.counted_nbytes is not None for result in judgements[0].results)
        yield (
            "[green]Verified[/] in every round: replicas bit-identical, errors within bounds"
            + (", bytes as the interface counted them." if counted else ".")
        )


def _verdict(judgement: Judgement, verdict: AutoVerdict) -> str:
    auto = next(result for result in judgement.results if result.how == AUTO)
    against = [f"{verdict.over_best} of the time of {title_of(verdict.best)}, the fastest by hand"]
    if verdict.best != FP32:
        against.append(f"{verdict.over_fp32} of that of {title_of(FP32)}")
    return (
        f"auto at {format_size(judgement.raw_nbytes)} chose {auto.chosen} in {auto.settle_calls} calls: "
        f"{'; '.join(against)}."
    )


def _wire(result: Result) -> str:
    assert result.wire_nbytes is not None
    assert result.wire_bound_s is not None
    bits = "" if result.bits_per_element is None else f" ({result.bits_per_element:.3f} bits per element)"
    stated = "stated" if result.link.endswith("(modelled)") else "of raw TCP streams in the same rounds"
    return (
        f"{title_of(result.name)}: a host sends {result.wire_nbytes / 1e6:.4g} MB of payload{bits}, which the goodput "
        f"{stated}, {result.goodput_bit_s / 1e6:.4g} Mbit/s, moves in {milliseconds(result.wire_bound_s)} ms: "
        f"[bold]{result.wire_efficiency:.2f}[/] of this bound reached."
    )
