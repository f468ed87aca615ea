"""The figure of the demo: held-out loss against the time it took, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cgx.cli.demo.events import STOCK, Run, Stepped, Validated
from cgx.cli.demo.results import Setting

_STOCK_COLOUR = "#6b7280"
_COLOURS = ("#0f766e", "#c2410c", "#6d28d9", "#be185d", "#1d4ed8")


@final
@dataclass
class Curve:
    """What a run reported on its way."""

    run: Run
    stepped: list[Stepped] = field(default_factory=list)
    validated: list[Validated] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall-clock time of all steps so far."""
        return self.stepped[-1].seconds if self.stepped else 0.0


def draw(curves: Sequence[Curve], titles: dict[str, str], setting: Setting, path: Path) -> None:
    """Draws the curves into a PNG file.

    Args:
        curves: One for each run; those without a single step are left out.
        titles: The heading of each model's panel, in order.
        setting: Where the runs took place; it is named in the figure, and so is what is modelled.
        path: The file to write.
    """
    figure = Figure(figsize=(6.2 * len(titles), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(str(setting), fontsize=11)
    for axes, (model, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
        _draw_panel(axes, [curve for curve in curves if curve.run.model == model], setting)
        axes.set_title(title, fontsize=11, loc="left")
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, curves: Sequence[Curve], setting: Setting) -> None:
    hows = list(dict.fromkeys(curve.run.how for curve in curves))
    compressed = [how for how in hows if how != STOCK]
    for curve in curves:
        how = curve.run.how
        colour = _STOCK_COLOUR if how == STOCK else _COLOURS[compressed.index(how) % len(_COLOURS)]
        first = curve.run.seed == min(other.run.seed for other in curves)
        if first:
            axes.plot(
                [step.seconds for step in curve.stepped],
                [step.loss for step in curve.stepped],
                color=colour,
                alpha=0.25,
                linewidth=0.8,
            )
        axes.plot(
            [point.seconds for point in curve.validated],
            [point.loss for point in curve.validated],
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1.8,
            alpha=1.0 if first else 0.45,
            label=f"{setting.name(how)}: {curve.seconds:.0f} s" if first else None,
        )
    modelled = " (modelled)" if setting.throttle_bit_s is not None else ""
    axes.set_xlabel(f"wall-clock training time{modelled}, seconds")
    axes.set_ylabel("loss, nats (points: held out; thin: training)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
