"""Accuracy against world size, on virtual ranks: the error of the reduced mean, and the loss after training.

Error: the byte-level GPT of `cgx demo` trains for some steps on rank 0's batches, then gives 64 gradients, one for each
of 64 micro-batches. The first W of them are reduced by each algorithm under each spec, through the library's reducers.
The table and the upper panels have the squared error of the mean over its squared norm. Dotted: the sampling noise of
the exact mean in the same unit; an error on that line costs half of the batch.

Loss: a smaller byte-level GPT trains with AdamW on W virtual ranks that share 32 sequences a step, from the same
weights with the same data; the difference to the exact mean's final loss, in nats.

    nice -n 10 python benchmarks/virtual_ranks.py --plot docs/images/virtual-ranks.png --json virtual_ranks.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cgx.cli.demo.models import TASKS
from cgx.cli.demo.models.gpt import ByteGPT
from cgx.collectives.base import Op
from cgx.collectives.virtual import VirtualRanks
from cgx.core.algorithm import Algorithm
from cgx.core.plan import Parameter, choose_specs
from cgx.core.segments import Segment
from cgx.policies.error import relative_error, sampling_noise, squared_error
from cgx.torch.virtual import VirtualGroup

WORLD_SIZES = (2, 4, 8, 16, 32, 64)
WARM_UP_STEPS = 40
SPECS = ("uniform:2", "uniform:4", "uniform:4+uniform:5", "uniform:4+uniform:8", "uniform:8")
ALGORITHMS: tuple[Algorithm, ...] = ("scatter_reduce", "all_gather", "ring")
SHARED_SEQUENCES = 32
LOSS_WORLD_SIZES = (2, 8, 32)
LOSS_STEPS = 150
METHODS: tuple[tuple[str, Algorithm], ...] = (
    ("uniform:4", "scatter_reduce"), ("uniform:4", "all_gather"), ("uniform:4", "ring"),
    ("uniform:4+uniform:8", "scatter_reduce"), ("uniform:2", "scatter_reduce"),
)  # fmt: skip
_COLOURS = ("#be185d", "#0f766e", "#1d4ed8", "#6d28d9", "#a16207")
_LOSS_COLOURS = ("#0f766e", "#1d4ed8", "#c2410c", "#6d28d9", "#be185d")  # one for each of METHODS
_NOISE_COLOUR = "#6b7280"

Row = dict[str, Any]
Floats = NDArray[np.float32]


def gradients(world_size: int) -> tuple[list[Parameter], Floats]:
    """Return the model's parameters and as many micro-batches' gradients, shape (ranks, elements)."""
    task = TASKS["gpt"]
    torch.manual_seed(0)
    model = task.build()
    optimizer = task.optimizer(model)
    parameters = [Parameter(name, tuple(p.shape), "fp32") for name, p in model.named_parameters()]

    def gradient(rank: int, step: int) -> Floats:
        optimizer.zero_grad()
        task.loss(model, task.batch(0, rank, step)).backward()
        return np.concatenate([p.grad.reshape(-1).numpy() for p in model.parameters() if p.grad is not None])

    for step in range(WARM_UP_STEPS):
        gradient(0, step)
        optimizer.step()
    return parameters, np.stack([gradient(rank, WARM_UP_STEPS) for rank in range(world_size)])


def errors(world_sizes: Sequence[int]) -> list[Row]:
    """Return the error of each algorithm and spec at each world size, and the sampling noise."""
    parameters, parts = gradients(max(world_sizes))
    rows: list[Row] = []
    for world in world_sizes:
        some = parts[:world]
        exact = some.mean(0, dtype=np.float64)
        norms = np.array([squared_error(part) for part in some])
        noise = sampling_noise(norms, squared_error(exact)) / squared_error(exact)
        rows.append({"kind": "noise", "world_size": world, "relative": noise})
        for algorithm in ALGORITHMS:
            for spec in SPECS:
                if algorithm == "all_gather" and "+" in spec:
                    continue  # it has no second phase
                chosen = choose_specs(spec, parameters)
                segments = [Segment(p.name, p.shape, "fp32", chosen[p.name]) for p in parameters]
                virtual = VirtualRanks(segments, world, algorithm=algorithm)
                error = relative_error(virtual.all_reduce(some.copy(), Op.AVG) - exact, exact)
                rows.append(
                    {"kind": "error", "algorithm": algorithm, "spec": spec, "world_size": world, "relative": error,
                     "wire_nbytes": virtual.wire_nbytes}
                )  # fmt: skip
    return rows


def losses(world_sizes: Sequence[int], steps: int, seeds: int) -> list[Row]:
    """Return the final loss of each method at each world size."""
    return [
        {"kind": "loss", "algorithm": algorithm, "spec": spec, "world_size": world, "seed": seed,
         "loss": final_loss(spec, algorithm, world, steps, seed)}
        for seed in range(seeds)
        for world in world_sizes
        for spec, algorithm in (("off", "scatter_reduce"), *METHODS)
    ]  # fmt: skip


def final_loss(spec: str, algorithm: Algorithm, world_size: int, steps: int, seed: int) -> float:
    """Return the held-out loss after training on `world_size` virtual ranks."""
    task = TASKS["gpt"]
    torch.manual_seed(seed)
    model = ByteGPT(width=64, layers=2)
    optimizer = task.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    virtual = VirtualGroup(model, world_size, spec, algorithm=algorithm, seed=seed)
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * task.learning_rate_factor(step, steps)
        batches = [task.batch(seed, part, step) for part in range(SHARED_SEQUENCES // 8)]
        inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
        micro = list(zip(inputs.chunk(world_size), targets.chunk(world_size), strict=True))
        virtual.backward(task.loss, micro)
        optimizer.step()
    return task.evaluate(model).loss


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print errors, and differences of loss."""
    sizes = sorted({row["world_size"] for row in rows if row["kind"] == "error"})
    if sizes:
        table = Table("algorithm", "spec", *map(str, sizes), title="relative squared error of the mean, by world size")
        for algorithm in ALGORITHMS:
            for spec, points in _curves(rows, algorithm).items():
                table.add_row(algorithm, spec, *(f"{points[size]:.5f}" for size in sizes))
        noise = {row["world_size"]: row["relative"] for row in rows if row["kind"] == "noise"}
        table.add_row("", "sampling noise", *(f"{noise[size]:.5f}" for size in sizes))
        console.print(table)
    sizes = sorted({row["world_size"] for row in rows if row["kind"] == "loss"})
    if sizes:
        table = Table("method", *map(str, sizes), title="final loss minus that of the exact mean, by world size")
        for name, points in _differences(rows).items():
            table.add_row(name, *(f"{np.mean(points[size]):+.4f}" for size in sizes))
        console.print(table)


