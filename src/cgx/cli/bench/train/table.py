"""The outcome of `cgx bench train` for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from cgx.cli.bench.timing import milliseconds
from cgx.cli.bench.train.hows import OFF
from cgx.cli.bench.train.results import Judgement, Result


def table(judgement: Judgement) -> Table:
    """Draws all ways to average one model's gradients, so that a terminal of 80 columns holds them."""
    first = judgement.results[0]
    accumulated = f" x {first.accumulate} a step" if first.accumulate > 1 else ""
    drawn = Table(
        title=f"{first.model} ({first.params / 1e6:.3g} M parameters, batch {first.batch}{accumulated}) on "
        f"{judgement.place}",
        title_style="bold",
        caption=f"Median of {first.pairs} rounds, on the slowest rank; without communication it takes "
        f"{milliseconds(first.compute_p50_s)} ms.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    drawn.add_column("", overflow="fold")
    for header in (
        *("step\nms", "exposed\nms", "vs off\n(95 %)", "speed\nup", "over\nfp16"),
        *("MB\nsent", "CPU s", "error"),
    ):
        drawn.add_column(header, justify="right", no_wrap=True)
    for result in judgement.results:
        drawn.add_row(*_cells(result), style=None if result.how == OFF else "bold")
    return drawn


def summary(judgement: Judgement) -> Iterator[str]:
    """Sentences below the table, with markup."""
    for result in judgement.results:
        if result.chosen is not None:
            yield f"{result.how} uses {result.chosen}. {(result.decisions or ['It decided nothing yet'])[-1]}."
        if not result.pass_never_slower:
            yield f"[red]{result.how} is slower than stock DDP[/], by {100 * (result.ratio_ci_low - 1):.1f} % at least."
    if judgement.faults:
        yield "[bold red]Not verified[/]"
    else:
        yield "[green]Verified[/]: replicas bit-identical, losses finite, gradients and bytes as promised."


def _cells(result: Result) -> Iterator[str]:
    yield result.how
    yield milliseconds(result.step_p50_s)
    yield milliseconds(result.exposed_comm_s)
    yield "" if result.how == OFF else f"{result.ratio_ci_low:.2f}-{result.ratio_ci_high:.2f}"
    yield f"{result.speedup:.2f}x"
    yield "-" if result.speedup16 is None else f"{result.speedup16:.2f}x"
    yield "-" if result.wire_nbytes_per_step is None else f"{result.wire_nbytes_per_step / 1e6:.4g}"
    yield f"{result.cpu_s_per_step:.2g}"
    yield f"{result.grad_nmse:.1g}"
