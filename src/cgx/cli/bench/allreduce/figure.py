"""The figure of the sweep: speed-up over size, one panel for each link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from cgx.cli.bench.allreduce.messages import AUTO
from cgx.cli.bench.allreduce.results import Judgement, Result
from cgx.cli.bench.sizes import format_size

_STOCK_COLOUR = "#6b7280"
_COLOURS = ("#0f766e", "#c2410c", "#6d28d9", "#be185d", "#1d4ed8", "#a16207", "#15803d")
_AUTO_COLOUR = "#111827"
_MAX_TICKS = 12
Points = Sequence[tuple[float, float]]


def find_break_even(points: Points) -> float | None:
    """The size from which on compression pays, to the largest that was measured.

    Args:
        points: Sizes and speed-ups, by size.

    Returns:
        Where the line between two points crosses 1 for the last time, with both axes logarithmic; None where the
        speed-up ends below 1, or never is.

    Example:
        >>> find_break_even([(1e3, 0.5), (1e5, 2.0), (1e7, 4.0)])
        10000.0
    """
    below = [index for index, (_, speedup) in enumerate(points) if speedup < 1]
    if not below or below[-1] == len(points) - 1:
        return None
    (left, low), (right, high) = points[below[-1]], points[below[-1] + 1]
    share = math.log(low) / (math.log(low) - math.log(high))
    return float(f"{left * (right / left) ** share:.6g}")


def draw(links: Sequence[Sequence[Judgement]], path: Path) -> None:
    """Draws the sweeps into a PNG file.

    Args:
        links: The judgements of each link, by size.
        path: The file to write.
    """
    figure = Figure(figsize=(6.2 * len(links), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    first = links[0][0].results[0]
    ranks = f" x {first.ranks_per_host} ranks" if first.ranks_per_host > 1 else ""
    figure.suptitle(f"All-reduce on {first.hosts} hosts{ranks}: speed-up over Gloo in fp32", fontsize=11)
    for axes, judgements in zip(figure.subplots(1, len(links), squeeze=False, sharey=True)[0], links, strict=True):
        _draw_panel(axes, judgements)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, judgements: Sequence[Judgement]) -> None:
    axes.axhline(1, color=_STOCK_COLOUR, linewidth=1.2, label="Gloo fp32")
    half = [(j.raw_nbytes, j.results[0].speedup / j.results[0].speedup16) for j in judgements]
    axes.plot(*zip(*half, strict=True), color=_STOCK_COLOUR, linestyle="--", linewidth=1.2, label="Gloo fp16")
    for index in range(len(judgements[0].results)):
        _draw_candidate(axes, [judgement.results[index] for judgement in judgements], index)
    axes.set_title(f"links: {judgements[0].results[0].link}", fontsize=11, loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    # The sizes that were measured, where they leave room for it; else powers of ten.
    sizes = [judgement.raw_nbytes for judgement in judgements]
    axes.xaxis.set_major_locator(FixedLocator(sizes) if len(sizes) <= _MAX_TICKS else LogLocator(base=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: _about(nbytes, digits=3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=45)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda speedup, _: f"{speedup:g}x"))
    axes.set_xlabel("gradient in fp32 (circles: from here on it pays)")
    axes.set_ylabel("speed-up, medians")
    axes.label_outer()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_candidate(axes: Axes, results: Sequence[Result], index: int) -> None:
    points = [(float(result.raw_nbytes), result.speedup) for result in results]
    is_auto = results[0].how == AUTO
    colour = _AUTO_COLOUR if is_auto else _COLOURS[index % len(_COLOURS)]
    break_even = find_break_even(points)
    axes.plot(
        *zip(*points, strict=True),
        color=colour,
        marker="o",
        markersize=4,
        linewidth=2.4 if is_auto else 1.6,
        label=results[0].name + ("" if break_even is None else f": pays from {_about(break_even)}"),
    )
    if break_even is not None:
        axes.plot(break_even, 1, marker="o", markersize=9, markerfacecolor="none", markeredgecolor=colour)


def _about(nbytes: float, *, digits: int = 2) -> str:
    """A size, rounded."""
    return format_size(round(float(f"{nbytes:.{digits}g}")))