def _curves(rows: Sequence[Row], algorithm: str) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "error" and row["algorithm"] == algorithm:
            curves.setdefault(row["spec"], {})[row["world_size"]] = row["relative"]
    return curves


def _differences(rows: Sequence[Row]) -> dict[str, dict[int, list[float]]]:
    """Return, by method and world size, the difference to the exact mean of each seed."""
    mine = [row for row in rows if row["kind"] == "loss"]
    exact = {(row["world_size"], row["seed"]): row["loss"] for row in mine if row["spec"] == "off"}
    found: dict[str, dict[int, list[float]]] = {}
    for row in mine:
        if row["spec"] != "off":
            points = found.setdefault(f"{row['spec']} by {row['algorithm']}", {})
            points.setdefault(row["world_size"], []).append(row["loss"] - exact[row["world_size"], row["seed"]])
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel of errors for each algorithm, and one of losses."""
    figure = Figure(figsize=(12.4, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(ALGORITHMS), height_ratios=(1.35, 1))
    noise = {row["world_size"]: row["relative"] for row in rows if row["kind"] == "noise"}
    first: Axes | None = None
    for column, algorithm in enumerate(ALGORITHMS):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axes
        axes.plot(*zip(*sorted(noise.items()), strict=True), color=_NOISE_COLOUR, linestyle=":", label="sampling noise")
        for spec, points in _curves(rows, algorithm).items():
            colour = _COLOURS[SPECS.index(spec)]
            axes.plot(*zip(*sorted(points.items()), strict=True), color=colour, marker="o", markersize=4, label=spec)
        axes.set_yscale("log")
        axes.set_title(algorithm, fontsize=11, loc="left")
        if column == 0:
            axes.set_ylabel("squared error of the mean / squared norm")
            axes.legend(frameon=False, fontsize=8, ncols=2)
        else:
            axes.tick_params(axis="y", labelleft=False)
        _frame(axes, sorted(noise))
    axes = figure.add_subplot(grid[1, :2])
    axes.axhline(0, color=_NOISE_COLOUR, linewidth=1)
    differences = _differences(rows)
    for colour, (name, points) in zip(_LOSS_COLOURS, differences.items(), strict=False):  # none without trainings
        sizes = sorted(points)
        axes.plot(
            sizes, [np.mean(points[s]) for s in sizes], color=colour, marker="o", markersize=4, alpha=0.8, label=name
        )
    axes.set_title("byte-level GPT with AdamW: final loss minus that of the exact mean", fontsize=11, loc="left")
    axes.set_ylabel("nats")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.02, 0.5)).set_in_layout(False)
    _frame(axes, sorted(next(iter(differences.values()), {})))
    figure.savefig(path, dpi=130)


def _frame(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FixedFormatter([str(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str]) -> int:
    """Measure, or read what was kept; print and draw it."""
    parser = argparse.ArgumentParser(description="Accuracy against world size, on virtual ranks.")
    parser.add_argument("--seeds", type=int, default=1, help="of the trainings; 0 leaves them out")
    parser.add_argument("--steps", type=int, default=LOSS_STEPS, help="of each training")
    parser.add_argument("--largest", type=int, default=WORLD_SIZES[-1], help="world size")
    parser.add_argument("--json", type=Path, help="where to keep one object a line")
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument("--from", dest="kept", type=Path, help="objects that were kept, instead of new ones")
    asked = parser.parse_args(arguments)
    if asked.kept is not None:
        rows = [json.loads(line) for line in asked.kept.read_text().splitlines()]
    else:
        rows = errors([world for world in WORLD_SIZES if world <= asked.largest])
        rows += losses([world for world in LOSS_WORLD_SIZES if world <= asked.largest], asked.steps, asked.seeds)
    if asked.json is not None:
        asked.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_tables(rows, Console(width=120))
    if asked.plot is not None:
        draw(rows, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
