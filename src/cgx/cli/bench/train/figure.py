"""The figure of `cgx bench train`: where the time of a step goes, a panel for each model and link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cgx.cli.bench.train.hows import OFF
from cgx.cli.bench.train.results import Judgement, Result

_COLOURS: Final = {
    "compute": "#6b7280",
    "codec: processor time beyond stock DDP's": "#0f766e",
    "exposed communication": "#c2410c",
}
_BAR_INCHES, _PANEL_INCHES, _WIDTH_INCHES = 0.42, 1.1, 8.0


def draw(judgements: Sequence[Judgement], path: Path) -> None:
    """Draws stacked bars into a PNG file.

    Args:
        judgements: At least one; each gets a panel.
        path: The file to write.
    """
    bars = [len(judgement.results) for judgement in judgements]
    height = sum(_PANEL_INCHES + _BAR_INCHES * count for count in bars) + 0.5
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(judgements), 1, squeeze=False, height_ratios=[count + 1 for count in bars])
    for axes, judgement in zip(grid[:, 0], judgements, strict=True):
        _draw_panel(axes, judgement)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(_COLOURS), frameon=False)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, judgement: Judgement) -> None:
    results = judgement.results
    cpu_s = next(result.cpu_s_per_step for result in results if result.how == OFF)
    parts = [_parts(result, cpu_s) for result in results]
    names = [result.how for result in results]
    ends = [0.0] * len(results)
    for index, (label, colour) in enumerate(_COLOURS.items()):
        widths = [part[index] for part in parts]
        axes.barh(names, widths, left=ends, color=colour, label=label, height=0.7)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for at, (end, result) in enumerate(zip(ends, results, strict=True)):
        axes.annotate(f" {result.speedup:.2f}x", (end, at), va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(ends))
    axes.set_xlabel("seconds of a step; behind each bar how much faster than stock DDP")
    axes.set_title(f"{results[0].model} on {judgement.place}", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _parts(result: Result, baseline_cpu_s: float) -> tuple[float, float, float]:
    """Compute, codec and exposed communication, which add up to the step; a codec hidden in backward shows nowhere."""
    exposed = result.exposed_comm_s
    codec = min(exposed, max(0.0, result.cpu_s_per_step - baseline_cpu_s))
    return result.step_p50_s - exposed, codec, exposed - codec
