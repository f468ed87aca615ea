"""Bits per element against error, on real gradients: the table that chooses the default specs.

The gradients are those of the two models of `cgx demo`, at several steps of their training; rank r's gradient is that
of micro-batch r of the same model. For every spec the table has the relative squared error of one pass (encode, decode)
and of the reduced mean at 2, 4, 8 and 32 ranks, reduced as the library does it: the owner's part is exact, the others'
are decoded, the sum is encoded once more. Two columns show whether the errors are unbiased:

shrinkage   projection of the mean error over several keys on the input; 0 for an unbiased spec
averaging   squared norm of that mean error, times the number of keys, over the error of one pass: 1 for an unbiased
            spec, and the number of keys for one that makes the same error every time

Run it with `python benchmarks/rate_distortion.py`; it takes some three minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cgx.cli.bench.environment import Environment, describe
from cgx.cli.bench.fidelity import nmse
from cgx.cli.demo.models import TASKS, Task, find_tasks
from cgx.collectives.layout import cut
from cgx.compressors.registry import compressor_for
from cgx.core.plan import How, Parameter, choose_specs
from cgx.core.random import GATHER, SCATTER, name_hash, parameter_keys, stream
from cgx.core.segments import Segment
from cgx.core.spec import PhaseSpecs, Spec, Uniform, parse_spec, parse_specs
from cgx.core.wire import HEAD_NBYTES

WORLD_SIZES = (2, 4, 8, 32)
STEPS = (10, 70, 130)
BIAS_KEYS = 8
FIDELITY_STEPS = (10, 40, 70, 100, 130)
FIDELITY_KEYS = 20
FIDELITY_SPECS = (Uniform(), Uniform(4, block_size=512, rounding="stochastic", scale="fp32"))
SEED = 0

GRID = [
    parse_spec(f"uniform:{bits}/block={block_size}/rounding={rounding}/scale={scale}")
    for bits, block_size, rounding, scale in itertools.product(
        (3, 4, 8), (64, 128, 256, 512, 1024), ("nearest", "stochastic", "dithered"), ("bf16", "fp32")
    )
]
# Phase one's error averages over ranks, phase two's does not: is it worth more bits, or another rounding?
PAIRS = [
    PhaseSpecs(Uniform(4), Uniform(4, rounding="nearest")),
    PhaseSpecs(Uniform(4), Uniform(5)),
    PhaseSpecs(Uniform(4), Uniform(5, rounding="nearest")),
    PhaseSpecs(Uniform(4), Uniform(6)),
    PhaseSpecs(Uniform(4), Uniform(8)),
    PhaseSpecs(Uniform(3), Uniform(4)),
    PhaseSpecs(Uniform(3), Uniform(5)),
    PhaseSpecs(Uniform(3), Uniform(6)),
    PhaseSpecs(Uniform(4, block_size=256), Uniform(4, block_size=64)),
    PhaseSpecs(Uniform(5), Uniform(5)),
]

Floats = NDArray[np.float32]
Keys = NDArray[np.uint64]


@final
@dataclass(frozen=True)
class State:
    """The gradients of one model at one step: one for each rank, and the exact means of the first ranks."""

    model: str
    step: int
    parameters: tuple[Parameter, ...]
    gradients: Floats  # (ranks, elements)
    means: dict[int, NDArray[np.float64]]  # by world size


@final
@dataclass(frozen=True)
class Row:
    """What one pair of specs costs and loses on one model; errors are means over its steps."""

    model: str
    specs: str
    bits_per_element: float
    one_pass: float
    reduced_mean: dict[int, float]
    shrinkage: float
    averaging: float

    @property
    def is_unbiased(self) -> bool:
        both = parse_specs(self.specs)
        return all(compressor_for(spec).guarantees.unbiased for spec in (both.scatter, both.gather))


@final
class OnePass:
    """Encodes and decodes whole gradients as they travel; under one spec for all, vectors and small tensors exact."""

    def __init__(self, how: How, parameters: Sequence[Parameter]) -> None:
        chosen = choose_specs(how, parameters)
        self.segments = [Segment(p.name, p.shape, "fp32", chosen[p.name]) for p in parameters]
        self.numel = sum(segment.numel for segment in self.segments)
        (piece,) = cut(self.segments, 1, piece_nbytes=4 * self.numel).pieces
        self._groups = piece.chunks[0].groups
        self.bits_per_element = 8 * piece.chunks[0].scatter_nbytes / self.numel
        self._wire = np.empty(piece.chunks[0].scatter_nbytes - HEAD_NBYTES, np.uint8)
        self._hashes = np.array([name_hash(p.name) for p in parameters], np.uint64)

    def __call__(self, x: Floats, out: Floats, *, index: int, sender: int) -> Floats:
        """Writes what ``x`` decodes to into ``out``, under the keys of reduction ``index``."""
        keys = parameter_keys(SEED, self._hashes, np.full(len(self._hashes), index, np.uint64))
        for group in self._groups:
            group.scatter.compress(x, self._wire, group.table, keys, sender)
            group.scatter.decompress(self._wire, out, group.table, keys, sender)
        return out


def states(name: str, task: Task, ranks_at: Mapping[int, int]) -> Iterator[State]:
    """Trains a model on rank 0's batches and stops at the steps of ``ranks_at`` to take so many ranks' gradients."""
    torch.manual_seed(SEED)
    model = task.build()
    optimizer = task.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    parameters = tuple(Parameter(n, tuple(p.shape), "fp32") for n, p in model.named_parameters())

    def gradient(rank: int, step: int) -> Floats:
        optimizer.zero_grad()
        task.loss(model, task.batch(SEED, rank, step)).backward()  # type: ignore[no-untyped-call]
        return np.concatenate([p.grad.numpy().reshape(-1) for p in model.parameters() if p.grad is not None])

    steps = max(ranks_at) + 1
    for step in range(steps):
        if ranks := ranks_at.get(step):
            gradients = np.stack([gradient(rank, step) for rank in range(ranks)])
            worlds = [size for size in WORLD_SIZES if size <= ranks]
            means = {size: gradients[:size].mean(axis=0, dtype=np.float64) for size in worlds}
            yield State(name, step, parameters, gradients, means)
        gradient(0, step)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * task.learning_rate_factor(step, steps)
        optimizer.step()


def reduce(state: State, scatter: OnePass, gathers: Sequence[OnePass]) -> list[dict[int, float]]:
    """Error of the reduced mean by world size, for phase two with each of ``gathers``."""
    running, decoded, out = (np.zeros(scatter.numel, np.float32) for _ in range(3))
    owned = {size: np.zeros(scatter.numel, np.float32) for size in state.means}
    errors: list[dict[int, float]] = [{} for _ in gathers]
    for rank, x in enumerate(state.gradients):
        scatter(x, decoded, index=state.step, sender=stream(SCATTER, rank))
        running += decoded
        for size, exact in owned.items():
            if rank < size:
                for part in owned_parts(scatter.segments, rank, size):
                    np.subtract(x[part], decoded[part], out=exact[part])
        size = rank + 1
        if size in owned:
            mean = (running + owned.pop(size)) * np.float32(1 / size)
            for gather, found in zip(gathers, errors, strict=True):
                gather(mean, out, index=state.step, sender=stream(GATHER, 0))
                found[size] = nmse(out, state.means[size])
    return errors


def owned_parts(segments: Sequence[Segment], rank: int, world_size: int) -> Iterator[slice]:
    """The stripes that ``rank`` owns, as slices of the flat gradient."""
    at = 0
    for segment in segments:
        stripe = segment.stripe_numel
        for index in np.flatnonzero(segment.owners(world_size) == rank).tolist():
            yield slice(at + index * stripe, at + min((index + 1) * stripe, segment.numel))
        at += segment.numel


def bias(x: Floats, one_pass: OnePass, keys: int) -> tuple[float, float, float]:
    """Error of one pass, shrinkage and averaging, over ``keys`` keys."""
    decoded, total = np.empty_like(x), np.zeros(len(x))
    errors = []
    for index in range(keys):
        one_pass(x, decoded, index=index, sender=stream(SCATTER, 0))
        errors.append(nmse(decoded, x.astype(np.float64)))
        total += decoded
    lost = total / keys - x
    energy = float(np.dot(x, x.astype(np.float64)))
    error = statistics.fmean(errors)
    return error, float(np.dot(lost, x)) / energy, float(np.dot(lost, lost)) / energy * keys / error


def measure_scatter(model_states: Sequence[State], pairs: Sequence[PhaseSpecs]) -> list[Row]:
    """Rows of all pairs that share their phase-one spec, on one model."""
    parameters = model_states[0].parameters
    scatter = OnePass(pairs[0].scatter, parameters)
    gathers = [OnePass(pair.gather, parameters) for pair in pairs]
    by_state = [reduce(state, scatter, gathers) for state in model_states]
    biases = [bias(state.gradients[0], scatter, BIAS_KEYS) for state in model_states]
    one_pass, shrinkage, averaging = (statistics.fmean(values) for values in zip(*biases, strict=True))
    return [
        Row(
            model=model_states[0].model,
            specs=str(pair),
            bits_per_element=(scatter.bits_per_element + gather.bits_per_element) / 2,
            one_pass=one_pass,
            reduced_mean={
                size: statistics.fmean(found[position][size] for found in by_state) for size in model_states[0].means
            },
            shrinkage=shrinkage,
            averaging=averaging,
        )
        for position, (pair, gather) in enumerate(zip(pairs, gathers, strict=True))
    ]


def measure(model_states: Sequence[State], groups: Sequence[Sequence[PhaseSpecs]], console: Console) -> list[Row]:
    """Rows of all groups of specs on one model, cheapest first."""
    name = model_states[0].model
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(partial(measure_scatter, model_states), groups)
        rows = [row for some in track(found, name, len(groups), console=console, transient=True) for row in some]
    return sorted(rows, key=lambda row: row.bits_per_element)


def fidelity(model_states: Sequence[State], specs: Sequence[Spec]) -> list[Row]:
    """One pass of each spec over many keys and steps of one model."""
    rows = []
    for spec in specs:
        one_pass = OnePass(spec, model_states[0].parameters)
        found = [bias(state.gradients[0], one_pass, FIDELITY_KEYS) for state in model_states]
        error, shrinkage, averaging = (statistics.fmean(values) for values in zip(*found, strict=True))
        bits = one_pass.bits_per_element
        rows.append(Row(model_states[0].model, str(spec), bits, error, {}, shrinkage, averaging))
    return rows


def best(rows: Sequence[Row], size: int) -> set[str]:
    """Specs of the unbiased rows than which none is both cheaper and closer at ``size`` ranks."""
    unbiased = [row for row in rows if row.is_unbiased]
    return {
        row.specs
        for row in unbiased
        if not any(
            other.bits_per_element <= row.bits_per_element and other.reduced_mean[size] < row.reduced_mean[size]
            for other in unbiased
        )
    }


def cells(row: Row) -> list[str]:
    return [
        row.specs.replace("uniform:", "").replace("block=", "").replace("rounding=", "").replace("scale=", ""),
        f"{row.bits_per_element:.2f}",
        f"{row.one_pass:#.3g}",
        *(f"{error:#.3g}" for error in row.reduced_mean.values()),
        f"{row.shrinkage:+.5f}",
        f"{row.averaging:.2f}",
    ]


def headers(row: Row) -> list[str]:
    sizes = [f"{size} ranks" for size in row.reduced_mean]
    return ["bits / block / rounding / scale", "bits per element", "one pass", *sizes, "shrinkage", "averaging"]


def draw(title: str, rows: Sequence[Row], marked: set[str]) -> Table:
    drawn = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, header in enumerate(headers(rows[0])):
        drawn.add_column(header, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        drawn.add_row(*cells(row), style="bold green" if row.specs in marked else None)
    return drawn


def markdown(title: str, rows: Sequence[Row], marked: set[str]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(headers(rows[0])) + " |"]
    lines.append("|---" + "|---:" * (len(headers(rows[0])) - 1) + "|")
    for row in rows:
        name, *numbers = cells(row)
        lines.append("| " + " | ".join([f"**{name}**" if row.specs in marked else name, *numbers]) + " |")
    return "\n".join(lines) + "\n"


def write(folder: Path, environment: Environment, tables: Sequence[tuple[str, Sequence[Row], set[str]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = (
        "# Rate and distortion\n\n"
        f"`{environment.command}` on {environment.cpu}; "
        + ", ".join(f"{name} {number}" for name, number in environment.versions.items())
        + ".\n\nErrors are relative squared errors, means over the steps. What the columns mean is said at the head "
        "of `benchmarks/rate_distortion.py`. In bold: unbiased, and nothing unbiased is both cheaper and closer to the "
        "mean at 8 ranks.\n"
    )
    body = [markdown(*each) for each in tables]
    (folder / "rate_distortion.md").write_text("\n".join([head, *body]), encoding="utf-8")
    rows = [{"table": title, **asdict(row)} for title, some, _ in tables for row in some]
    facts: dict[str, Any] = {"environment": environment.as_dict(), "seed": SEED, "rows": rows}
    (folder / "rate_distortion.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="a few specs on one model at one step, to try it out")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    environment = describe(["python", "benchmarks/rate_distortion.py", *sys.argv[1:]])
    grid = [PhaseSpecs(spec, spec) for spec in (GRID[6:10] if options.quick else GRID)]
    by_scatter: dict[Spec, list[PhaseSpecs]] = {}
    for pair in [*grid, *(PAIRS[:1] if options.quick else PAIRS)]:
        by_scatter.setdefault(pair.scatter, []).append(pair)
    ranks = 8 if options.quick else max(WORLD_SIZES)
    steps, fidelity_steps = (STEPS[:1], FIDELITY_STEPS[:1]) if options.quick else (STEPS, FIDELITY_STEPS)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    tables: list[tuple[str, Sequence[Row], set[str]]] = []
    for name, task in find_tasks(["convnet"] if options.quick else TASKS).items():
        console.print(f"Training the {name} and taking the gradients of {ranks} ranks at steps {steps} ...")
        found = list(states(name, task, dict.fromkeys(fidelity_steps, 1) | dict.fromkeys(steps, ranks)))
        rows = measure([state for state in found if state.means], list(by_scatter.values()), console)
        tables.append((f"{task.title}, steps {', '.join(map(str, steps))}", rows, best(rows, 8)))
        title = f"Fidelity of one pass, {name}: {len(found)} steps x {FIDELITY_KEYS} keys"
        tables.append((title, fidelity(found, FIDELITY_SPECS), {str(FIDELITY_SPECS[0])}))
    for each in tables:
        console.print(draw(*each))
    write(options.out, environment, tables)
    console.print(f"Written to {options.out}.")


if __name__ == "__main__":
    main()
