"""What a run came to, beside the stock run of the same model and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

from rich import box
from rich.table import Table

from cgx.cli.demo.events import STOCK, Finished, Run
from cgx.testbed import format_rate

_NUMBERS = (
    "final\nloss",
    "accu-\nracy",
    "ms per\nstep",
    "MB per\nstep",
    "fewer\nbytes",
    "speed-\nup",
    "replicas\nidentical",
)


@final
@dataclass(frozen=True)
class Setting:
    """Where the runs took place.

    Attributes:
        hosts: How many hosts, one rank on each.
        link_bit_s: Rate of each host's link in bits per second; None is no limit.
        refusal: Why the hosts are processes on loopback; None where they are emulated.
    """

    hosts: int
    link_bit_s: float | None
    refusal: str | None

    @property
    def measured(self) -> bool:
        """Whether the runs went over real links of the stated rate."""
        return self.refusal is None and self.link_bit_s is not None

    @property
    def throttle_bit_s(self) -> float | None:
        """The rate to model, where the links cannot be made."""
        return self.link_bit_s if self.refusal is not None else None

    def __str__(self) -> str:
        where = "emulated hosts" if self.refusal is None else "processes on loopback"
        if self.link_bit_s is None:
            return f"{self.hosts} {where}, without a limit on their links"
        links = f"{format_rate(self.link_bit_s)} links"
        return f"{self.hosts} {where} with {links} ({'measured' if self.measured else 'modelled'})"

    def name(self, how: str) -> str:
        """What a person reads for `how`."""
        if how != STOCK:
            return how
        return "stock DDP" if self.throttle_bit_s is None else "exact"


@final
@dataclass(frozen=True)
class Result:
    """One row of the outcome; the attributes are the keys of `cgx demo --json`.

    Attributes:
        model: Which model.
        how: `off` (stock DDP) or a spec.
        seed: The seed of weights, data and rounding.
        final_loss: Mean cross-entropy on all held-out data, nats.
        final_accuracy: Share of right answers there, 0..1.
        step_p50_s: Median wall-clock time of a step.
        wire_nbytes_per_step: Bytes a rank sent per step.
        ratio: Bytes per step of the stock run, divided by this run's; larger is better.
        speedup: Step time of the stock run, divided by this run's; larger is better.
        replicas_identical: Whether all ranks ended with the same bits.
        measured: Whether this ran over real links of the stated rate.
    """

    model: str
    how: str
    seed: int
    final_loss: float
    final_accuracy: float
    step_p50_s: float
    wire_nbytes_per_step: float
    ratio: float
    speedup: float
    replicas_identical: bool
    measured: bool

    def to_json(self) -> str:
        """Writes it as one line, without the newline."""
        return json.dumps(asdict(self))


def compare(run: Run, finished: Finished, stock: Finished, *, measured: bool) -> Result:
    """Sets the outcome of a run beside the stock run of the same model and seed."""
    return Result(
        model=run.model,
        how=run.how,
        seed=run.seed,
        final_loss=finished.final_loss,
        final_accuracy=finished.final_accuracy,
        step_p50_s=finished.step_p50_s,
        wire_nbytes_per_step=finished.wire_nbytes_per_step,
        ratio=stock.wire_nbytes_per_step / finished.wire_nbytes_per_step,
        speedup=stock.step_p50_s / finished.step_p50_s,
        replicas_identical=finished.replicas_identical,
        measured=measured,
    )


def table(results: Sequence[Result], setting: Setting) -> Table:
    """Draws the results so that a terminal of 80 columns holds them, a rule between models."""
    drawn = Table(
        title=str(setting),
        title_style="bold",
        caption=_caption(setting),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    seeds = {result.seed for result in results}
    drawn.add_column("model", no_wrap=True)
    drawn.add_column("gradients", overflow="fold")
    for header in (*(["seed"] if len(seeds) > 1 else []), *_NUMBERS):
        drawn.add_column(header, justify="right", no_wrap=True)
    for previous, result in zip([None, *results], results, strict=False):
        if previous is not None and previous.model != result.model:
            drawn.add_section()
        drawn.add_row(
            result.model,
            setting.name(result.how),
            *([str(result.seed)] if len(seeds) > 1 else []),
            f"{result.final_loss:.3f}",
            f"{result.final_accuracy:.1%}",
            f"{result.step_p50_s * 1e3:.0f}",
            f"{result.wire_nbytes_per_step / 1e6:.2f}",
            f"{result.ratio:.2f}x",
            f"{result.speedup:.2f}x",
            "[green]yes[/]" if result.replicas_identical else "[bold red]NO[/]",
            style=None if result.how == STOCK else "bold",
        )
    return drawn


def _caption(setting: Setting) -> str:
    loss = "Loss and accuracy are on held-out data."
    if setting.throttle_bit_s is not None:
        return (
            f"{loss} Times are modelled: all runs send through a transport that waits as long as "
            "the link would; 'exact' is in stock DDP's place."
        )
    return f"{loss} Bytes are those the interface counted, headers and all."
